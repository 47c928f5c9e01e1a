"""A table of layers and models on a graph with several types of nodes and edges."""

from functools import cache

import torch
import torch_geometric.nn as pyg
from torch import nn

from tests.graph.typed import drawn

CHANNELS = {"a": 4, "b": 3, "c": 5}
EDGES = {
    ("a", "to", "b"): 40,
    ("b", "back", "a"): 31,
    ("a", "self", "a"): 45,
    ("a", "other", "a"): 12,
    ("c", "in", "a"): 10,  # other numbers than of nodes
    ("a", "of", "c"): 26,
    ("b", "none", "c"): 0,
}


@cache
def data_of():
    nodes = {"a": 14, "b": 9, "c": 6}
    return drawn({kind: (count, CHANNELS[kind]) for kind, count in nodes.items()}, EDGES)


def convs(make, **others):
    """A layer for each type of edges; others for some."""
    return {
        key: others.get(key[1], make)(CHANNELS[key[0]], CHANNELS[key[2]])
        for key in EDGES
        if others.get(key[1], make) is not None
    }


def sage(source, target):
    return pyg.SAGEConv((source, target), 6)


def gat(source, target):
    return pyg.GATConv((source, target), 3, heads=2, add_self_loops=False)


class TwoLayers(nn.Module):
    """A model that knows nothing of ranks, and leaves out edges before its second layer."""

    def __init__(self):
        super().__init__()
        loops = lambda source, target: pyg.GCNConv(source, 6)  # noqa: E731
        self.first = pyg.HeteroConv(convs(sage, self=loops, none=None), aggr="mean")
        kinds = [key for key in EDGES if key[1] != "none"]
        self.second = pyg.HeteroConv(
            {key: pyg.GATv2Conv((6, 6), 4, add_self_loops=key[0] == key[2]) for key in kinds}, "max"
        )

    def forward(self, x_dict, edge_index_dict, edge_weight_dict):
        x_dict = {key: x.tanh() for key, x in self.first(x_dict, edge_index_dict).items()}
        kept = {
            key: edges[:, edge_weight_dict[key] > 0.3] for key, edges in edge_index_dict.items()
        }
        return self.second(x_dict, edge_index_dict=kept)


class OneKind(nn.Module):
    """To be made a model for several types by PyG."""

    def __init__(self):
        super().__init__()
        self.first, self.second = pyg.SAGEConv((-1, -1), 6), pyg.GraphConv((-1, -1), 5)

    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index).tanh(), edge_index)


def metadata():
    return list(CHANNELS), list(EDGES)


def by_pyg():
    model = pyg.to_hetero(OneKind(), metadata())
    data = data_of()
    with torch.no_grad():
        model.double()(data.x_dict, data.edge_index_dict)  # makes its parameters
    return model


def of_types(*takes):
    """Return a call with the features of all types, and these attributes of all types of edges."""

    def call(model, g):
        # as the graph lists them: some layers depend on the order of types
        x_dict = {kind: getattr(g, f"x_{kind}") for kind in g.node_types}
        of_edges = {
            f"{what}_dict": {key: getattr(g, f"{what}_{'_'.join(key)}") for key in g.edge_types}
            for what in ("edge_index", *takes)
        }
        out = model(x_dict, of_edges.pop("edge_index_dict"), **of_edges)
        return tuple(value.flatten(1) for value in out.values() if value is not None)

    return call


def of_two_relations(layer, g):
    """Good and bad edges are of two types."""
    return layer(g.x_a, g.edge_index_a_self_a, g.edge_index_a_other_a)


def of_one_relation(layer, g):
    return layer(g.x_a, g.edge_index_a_other_a)


LAYERS = {
    "HeteroConv of SAGEConv": (lambda: pyg.HeteroConv(convs(sage)), ()),
    "HeteroConv of GATConv": (lambda: pyg.HeteroConv(convs(gat), aggr="max"), ()),
    "HeteroConv of several": (
        lambda: pyg.HeteroConv(
            convs(
                lambda source, target: pyg.GraphConv((source, target), 6),
                self=lambda source, target: pyg.GCNConv(source, 6),
                other=lambda source, target: pyg.GCNConv(source, 6, improved=True),
            ),
            aggr="cat",
        ),
        ("edge_weight",),
    ),
    "HeteroConv of edge features": (
        lambda: pyg.HeteroConv(
            convs(lambda source, target: pyg.TransformerConv((source, target), 6, edge_dim=2)),
            aggr=None,
        ),
        ("edge_attr",),
    ),
    "HeteroConv of directions": (
        lambda: pyg.HeteroConv(
            {key: pyg.DirGNNConv(pyg.SAGEConv(4, 5)) for key in EDGES if key[0] == key[2]}
        ),
        (),
    ),
    "HANConv": (lambda: pyg.HANConv(CHANNELS, 6, metadata(), heads=2), ()),
    "HGTConv": (lambda: pyg.HGTConv(CHANNELS, 6, metadata(), heads=3), ()),
    "HGTConv with skips": (lambda: pyg.HGTConv(CHANNELS, 4, metadata()), ()),
    "a model": (TwoLayers, ("edge_weight",)),
    "a model made by PyG": (by_pyg, ()),
    "SignedConv": (lambda: pyg.SignedConv(4, 5, first_aggr=True), of_two_relations),
    "GATConv by itself": (lambda: pyg.GATConv(4, 5), of_one_relation),
    "GCNConv by itself": (lambda: pyg.GCNConv(4, 5), of_one_relation),
}


def cases():
    """Return the cases: by features of all nodes, and by the attributes that a layer takes."""
    of_nodes, found = [f"x_{kind}" for kind in CHANNELS], {}
    for name, (make, takes) in LAYERS.items():
        call = of_types(*takes) if isinstance(takes, tuple) else takes
        of_edges = takes if isinstance(takes, tuple) else ()
        by = [*of_nodes, *(f"{what}_{'_'.join(key)}" for what in of_edges for key in EDGES)]
        found[name] = make, call, *by
    return found
