"""Layers in training and in forward mode, and what gcn_norm gives."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from tests.graph.against_one import assert_verdicts
from tests.graph.layers import example
from varcomm import ArgumentError
from varcomm.graph import distribute, partition

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


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
    with pytest.raises(ArgumentError, match="samples among them"):
        layer.get_attention_loss()
    return layer.eval().get_attention_loss().item()


def test_super_gat_in_training(worlds):
    assert worlds.run(3, super_gat) == [0] * 3


def by_functions(rank):
    """What gcn_norm gives by itself, in the order of the whole graph's edges."""
    data = example()
    graph = partition(data, method="random")
    ids = torch.cat([graph.owned_ids, graph.halo_ids])
    for settings in ({}, {"improved": True}, {"add_self_loops": False}):
        settings["dtype"] = torch.float64
        edges, weight = gcn_norm(data.edge_index, data.weight, 24, **settings)
        part, got = gcn_norm(graph.edge_index, graph.weight, graph.num_owned, **settings)
        mine = torch.isin(edges[1], graph.owned_ids)
        assert torch.equal(ids[part[0].plain], edges[0, mine])
        assert torch.equal(graph.owned_ids[part[0]], edges[0, mine])
        assert torch.equal(graph.owned_ids[part[1]], edges[1, mine])
        torch.testing.assert_close(got, weight[mine], **CLOSE)


def test_edges_and_weights_of_gcn_norm(worlds):
    assert worlds.run(3, by_functions) == [None] * 3


def along(layer, g):
    """Forward mode, twice; inside of it, whatever is computed is a tensor of another kind."""
    for _ in range(2):
        found = torch.func.jvp(
            lambda x: layer(x, g.edge_index).tanh(), (g.x.detach(),), (g.x.detach().cos(),)
        )
    # and what was kept is of use afterwards
    return *(one.detach() for one in found), layer(g.x, g.edge_index)


LAYERS = {
    "GraphConv": lambda: pyg.GraphConv(4, 4),
    "GCNConv": lambda: pyg.GCNConv(4, 4),
    "GATConv": lambda: pyg.GATConv(4, 4),
    "DirGNNConv": lambda: pyg.DirGNNConv(pyg.SAGEConv(4, 4)),
}


def forward_mode():
    return {name: (make, along) for name, make in LAYERS.items()}


def test_forward_mode(worlds):
    assert_verdicts(worlds, forward_mode, dict.fromkeys(LAYERS, "exact"))
