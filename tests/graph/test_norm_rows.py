"""Normalisation over rows of edges and of each type of nodes; pools of each type."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric.data import Data, HeteroData

import varcomm
from tests.graph.batches import FIRST
from tests.graph.graphs import split_by, wild
from tests.ops.comparing import Failures, assert_none
from tests.worlds import WORLDS
from varcomm import ArgumentError
from varcomm.graph import (
    distribute,
    global_add_pool,
    global_max_pool,
    global_norm,
    global_readout,
    partition,
)

IDLE = "a rank owns nothing"
slow = pytest.mark.slow


def learn(net, graph, call, ids, ranks=1):
    """Train a step, in which running statistics move twice.

    `call` gives results that have rows of nodes, by the type of these, results of all nodes, and
    the rows that were given.
    """
    call(net, graph)
    rows, pooled, given = call(net, graph)
    # each rank has all pooled values, which count once
    loss = sum(value.square().sum() for value in pooled.values()) / ranks
    for key, value in rows.items():
        weight = (ids[key].view(-1, 1) * 3 + torch.arange(value.shape[1])).sin()
        loss = loss + (value.sin() * weight).sum()
    loss.backward()
    return rows, pooled, {key: x.grad for key, x in given.items()}


def check(rank, model, call, data, ids_of, **settings):
    """Compare with one process; a rank owns nothing."""
    failures, ranks = Failures(), torch.distributed.get_world_size()
    stores = {None: data} if isinstance(data, Data) else {key: data[key] for key in NODES}
    owners = {key: split_by(IDLE, store.num_nodes, ranks) for key, store in stores.items()}
    graph = partition(data, method=owners.get(None, owners), **settings)
    torch.manual_seed(0)
    alone, ids = model().double(), ids_of(graph)
    together = distribute(copy.deepcopy(alone), graph)
    every = {key: torch.arange(store.num_nodes) for key, store in stores.items()}
    expected = learn(alone, data, call, every)
    got = learn(together, graph, call, ids, ranks)
    varcomm.data_parallel.sum_gradients(together)
    pairs = {"pooled": (got[1], expected[1])}
    for what, at in (("rows", 0), ("inputs", 2)):
        pairs[what] = got[at], {key: value[ids[key]] for key, value in expected[at].items()}
    pairs["parameters"] = [[p.grad for p in net.parameters()] for net in (together, alone)]
    pairs["running statistics"] = together.state_dict(), alone.state_dict()
    for what, (mine, theirs) in pairs.items():
        with failures.named(what):
            torch.testing.assert_close(mine, theirs, **FIRST)
    moved = [value for key, value in alone.named_buffers() if key.endswith("running_mean")]
    with failures.named("moved"):
        assert moved
        assert all(value.abs().sum() > 0 for value in moved)
    return failures


class OnEdges(nn.Module):
    """A norm over edges in each layer, and one over nodes between them."""

    def __init__(self):
        super().__init__()
        self.first = pyg.EdgeConv(pyg.MLP([8, 16, 16]), aggr="mean")
        self.norm = pyg.BatchNorm(16)
        norms = {"norm": "graph_norm", "act": "tanh"}
        self.second = pyg.EdgeConv(pyg.MLP([32, 8, 3], **norms), aggr="sum")

    def forward(self, x, edge_index):
        return self.second(self.norm(self.first(x, edge_index)), edge_index)


def on_edges(model, graph):
    x = graph.x.clone().requires_grad_()
    return {None: model(x, graph.edge_index)}, {}, {None: x}


def check_edges(rank, hops):
    return check(rank, OnEdges, on_edges, wild(), lambda g: {None: g.owned_ids}, hops=hops)


@pytest.mark.parametrize(
    ("ranks", "hops"), [(3, 1), (3, 2), *(pytest.param(r, 1, marks=slow) for r in (1, 2, 5))]
)
def test_norms_over_edges(worlds, ranks, hops):
    assert_none(worlds.run(ranks, check_edges, hops))


NODES = {"author": 11, "paper": 17}
EDGES = {
    ("author", "writes", "paper"): 40,
    ("paper", "cites", "paper"): 33,
    ("paper", "of", "author"): 29,
}


def papers(nodes=NODES):
    generator = torch.Generator().manual_seed(2)
    data = HeteroData()
    for kind, count in nodes.items():
        data[kind].x = torch.randn(count, 4, generator=generator).double()
        data[kind].batch = torch.arange(count) * 5 % 3
    for key, count in EDGES.items():
        ends = [torch.randint(nodes[end], (count,), generator=generator) for end in key[::2]]
        data[key].edge_index = torch.stack(ends)
    return data


class Hetero(nn.Module):
    """A norm for each type of nodes and, in a layer, of edges; a pool and a readout of each."""

    def __init__(self):
        super().__init__()
        layers = {key: pyg.SAGEConv((4, 4), 6) for key in EDGES}
        layers["paper", "cites", "paper"] = pyg.EdgeConv(pyg.MLP([8, 6, 6]))
        self.layer = pyg.HeteroConv(layers)
        self.norms = nn.ModuleDict({kind: pyg.BatchNorm(6) for kind in NODES})
        self.read = pyg.MultiAggregation(["max", "std"])

    def forward(self, x_dict, edge_index_dict, batch_dict):
        x_dict = self.layer(x_dict, edge_index_dict)
        x_dict = {kind: self.norms[kind](x).tanh() for kind, x in x_dict.items()}
        pooled = {
            kind: torch.cat(
                [pyg.global_mean_pool(x, batch_dict[kind]), self.read(x, batch_dict[kind])], dim=1
            )
            for kind, x in x_dict.items()
        }
        return x_dict, pooled


def on_papers(model, graph):
    x_dict = {kind: graph[kind].x.clone().requires_grad_() for kind in NODES}
    batch_dict = {kind: graph[kind].batch for kind in NODES}
    return *model(x_dict, graph.edge_index_dict, batch_dict), x_dict


def check_hetero(rank):
    return check(
        rank, Hetero, on_papers, papers(), lambda g: {kind: g[kind].owned_ids for kind in NODES}
    )


@pytest.mark.parametrize("ranks", WORLDS)
def test_norms_and_pools_of_each_type(worlds, ranks):
    assert_none(worlds.run(ranks, check_hetero))


def error_of(fn, *args):
    with pytest.raises(ArgumentError) as caught:
        fn(*args)
    return str(caught.value)


def batch_norm_on(where):
    module = nn.BatchNorm1d(1)
    module.forward = global_norm(module, where)
    return module


def no_row_fits(rank):
    """Rows that fit on one rank alone are refused on all; the next call may be the first to fit."""
    graph = partition(wild(), method="block")
    nodes, edges = torch.ones(graph.num_owned, 1), torch.ones(graph.edges.num_owned, 1)
    norm, rows = batch_norm_on(graph), [nodes, edges]
    with_halo = torch.ones(graph.num_owned + graph.num_halo, 1)
    for x, message in (
        (
            torch.ones(1000, 1) if rank == 1 else nodes,
            "refused on rank 1 of 3: x must have one row for each",
        ),
        (rows[rank % 2], "no rows of the same kind on all ranks"),
        (with_halo if rank == 1 else edges, "no rows of the same kind on all ranks"),
    ):
        assert message in error_of(norm, x)
    assert norm(edges).shape == edges.shape
    # from now on it serves one kind of rows, and so does a copy
    for module in (norm, copy.deepcopy(norm)):
        assert f"rank {rank} of 3" in error_of(module, nodes)


def ambiguous(rank):
    """Two nodes and four edges on each of two ranks, with two more nodes in the halo."""
    node = torch.arange(4)
    both_ways = torch.cat(
        [torch.stack([node, node.roll(1)]), torch.stack([node, node.roll(-1)])], 1
    )
    graph = partition(Data(edge_index=both_ways, num_nodes=4), method="block")
    # as values of nodes with the halo, these have another mean
    x = torch.arange(4.0).view(4, 1) ** 2
    told = error_of(batch_norm_on(graph), x)
    norm, nodes = batch_norm_on(graph.edges), batch_norm_on(graph.nodes)
    norm(x)
    assert norm.running_mean.item() == pytest.approx(0.1 * 3.5)
    assert "x must have one row for each" in error_of(nodes, x)
    assert nodes(x[:2]).shape == (2, 1)
    assert told.startswith("BatchNorm1d: on every rank, x may have rows of nodes or of edges")
    assert "varcomm.graph.global_norm(module, graph.nodes)" in told


@pytest.mark.slow
def test_rows_that_may_be_of_nodes_or_of_edges(worlds):
    assert worlds.run(2, ambiguous) == [None] * 2


def which_type(rank):
    data = papers({"author": 9, "paper": 9})
    graph = partition(data, method="block")
    x, batch = graph["paper"].x, graph["paper"].batch
    read = pyg.SumAggregation()
    read.forward = global_readout(read, graph)
    many = ": x has as many rows as there are nodes of 'author' and .*graph\\['author'\\]"
    none = "x must have one row for each of the 3 owned nodes of 'author', or for each"
    for message, call, *given in (
        (f"^global_add_pool{many}", global_add_pool, x, batch, graph),
        (f"^SumAggregation{many}", read, x, batch),
        (none, global_max_pool, torch.ones(100, 1), None, graph),
        # on rank 0 it would do
        ("refused on rank 1 of 3", global_add_pool, x if rank == 0 else x[:0], None, graph),
    ):
        with pytest.raises(ArgumentError, match=message):
            call(*given)
    read.forward = global_readout(read, graph["paper"])
    expected = pyg.global_add_pool(data["paper"].x, data["paper"].batch)
    torch.testing.assert_close(global_add_pool(x, batch, graph["paper"]), expected, **FIRST)
    torch.testing.assert_close(read(x, batch), expected, **FIRST)
    edges = graph["paper", "cites", "paper"]
    count = global_add_pool(torch.ones(edges.num_owned), None, edges)
    assert count.item() == EDGES["paper", "cites", "paper"]


@pytest.mark.parametrize("use", [no_row_fits, which_type])
def test_rows_that_do_not_fit_are_refused_on_all_ranks(worlds, use):
    assert worlds.run(3, use) == [None] * 3
