"""One exchange for several layers gives what one exchange a layer gives, and one process does."""

import re

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch.utils.checkpoint import checkpoint

import varcomm
from tests.graph.against_one import compare
from tests.graph.graphs import split_by, wild
from tests.worlds import on_ranks
from varcomm import ArgumentError
from varcomm.graph import distribute, partition
from varcomm.models import MeshGraphNet

CLOSE = {"rtol": 1e-10, "atol": 1e-10}

slow = pytest.mark.slow


class Pooled(nn.Module):
    """Reads out graphs of a batch after two layers."""

    def __init__(self):
        super().__init__()
        self.body = pyg.GCN(4, 6, 2, 6, norm="graph_norm")
        self.readout = pyg.AttentionalAggregation(nn.Linear(6, 1))

    def forward(self, x, edge_index, batch):
        return self.readout(self.body(x, edge_index, batch=batch), batch)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([pyg.GATConv(4, 4), pyg.SAGEConv(4, 4)])

    def forward(self, x, edge_index):
        for layer in self.layers:
            x = checkpoint(layer, x.tanh(), edge_index, use_reentrant=False)
        return {"rows": x, "twice": [2 * x]}


# how to make a model, what it takes after x and the edges, and how often it propagates in a row
MODELS = {
    "GCN and BatchNorm": (lambda: pyg.GCN(4, 8, 3, 2, norm="batch_norm"), (), 3),
    "GAT": (lambda: pyg.GAT(4, 8, 2, 2, heads=2, v2=True), (), 2),
    "one GCN layer": (lambda: pyg.GCNConv(4, 3), ("edge_weight",), 1),
    "hops of its own": (lambda: pyg.TAGConv(4, 3, K=2), ("edge_weight",), 2),
    "GIN": (lambda: pyg.GIN(4, 6, 2, 3, norm="graph_norm", jk="cat"), (), 2),
    "edge features": (
        lambda: MeshGraphNet(4, 3, 2, hidden_channels=8, num_blocks=2),
        ("edge_attr",),
        2,
    ),
    "pooled": (Pooled, ("batch",), 2),
    "checkpointed, in a dict": (Checkpointed, (), 2),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("ranks", [3, pytest.param(1, marks=slow), pytest.param(2, marks=slow)])
@on_ranks()
def test_one_exchange_equals_one_per_layer(rank, ranks, name):
    data, method = wild(), split_by("a rank owns nothing", 24, ranks)
    data.batch, data.edge_weight = torch.arange(24) % 3, data.edge_weight.abs()
    make, extra, needed = MODELS[name]

    def call(model, g):
        out = model(g.x, g.edge_index, *(getattr(g, key) for key in extra))
        return out["rows"] + out["twice"][0] if isinstance(out, dict) else out

    wrong = []
    for hops in (max(2, needed), needed + 2):
        graph = partition(data, method=method, hops=hops)
        found = compare(make, call, data, graph, second=True, close=CLOSE)
        wrong += [f"{name}, {hops} hops: {one}" for one in found]
    return wrong


@on_ranks(3)
def test_exchanges(rank):
    for hops, count in ((1, 3), (3, 1)):
        graph = partition(wild(), method="random", hops=hops)
        torch.manual_seed(0)
        model = distribute(pyg.GraphSAGE(4, 8, 3, 2).double(), graph)
        with varcomm.trace() as calls:
            model(graph.x, graph.edge_index)
        assert [call.name for call in calls] == ["exchange"] * count


@on_ranks(3)
def test_in_two_blocks(rank):
    """Four layers, two at a time; then on a graph with halos of one hop."""
    torch.manual_seed(0)
    data = wild()
    model = nn.ModuleList([pyg.GCN(4, 8, 2, 4), pyg.GCN(4, 8, 2, 4)]).double()
    whole = model[1](model[0](data.x, data.edge_index), data.edge_index)
    for hops in (2, 1, 2):
        graph = partition(data, method="random", hops=hops)
        for block in model:
            distribute(block, graph)
        with varcomm.trace() as calls:
            x = model[1](model[0](graph.x, graph.edge_index), graph.edge_index)
        torch.testing.assert_close(x, whole[graph.owned_ids], **CLOSE)
    # degrees of sources are sent in each layer of GCN
    assert [call.name for call in calls].count("exchange") == 2 + 4


def sage():
    return pyg.SAGEConv(4, 4).double()


# a model, the rows of its calls, and what is wrong
WRONG = [
    (
        lambda: pyg.GCN(4, 4, 3).double(),
        [lambda graph: graph.x],
        "the model propagates more than 2 times, for which the halos of 2 hops do not suffice",
    ),
    (
        lambda: nn.Sequential(pyg.ChebConv(4, 4, 2)),
        [lambda graph: graph.x],
        "0 (ChebConv): it",
    ),
    (sage, [lambda graph: wild().x], "edges select from 24 rows, but this rank"),
    (
        sage,
        [lambda graph: graph.x, lambda graph: graph.x[1:]],
        "stands where one with a row for each of the",
    ),
]


@on_ranks(3)
def test_wrong_use(rank):
    graph = partition(wild(), method="random", hops=2)
    for make, calls, message in WRONG:
        torch.manual_seed(0)
        model = make()

        def use(model=model, calls=calls):
            distribute(model, graph)
            for rows in calls:
                model(rows(graph), graph.edge_index)

        with pytest.raises(ArgumentError, match=re.escape(message)):
            use()
