"""PyG's layers called as PyG's own tests call them: exact, or refused on all ranks."""

import torch
import torch_geometric.nn as pyg
from torch import nn

from tests.graph.against_one import assert_verdicts, two_types
from tests.graph.layers import EDGE, NODE, mlp

PAIR = (4, 3)
BY = ("x_a", "x_b")


def between(make, *takes, by=BY):
    """Return a layer from one type to another, called with features of both."""
    return (
        make,
        lambda m, g: m((g.x_a, g.x_b), g.edge_index, *(getattr(g, key) for key in takes)),
        *by,
    )


def from_sources(make, *takes):
    """Return a layer called without features of targets, whose number `size` has."""

    def call(m, g):
        more = [getattr(g, key) for key in takes]
        return m((g.x_a, None), g.edge_index, *more, size=(len(g.x_a), len(g.x_b)))

    return make, call, "x_a"


def points(make, features=True, normals=False):
    def call(m, g):
        more = [(g.normal_a, g.normal_b)] if normals else []
        x = (g.x_a, g.x_b) if features == "both" else (g.x_a, None)
        return m(x, (g.pos_a, g.pos_b), *more, g.edge_index)

    return make, call, "x_a", "pos_a", "pos_b"


def with_attention(m, g):
    out, (edges, alpha) = m((g.x_a, g.x_b), g.edge_index, return_attention_weights=True)
    return out, torch.zeros(len(g.x_b), 2).double().index_add(0, edges[1], alpha)


def of_types(m, g):
    return m({"a": g.x_a, "b": g.x_b}, {("a", "to", "b"): g.edge_index})["b"]


METADATA = (["a", "b"], [("a", "to", "b")])

TYPES = {
    "HGTConv, lazy": (
        lambda: pyg.HGTConv(-1, 6, METADATA, heads=2),
        of_types,
        *BY,
    ),
    "SAGEConv": between(lambda: pyg.SAGEConv(PAIR, 5)),
    "SAGEConv of sources": from_sources(lambda: pyg.SAGEConv(PAIR, 5)),
    "SAGEConv, lazy": between(lambda: pyg.SAGEConv((-1, -1), 5)),
    "GraphConv": between(lambda: pyg.GraphConv(PAIR, 5), "weight"),
    "GraphConv of sources": from_sources(lambda: pyg.GraphConv(PAIR, 5), "weight"),
    "GATConv": between(lambda: pyg.GATConv(PAIR, 5, heads=2, add_self_loops=False)),
    "GATConv of sources": from_sources(lambda: pyg.GATConv(PAIR, 5, add_self_loops=False)),
    "GATConv, weights of attention": (
        lambda: pyg.GATConv(PAIR, 5, heads=2, add_self_loops=False),
        with_attention,
        *BY,
    ),
    "GATv2Conv": between(lambda: pyg.GATv2Conv(PAIR, 5, add_self_loops=False)),
    "TransformerConv": between(lambda: pyg.TransformerConv(PAIR, 5, 2, edge_dim=2), "attr"),
    "GINConv of sources": from_sources(lambda: pyg.GINConv(mlp(4, 5))),
    "NNConv": between(lambda: pyg.NNConv(PAIR, 5, mlp(2, 20)), "attr"),
    "NNConv of sources": from_sources(lambda: pyg.NNConv(PAIR, 5, mlp(2, 20)), "attr"),
    "MFConv": between(lambda: pyg.MFConv(PAIR, 5, 3)),
    "LEConv": between(lambda: pyg.LEConv(PAIR, 5), "weight"),
    "CGConv": between(lambda: pyg.CGConv(PAIR, 2), "attr"),
    "GENConv": between(lambda: pyg.GENConv(PAIR, 5, norm=None, edge_dim=2), "attr"),
    "GMMConv": between(lambda: pyg.GMMConv(PAIR, 5, 2, 3), "attr"),
    "GMMConv, lazy": between(lambda: pyg.GMMConv((-1, -1), 5, 2, 3, True), "attr"),
    "GMMConv of sources": from_sources(lambda: pyg.GMMConv(PAIR, 5, 2, 3), "attr"),
    "ResGatedGraphConv": between(lambda: pyg.ResGatedGraphConv(PAIR, 5)),
    "FiLMConv": between(lambda: pyg.FiLMConv(PAIR, 5, 3), "kind"),
    "RGCNConv": between(lambda: pyg.RGCNConv(PAIR, 5, 3), "kind"),
    "GeneralConv": between(lambda: pyg.GeneralConv(PAIR, 5, 2), "attr"),
    "SimpleConv": between(lambda: pyg.SimpleConv("mean"), by=("x_a",)),
    "PointNetConv": points(lambda: pyg.PointNetConv(mlp(7, 5), mlp(5, 3), add_self_loops=False)),
    "PointNetConv, tied maxima": points(
        lambda: pyg.PointNetConv(nn.Sequential(mlp(7, 5), nn.ReLU()), add_self_loops=False)
    ),
    "PointTransformerConv": points(
        lambda: pyg.PointTransformerConv(PAIR, 5, add_self_loops=False), features="both"
    ),
    "PPFConv": points(lambda: pyg.PPFConv(mlp(8, 5), add_self_loops=False), normals=True),
}
# PyG adds loops in numbers of either type, which mean nothing
LOOPS = {
    "GATConv with loops": between(lambda: pyg.GATConv(PAIR, 5)),
    "GATv2Conv with loops": between(lambda: pyg.GATv2Conv(PAIR, 5)),
    "HeteroConv of a GATConv": (
        lambda: pyg.HeteroConv({("a", "to", "b"): pyg.GATConv(PAIR, 5)}),
        of_types,
        *BY,
    ),
    "PointNetConv with loops": points(lambda: pyg.PointNetConv(mlp(7, 5))),
    "PointTransformerConv with loops": points(
        lambda: pyg.PointTransformerConv(PAIR, 5), features="both"
    ),
    "PPFConv with loops": points(lambda: pyg.PPFConv(mlp(8, 5)), normals=True),
}


def types():
    return TYPES | LOOPS


def test_layers_between_two_types(worlds):
    expected = dict.fromkeys(TYPES, "exact") | dict.fromkeys(LOOPS, "refused")
    assert_verdicts(worlds, types, expected, two_types)


def sized(m, g):
    return m((g.x, g.x), g.edge_index, size=(len(g.x), len(g.x)))


ONE = {
    "HGTConv of one type": (
        lambda: pyg.HGTConv(NODE, 6, (["a"], [("a", "to", "a")])),
        lambda m, g: m({"a": g.x}, {("a", "to", "a"): g.edge_index})["a"],
    ),
    "size": (lambda: pyg.SAGEConv(NODE, 5), sized),
    "attention": (
        lambda: pyg.TransformerConv(NODE, 5, 2, edge_dim=EDGE),
        lambda m, g: m(g.x, g.edge_index, g.edge_attr, return_attention_weights=True)[0],
    ),
    "attention with loops": (
        lambda: pyg.GATv2Conv(NODE, 5, 2),
        lambda m, g: m(g.x, g.edge_index, return_attention_weights=True)[0],
    ),
    "the same targets": (lambda: pyg.GraphConv(NODE, 5), lambda m, g: m((g.x, g.x), g.edge_index)),
    "against the edges": (
        lambda: pyg.GCNConv(NODE, 5, flow="target_to_source"),
        lambda m, g: m(g.x, g.edge_index, g.weight),
        "x",
        "weight",
    ),
    "against the edges, maxima": (
        lambda: pyg.SAGEConv(NODE, 5, aggr="max", flow="target_to_source"),
        lambda m, g: m(g.x, g.edge_index),
    ),
    "kept": (
        lambda: pyg.GCNConv(NODE, 5, cached=True),
        lambda m, g: m(g.x, g.edge_index) + m(g.x.sin(), g.edge_index),
    ),
    "lazy": (
        lambda: pyg.GMMConv(-1, 5, 2, 3),
        lambda m, g: m(g.x, g.edge_index, g.pseudo),
        "x",
        "pseudo",
    ),
    "some edges": (
        lambda: pyg.GINEConv(mlp(NODE, 5), edge_dim=EDGE),
        lambda m, g: m(g.x, g.edge_index[:, g.positive], g.edge_attr[g.positive]),
    ),
}
REFUSED = {
    "numbers of nodes": (
        lambda: pyg.RGCNConv(24, 5, 3),
        lambda m, g: m(None, g.edge_index, g.edge_type),
    ),
}


def one():
    return ONE | REFUSED


def test_layers_on_one_type(worlds):
    expected = dict.fromkeys(ONE, "exact") | dict.fromkeys(REFUSED, "refused")
    assert_verdicts(worlds, one, expected)
