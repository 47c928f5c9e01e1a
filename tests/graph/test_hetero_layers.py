"""Layers and models on graphs with several types of nodes and edges, as in one process."""

from functools import cache

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric.data import Data, HeteroData

from tests.graph.against_one import CLOSE, IDLE, assert_verdicts, graph_of
from tests.worlds import on_ranks
from varcomm import ArgumentError
from varcomm.graph import distribute, partition

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
    generator = torch.Generator().manual_seed(4)
    data = HeteroData()
    for kind, nodes in {"a": 14, "b": 9, "c": 6}.items():
        data[kind].x = torch.randn(nodes, CHANNELS[kind], generator=generator).double()
    for (source, name, target), edges in EDGES.items():
        ends = [
            torch.randint(data[end].num_nodes, (edges,), generator=generator)
            for end in (source, target)
        ]
        data[source, name, target].edge_index = torch.stack(ends)
        weight = torch.rand(edges, generator=generator).double()
        data[source, name, target].edge_weight = weight
        data[source, name, target].edge_attr = weight[:, None] ** torch.arange(2)
    return data


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


def layers():
    """Return the cases: by features of all nodes, and by the attributes that a layer takes."""
    of_nodes, found = [f"x_{kind}" for kind in CHANNELS], {}
    for name, (make, takes) in LAYERS.items():
        call = of_types(*takes) if isinstance(takes, tuple) else takes
        of_edges = takes if isinstance(takes, tuple) else ()
        by = [*of_nodes, *(f"{what}_{'_'.join(key)}" for what in of_edges for key in EDGES)]
        found[name] = make, call, *by
    return found


@pytest.mark.parametrize(
    ("ranks", "method"),
    [(3, IDLE), *(pytest.param(ranks, "random", marks=pytest.mark.slow) for ranks in (1, 2, 3, 5))],
)
def test_layers_equal_their_single_process_twins(worlds, ranks, method):
    expected = dict.fromkeys(LAYERS, "exact")
    assert_verdicts(worlds, layers, expected, data_of, ranks, method, second=True)


@on_ranks(3)
def test_types_of_edges(rank):
    """Copies of edges are still of their type; ordinary tensors and other edges are refused."""
    torch.manual_seed(0)
    graph = graph_of(data_of(), "random")
    layer = distribute(pyg.SAGEConv(4, 5).double(), graph)
    edges, x = graph["a", "self", "a"].edge_index, graph["a"].x
    expected = layer(x, edges)
    torch.testing.assert_close(layer(x, edges.clone()), expected)
    with pytest.raises(
        ArgumentError, match=r"propagate on .*edges must be given as graph.edge_ind"
    ):
        layer(x, edges.plain)
    kind = ("a", "to", "b")
    layer = distribute(pyg.HeteroConv({kind: pyg.SAGEConv((4, 3), 5).double()}), graph)
    edges = graph[kind].edge_index
    loops = torch.arange(min(graph["a"].num_owned, graph["b"].num_owned)).expand(2, -1)
    with pytest.raises(ArgumentError, match="no self loops"):
        layer(graph.x_dict, {kind: torch.cat([edges, loops], dim=1)})
    fewer = layer(graph.x_dict, {kind: edges[:, ::2]})
    assert fewer["b"].shape == (graph["b"].num_owned, 5)


@on_ranks(3)
def test_bases(rank):
    """PyG adds offsets to the ids of all types."""
    graph, edges = graph_of(data_of()), ["to", "back"]
    kinds = [key for key in EDGES if key[1] in edges]
    model = pyg.to_hetero_with_bases(OneKind(), (["a", "b"], kinds), 2, {"x": 4})
    for name, parameter in model.named_parameters():
        if "edge_type_weight" in name:  # which PyG leaves as memory was
            nn.init.ones_(parameter)
    x_dict = {kind: graph[kind].x.float() for kind in ("a", "b")}
    model = distribute(model, graph)
    with pytest.raises(ArgumentError, match="Operations in place"):
        model(x_dict, {key: graph[key].edge_index for key in kinds})


@on_ranks(3)
def test_moved(rank):
    """From a graph with several types to one with a single type, and back."""
    torch.manual_seed(0)
    layer, data, graph = pyg.SGConv(4, 5).double(), data_of(), graph_of(data_of(), "random")
    plain = data["a", "other", "a"].edge_index
    whole = layer(data["a"].x, plain)
    alone = partition(Data(x=data["a"].x, edge_index=plain), method="block")
    for _ in range(2):
        part = distribute(layer, graph)(graph["a"].x, graph["a", "other", "a"].edge_index)
        torch.testing.assert_close(part, whole[graph["a"].owned_ids], **CLOSE)
        part = distribute(layer, alone)(alone.x, alone.edge_index)
        torch.testing.assert_close(part, whole[alone.owned_ids], **CLOSE)
    assert "forward" not in vars(layer)
