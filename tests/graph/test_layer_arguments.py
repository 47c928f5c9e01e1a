"""What single layers, and functions of PyG, take on a part of a graph, and what they refuse."""

import copy
import re

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric.data import HeteroData
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import add_remaining_self_loops, add_self_loops, get_laplacian

import varcomm
from tests.graph.layers import example
from varcomm import ArgumentError
from varcomm.graph import distribute, partition

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


class Calls(nn.Module):
    """A model which is nothing but a call."""

    def __init__(self, function, **settings):
        super().__init__()
        self.function, self.settings = function, settings

    def forward(self, edge_index, **more):
        return self.function(edge_index, **self.settings, **more)


def seeded(make):
    torch.manual_seed(0)
    return make().double()


def super_gat(rank):
    """In training it gives what it gives without, but has no loss of attention."""
    data = example()
    graph = partition(data, method="random")
    layer = seeded(lambda: pyg.SuperGATConv(4, 3, heads=2))
    expected = copy.deepcopy(layer)(data.x, data.edge_index)
    distribute(layer, graph)
    for _ in range(2):
        out = layer(graph.x, graph.edge_index)
        torch.testing.assert_close(out, expected[graph.owned_ids], **CLOSE)
    with pytest.raises(
        ArgumentError, match=r"get_attention_loss on .* the loss of attention samples"
    ):
        layer.get_attention_loss()
    return layer.eval().get_attention_loss().item()


def test_super_gat_in_training(worlds):
    assert worlds.run(3, super_gat) == [0] * 3


def refusals(rank):
    graph = partition(example(), method="random")
    n, edges = graph.num_owned, graph.edge_index
    laplacian, norm = Calls(get_laplacian), Calls(gcn_norm)
    cases = {
        f"num_nodes is {n + 1}, but this rank owns {n} nodes. Use num_nodes=graph.num_nodes": (
            lambda: norm(edges, num_nodes=n + 1)
        ),
        "normalization must be None, 'sym' or 'rw'; got 'left'.": (
            lambda: laplacian(edges, normalization="left")
        ),
        "get_laplacian on": lambda: laplacian(edges + 30),
        "gcn_norm on": lambda: norm(edges.float()),
        "not supported": lambda: norm(edges, flow="target_to_source"),
        "it looks up nodes by their ids, which are local here": (
            lambda: fast(graph.number, edges, graph.edge_type)
        ),
        f"'x' has 24 rows, but this rank owns {n} nodes": (
            lambda: rgcn(None, edges, graph.edge_type)
        ),
        f"GPSConv on rank {rank} of 3: x has {n + 1} rows, but this rank owns {n} nodes.": (
            lambda: gps(torch.zeros(n + 1, 4).double(), edges)
        ),
    }
    fast = seeded(lambda: pyg.FastRGCNConv(24, 5, 3))
    rgcn = seeded(lambda: pyg.RGCNConv(24, 5, 3))
    gps = seeded(lambda: pyg.GPSConv(4, None, norm=None))
    for model in (laplacian, norm, fast, rgcn, gps):
        distribute(model, graph)
    for message, call in cases.items():
        with pytest.raises(ArgumentError, match=re.escape(message)):
            call()


def test_arguments_that_do_not_fit(worlds):
    assert worlds.run(3, refusals) == [None] * 3


def two_types(rank):
    data = HeteroData()
    data["a"].num_nodes = 6
    for name in ("to", "from"):
        data["a", name, "a"].edge_index = torch.tensor([[0, 1, 5], [3, 4, 2]])
    graph = partition(data, method="block")
    edges = graph["a", "to", "a"].edge_index
    for function in (add_self_loops, add_remaining_self_loops, gcn_norm):
        model = distribute(Calls(function), graph)
        with pytest.raises(ArgumentError, match="in a graph with types of edges, give num_nodes=x"):
            model(edges)
        model(edges, num_nodes=graph["a"].num_owned)


def test_self_loops_in_a_graph_with_several_types(worlds):
    assert worlds.run(3, two_types) == [None] * 3


def by_functions(rank):
    """What the functions give by themselves, in the order of the whole graph's edges."""
    data = example()
    graph = partition(data, method="random")
    for settings in ({}, {"improved": True}, {"add_self_loops": False}):
        model = Calls(gcn_norm, dtype=torch.float64, num_nodes=24, **settings)
        edges, weight = model(data.edge_index, edge_weight=data.weight)
        model.settings["num_nodes"] = graph.num_nodes
        part, got = distribute(model, graph)(graph.edge_index, edge_weight=graph.weight)
        ids = torch.cat([graph.owned_ids, graph.halo_ids])
        mine = torch.isin(edges[1], graph.owned_ids)
        assert torch.equal(ids[part[0]], edges[0, mine])
        assert torch.equal(graph.owned_ids[part[1]], edges[1, mine])
        torch.testing.assert_close(got, weight[mine], **CLOSE)


def test_edges_and_weights_of_gcn_norm(worlds):
    assert worlds.run(3, by_functions) == [None] * 3


def along(layer, graph, x, direction):
    """Forward mode; inside of it, whatever is computed is a tensor of another kind."""
    out, tangent = torch.func.jvp(lambda x: layer(x, graph.edge_index).tanh(), (x,), (direction,))
    return out, tangent


LAYERS = {
    "GraphConv": lambda: pyg.GraphConv(4, 4),
    "GCNConv": lambda: pyg.GCNConv(4, 4),
    "GATConv": lambda: pyg.GATConv(4, 4),
    "DirGNNConv": lambda: pyg.DirGNNConv(pyg.SAGEConv(4, 4)),
}


def forward_mode(rank):
    for make in LAYERS.values():
        check_forward_mode(make)


def check_forward_mode(make):
    data = example()
    graph = partition(data, method="random")
    layer = seeded(make)
    expected = along(layer, data, data.x, data.x.cos())
    distribute(layer, graph)
    for _ in range(2):
        got = along(layer, graph, graph.x, graph.x.cos())
        for part, whole in zip(got, expected, strict=True):
            torch.testing.assert_close(part, whole[graph.owned_ids], **CLOSE)
        # and what was kept is of use afterwards
        assert layer(graph.x, graph.edge_index).isfinite().all()


def test_forward_mode(worlds):
    assert worlds.run(3, forward_mode) == [None] * 3


def reversals(rank):
    """Reversed edges are kept while no rank has others; on one rank edges may be left out."""
    data = example()
    graph = partition(data, method="random")
    layer = seeded(lambda: pyg.DirGNNConv(pyg.GraphConv(4, 4)))
    kept = torch.ones(data.num_edges, dtype=torch.bool)
    kept[torch.isin(data.edge_index[1], graph.owned_ids).nonzero().view(-1)[::2]] = False
    kept = torch.stack(varcomm.all_gather_v(kept.int(), [len(kept)] * 3).chunk(3))[1] > 0
    expected = [layer(data.x, edges) for edges in (data.edge_index, data.edge_index[:, kept])]
    distribute(layer, graph)
    own = torch.isin(data.edge_index[1], graph.owned_ids)
    edges, fewer = graph.edge_index, graph.edge_index[:, kept[own]]
    sent = []
    for given, want in ((edges, 0), (edges, 0), (fewer, 1), (edges, 0), (edges.clone(), 0)):
        with varcomm.trace() as calls:
            out = layer(graph.x, given)
        torch.testing.assert_close(out, expected[want][graph.owned_ids], **CLOSE)
        sent.append(sum(call.sent for call in calls))
    return sent[1] < sent[0], sent[2] > sent[1], sent[4] == sent[1]


def test_reversed_edges_are_kept(worlds):
    assert worlds.run(3, reversals) == [(True, True, True)] * 3
