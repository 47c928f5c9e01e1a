"""Layers and models on graphs with several types of nodes and edges, as in one process."""

import copy
from functools import cache

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric.data import Data, HeteroData

import varcomm
from tests.graph.graphs import split_by
from tests.ops.comparing import Failures, assert_none
from varcomm import ArgumentError
from varcomm.graph import distribute, partition

CLOSE = {"rtol": 1e-12, "atol": 1e-12}

CHANNELS = {"a": 4, "b": 3, "c": 5}
EDGES = {
    ("a", "to", "b"): 40,
    ("b", "back", "a"): 31,
    ("a", "self", "a"): 45,
    ("a", "other", "a"): 12,
    ("c", "in", "a"): 9,
    ("a", "in", "c"): 26,
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


@cache
def graph_of(method):
    data, ranks = data_of(), torch.distributed.get_world_size()
    owners = {kind: split_by(method, data[kind].num_nodes, ranks) for kind in CHANNELS}
    return partition(data, method=owners if method == "a rank owns nothing" else method)


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
}


def outcome(model, graph, takes, weights):
    # as the graph lists them: some layers depend on the order of types
    x_dict = {key: x.clone().requires_grad_() for key, x in graph.x_dict.items()}
    edge_dict = graph.edge_index_dict
    more = {}
    for name in takes:
        values = {key: getattr(graph[key], name).clone().requires_grad_() for key in EDGES}
        more[f"{name}_dict"] = values
    out = model(x_dict, edge_dict, **more)
    out = {key: value.flatten(1) for key, value in out.items() if value is not None}
    loss = sum((value * weights[key][:, : value.shape[1]]).sum() for key, value in out.items())
    inputs = {("x", key): value for key, value in x_dict.items()}
    inputs |= {(name, key): v for name, values in more.items() for key, v in values.items()}
    by = inputs | {("", name): value for name, value in model.named_parameters()}
    settings = {"allow_unused": True, "materialize_grads": True}
    first = torch.autograd.grad(loss, [*by.values()], create_graph=True, **settings)
    found = {("output", key): value for key, value in out.items()}
    found |= dict(zip(by, first, strict=True))
    length = sum((gradient**2).sum() for name, gradient in zip(by, first, strict=True) if name[0])
    second = torch.autograd.grad(length, [*by.values()], **settings)
    found |= {(f"second {a}", b): value for (a, b), value in zip(by, second, strict=True)}
    return {name: value.detach() for name, value in found.items()}


@cache
def alone(name):
    make, takes = LAYERS[name]
    torch.manual_seed(0)
    model, data = make().double(), data_of()
    weights = {key: torch.randn(data[key].num_nodes, 64, dtype=torch.float64) for key in CHANNELS}
    return model, weights, outcome(copy.deepcopy(model), data, takes, weights)


def check_layers(rank, names, method):
    failures, graph = Failures(), graph_of(method)
    rows = {key: graph[key].owned_ids for key in (*CHANNELS, *EDGES)}
    for name in names:
        model, weights, expected = alone(name)
        model = distribute(copy.deepcopy(model), graph)
        own = {key: weights[key][rows[key]] for key in CHANNELS}
        got = outcome(model, graph, LAYERS[name][1], own)
        assert got.keys() == expected.keys()
        for (what, key), value in expected.items():
            part = got[what, key]
            if key in rows:
                value = value[rows[key]]
            else:
                part = varcomm.all_reduce(part)
            with failures.named(name, method, what, key):
                torch.testing.assert_close(part, value, **CLOSE)
    return failures


@pytest.mark.parametrize(
    ("ranks", "method"),
    [
        (3, "a rank owns nothing"),
        *(pytest.param(ranks, "random", marks=pytest.mark.slow) for ranks in (1, 2, 3, 5)),
    ],
)
def test_layers_equal_their_single_process_twins(worlds, ranks, method):
    assert_none(worlds.run(ranks, check_layers, [*LAYERS], method))


def signed(layer, graph):
    """Good and bad edges are of two types."""
    ends = (graph["a", "self", "a"].edge_index, graph["a", "other", "a"].edge_index)
    return layer(graph["a"].x, *ends)


def with_loops(layer, graph):
    return layer(graph["a"].x, graph["a", "other", "a"].edge_index)


CALLED_BY_ITSELF = {
    "SignedConv": (lambda: pyg.SignedConv(4, 5, first_aggr=True), signed),
    "GATConv": (lambda: pyg.GATConv(4, 5), with_loops),
    "GCNConv": (lambda: pyg.GCNConv(4, 5), with_loops),
}


def called_by_itself(rank):
    for make, call in CALLED_BY_ITSELF.values():
        torch.manual_seed(0)
        layer, data, graph = make().double(), data_of(), graph_of("random")
        whole = call(layer, data)
        part = call(distribute(layer, graph), graph)
        torch.testing.assert_close(part, whole[graph["a"].owned_ids], **CLOSE)


def types_of_edges(rank):
    """Copies of edges are still of their type; ordinary tensors and other edges are refused."""
    torch.manual_seed(0)
    graph = graph_of("random")
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


def moved(rank):
    """From a graph with several types to one with a single type, and back."""
    torch.manual_seed(0)
    layer, data, graph = pyg.GCNConv(4, 5).double(), data_of(), graph_of("random")
    whole = with_loops(layer, data)
    plain = data["a", "other", "a"].edge_index
    alone = partition(Data(x=data["a"].x, edge_index=plain), method="block")
    for _ in range(2):
        part = with_loops(distribute(layer, graph), graph)
        torch.testing.assert_close(part, whole[graph["a"].owned_ids], **CLOSE)
        part = distribute(layer, alone)(alone.x, alone.edge_index)
        torch.testing.assert_close(part, whole[alone.owned_ids], **CLOSE)
    assert "forward" not in vars(layer)


def of_one_type(rank):
    data, kinds = data_of(), (["a"], [("a", "self", "a")])
    edges = data["a", "self", "a"].edge_index
    graph = partition(Data(x=data["a"].x, edge_index=edges), method="block")
    torch.manual_seed(0)
    layer = pyg.HGTConv(4, 6, kinds).double()
    whole = layer({"a": data["a"].x}, {kinds[1][0]: edges})["a"]
    part = distribute(layer, graph)({"a": graph.x}, {kinds[1][0]: graph.edge_index})["a"]
    torch.testing.assert_close(part, whole[graph.owned_ids], **CLOSE)


@pytest.mark.parametrize("use", [called_by_itself, types_of_edges, moved, of_one_type])
def test_single_layers(worlds, use):
    assert worlds.run(3, use) == [None] * 3
