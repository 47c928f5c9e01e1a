"""What single layers, and functions of PyG, take on a part of a graph, and what they refuse."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import get_laplacian

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
    fast = seeded(lambda: pyg.FastRGCNConv(24, 5, 3))
    rgcn = seeded(lambda: pyg.RGCNConv(24, 5, 3))
    gps = seeded(lambda: pyg.GPSConv(4, None, norm=None))
    for model in (laplacian, norm, fast, rgcn, gps):
        distribute(model, graph)
    for call in (
        lambda: norm(edges, num_nodes=n + 1),
        lambda: laplacian(edges + 30),
        lambda: norm(edges.float()),
        lambda: fast(graph.number, edges, graph.edge_type),
        lambda: rgcn(None, edges, graph.edge_type),
        lambda: gps(torch.zeros(n + 1, 4).double(), edges),
    ):
        with pytest.raises(ArgumentError):
            call()


def test_arguments_that_do_not_fit(worlds):
    assert worlds.run(3, refusals) == [None] * 3


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
        assert torch.equal(ids[part[0].plain], edges[0, mine])
        assert torch.equal(graph.owned_ids[part[0]], edges[0, mine])
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
