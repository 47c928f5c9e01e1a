"""Refusals of ``distribute``, on all ranks and before anything changes, and of models' calls."""

from functools import partial

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.nn.models.schnet import RadiusInteractionGraph
from torch_geometric.utils import (
    add_remaining_self_loops,
    add_self_loops,
    get_laplacian,
    remove_self_loops,
    to_undirected,
)

import varcomm
from tests.graph.layers import example
from tests.graph.parts import refusing
from tests.graph.typed import drawn, owners
from tests.worlds import on_ranks, refused_alike
from varcomm import ArgumentError, DisagreementError
from varcomm.graph import distribute, partition
from varcomm.graph.layers.refused import REFUSED as LAYERS_REFUSED

DATA = example()


class OverOutDegree(MessagePassing):
    def message(self, x_j, size_j):
        return x_j / size_j


class OverNodes(MessagePassing):
    def update(self, inputs, dim_size):
        return inputs / dim_size


class OverTargets(MessagePassing):
    def message(self, x_j, size_i):
        return x_j / size_i


class OwnAggregation(pyg.aggr.Aggregation):
    def forward(self, x, index=None, ptr=None, dim_size=None, dim=-2):
        return self.reduce(x, index, ptr, dim_size, dim, reduce="sum")


class OwnLSTM(pyg.aggr.LSTMAggregation):
    """Still PyG's."""


class OwnPooling(pyg.TopKPooling):
    """Still PyG's."""


class MyColours(pyg.WLConv):
    """A class of one's own does not make a layer of PyG another one."""


class Pooled(nn.Module):
    def __init__(self, kind, *args, **settings):
        super().__init__()
        self.layers = nn.ModuleList([pyg.SAGEConv(4, 4)])
        self.readout = kind(*args, **settings)


def sage(**settings):
    return pyg.SAGEConv(4, 4, **settings)


def seeded(make, seed=0):
    torch.manual_seed(seed)
    return make()


def changed(change):
    """Return a layer after a change."""
    layer = sage()
    change(layer)
    return layer


def scaled():
    inner, histogram = pyg.aggr.MedianAggregation(), torch.ones(3, dtype=torch.int64)
    return sage(aggr=pyg.aggr.DegreeScalerAggregation(inner, "identity", histogram))


# models, and the name that the message has of the module
REFUSED = [
    (MyColours, "MyColours"),
    (lambda: Pooled(pyg.WLConv), "readout (WLConv)"),
    (lambda: Pooled(torch.jit.script, nn.Linear(4, 4)), "TorchScript"),
    (lambda: Pooled(nn.SyncBatchNorm, 4), "(SyncBatchNorm)"),
    (lambda: Pooled(nn.InstanceNorm1d, 4), "(InstanceNorm1d)"),
    (lambda: Pooled(nn.InstanceNorm2d, 4), "(InstanceNorm2d)"),
    (lambda: Pooled(pyg.TopKPooling, 4), "readout (TopKPooling)"),
    (lambda: Pooled(OwnPooling, 4), "readout (OwnPooling)"),
    (lambda: Pooled(pyg.MedianAggregation), "(MedianAggregation)"),
    (lambda: Pooled(pyg.aggr.MultiAggregation, ["mean", "median"]), "(MedianAggregation)"),
    (
        lambda: pyg.GPSConv(4, None, norm=None, attn_type="performer"),
        "attn (PerformerAttention)",
    ),
    (lambda: Pooled(pyg.attention.PerformerAttention, 4, 1), "readout (Performer"),
    (lambda: sage(decomposed_layers=2), "decomposed_layers"),
    (lambda: Pooled(nn.MultiheadAttention, 4, 2), "(MultiheadAttention)"),
    (lambda: pyg.DenseSAGEConv(4, 4), "(DenseSAGEConv)"),
    (lambda: nn.parallel.DistributedDataParallel(sage()), "(DistributedDataParallel)"),
    (OverOutDegree, "size_j"),
    (OverNodes, "dim_size"),
    (OverTargets, "size_i"),
    (lambda: changed(lambda layer: setattr(layer, "explain", True)), "explain"),
    (lambda: sage(aggr="median"), "MedianAggregation"),
    (lambda: sage(aggr=OwnLSTM(4, 4)), "aggr_module (OwnLSTM)"),
    (lambda: sage(aggr=pyg.aggr.LSTMAggregation(4, 4)), "LSTMAggregation"),
    (lambda: sage(aggr=pyg.aggr.GRUAggregation(4, 4)), "GRUAggregation"),
    (lambda: sage(aggr=pyg.aggr.LCMAggregation(4, 4)), "LCMAggregation"),
    (lambda: sage(aggr=pyg.aggr.SortAggregation(2)), "SortAggregation"),
    (lambda: sage(aggr=pyg.aggr.QuantileAggregation(0.3)), "QuantileAggregation"),
    (
        lambda: sage(aggr=pyg.aggr.MultiAggregation(["mean", pyg.aggr.SortAggregation(2)])),
        "SortAggregation",
    ),
    (scaled, "MedianAggregation"),
    (lambda: [sage()], "model must be a torch.nn.Module; got list"),
]

ALLOWED = [
    lambda: Pooled(nn.Sequential, nn.LayerNorm(4), nn.GroupNorm(2, 4)),
    lambda: Pooled(pyg.LayerNorm, 4, mode="node"),
    lambda: Pooled(pyg.MessageNorm),
    lambda: sage(aggr=pyg.aggr.MultiAggregation(["max"])),
    lambda: type("MySAGE", (pyg.SAGEConv,), {})(4, 4),
    lambda: nn.Linear(4, 4),
    lambda: sage(aggr=OwnAggregation()),
    lambda: Pooled(pyg.MLP, [4, 4], norm=None),
]


def made_without_its_package(kind):
    """A layer of a class which refuses to be made without a compiled package."""
    layer = kind.__new__(kind)
    (MessagePassing if issubclass(kind, MessagePassing) else nn.Module).__init__(layer)
    return layer


@on_ranks(3)
def test_models_refused_on_all_ranks_and_others(rank):
    """Models that are refused on all ranks, one that is on rank 1, and models that are not."""
    graph = partition(DATA, method="block")
    refuse = refusing(distribute, "graph.distribute: refused on rank ")
    for make, name in REFUSED:
        model = seeded(make)
        refuse(ArgumentError, (name,), model, graph)
        layers = model.modules() if isinstance(model, nn.Module) else ()
        assert not any("varcomm" in repr(vars(layer).keys()) for layer in layers), name
    for name, reason in LAYERS_REFUSED.items():
        model = made_without_its_package(getattr(pyg, name, RadiusInteractionGraph))
        refuse(ArgumentError, (reason,), model, graph)
    refuse(
        ArgumentError, ("on rank 1", "WLConv"), pyg.WLConv() if rank == 1 else seeded(sage), graph
    )
    for make in ALLOWED:
        model = seeded(make)
        assert distribute(model, graph) is model
    with pytest.raises(ArgumentError, match=r"must be a PartitionedGraph, .* order is distribute"):
        distribute(graph, sage())


def with_buffer(value):
    buffer = torch.tensor(value)
    return changed(lambda layer: layer.register_buffer("scale", buffer, persistent=False))


def linears():
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])


def dropping(p):
    return nn.Sequential(sage(), nn.Dropout(p))


LIN_L, LIN_R = "lin_l.weight, lin_l.bias", "lin_r.weight"

# the model of rank 1, that of the others, and the names in which they differ
DIFFERENT = [
    (partial(seeded, sage, 1), sage, f"{LIN_L}, {LIN_R}"),
    (lambda: pyg.SAGEConv(4, 5), sage, f"{LIN_L}, {LIN_R} and 3 more"),
    (lambda: sage().double(), sage, f"{LIN_L}, {LIN_R}"),
    (lambda: sage(root_weight=False), sage, f"{LIN_L}, {LIN_R} and 2 more"),
    (lambda: with_buffer(1.0), lambda: with_buffer(2.0), "scale"),
    (lambda: sage(aggr="max"), sage, "the model (SAGEConv)"),
    (lambda: sage(normalize=True), sage, "the model (SAGEConv)"),
    (lambda: dropping(0.5), lambda: dropping(0.1), "1 (Dropout)"),
    (lambda: changed(lambda layer: layer.lin_r.requires_grad_(False)), sage, LIN_R),
    (partial(seeded, linears, 1), linears, "0.bias, 1.weight and 3 more"),
]


class Mine(pyg.SAGEConv):
    """A layer with an attribute of its rank, which is not compared."""

    def __init__(self, rank):
        super().__init__(4, 4)
        self.rank = rank


@on_ranks(3)
def test_ranks_with_different_models(rank):
    """Lazy parameters are made in the first call, from equal seeds."""
    graph = partition(DATA, method="block")
    refuse = refusing(distribute, "graph.distribute: ranks [1] have other parameters")
    for mine, others, names in DIFFERENT:
        model = seeded(mine if rank == 1 else others)
        refuse(DisagreementError, (f"{names}. ",), model, graph)
    model = distribute(seeded(lambda: pyg.SAGEConv(-1, 4).double()), graph)
    model(graph.x, graph.edge_index)
    assert distribute(model, graph) is model
    distribute(Mine(rank).train(rank == 0), graph)
    mixed = seeded(lambda: nn.ModuleList([pyg.SAGEConv(-1, 4), nn.Linear(2, 2)]), rank)
    with pytest.raises(DisagreementError, match=r"they differ in 1\.weight, 1\.bias\. Make"):
        distribute(mixed, graph)


def loops_between(g):
    """Layers and functions that add or remove self loops of edges between two types of nodes."""
    edges, x, sizes = g["a", "to", "b"].edge_index, (g["a"].x, g["b"].x), (3, 3)
    pos = x[0][:, :3], x[1][:, :3]
    yield pyg.GATConv((4, 4), 5, heads=2), (x, edges)
    yield pyg.GATConv((4, 4), 5), ((x[0], None), edges, None, sizes)
    yield pyg.GATv2Conv((-1, -1), 5), (x[::-1], edges.flip(0))
    yield pyg.PointTransformerConv((4, 4), 5), (x, pos, edges)
    yield pyg.PointNetConv(), ((x[0], None), pos, edges)
    yield pyg.PPFConv(nn.Linear(8, 2)), ((x[0], None), pos, pos, edges)
    for function in (add_self_loops, add_remaining_self_loops):
        yield Calls(partial(function, num_nodes=min(map(len, x)))), (edges[:, :0],)
    yield Calls(remove_self_loops), (edges,)


@on_ranks(3)
def test_self_loops_between_two_types(rank):
    """Refused on all ranks, also on one without edges, with the option that runs."""
    data = drawn({"a": (9, 4), "b": (6, 4)}, {("a", "to", "b"): 20})
    graph = partition(data, method=owners(data, "a rank owns nothing", 3))
    torch.manual_seed(0)
    for model, given in loops_between(graph):
        model = distribute(model.double(), graph)
        refused_alike(ArgumentError, lambda m=model, a=given: m(*a), "add_self_loops=False")
    layer = distribute(pyg.GATConv((4, 4), 5, add_self_loops=False).double(), graph)
    edges = graph["a", "to", "b"].edge_index
    assert len(layer((graph["a"].x, graph["b"].x), edges)) == graph["b"].num_owned


TYPES = ["a", "b", "c", "d"], [("a", "to", "b"), ("b", "of", "a"), ("c", "in", "b")]


@on_ranks(3)
def test_lazy_layers_without_a_type(rank):
    """A type that no rank passes stays lazy; one that some ranks pass is an error on all."""
    data = drawn({"a": (9, 4), "b": (6, 3), "c": (3, 2)}, dict.fromkeys(TYPES[1], 7))
    graph = partition(data, method=owners(data, "each type on one", 3))
    for kind in (pyg.HGTConv, pyg.HANConv):
        model = distribute(seeded(lambda kind=kind: kind(-1, 4, TYPES).double()), graph)
        own = {key: x for key, x in graph.x_dict.items() if len(x)}
        words = "ranks [1, 2] pass other types", "Pass graph.x_dict"
        refused_alike(DisagreementError, lambda m=model, x=own: m(x, {}), *words)
        weight = torch.ones((), dtype=torch.float64, requires_grad=True)
        for _ in range(5):  # sums compare values of all parameters
            out = model(graph.x_dict, graph.edge_index_dict)
            (graph["a"].sum(out["a"]) + graph["b"].sum(out["b"]) * weight).backward()
            varcomm.data_parallel.sum_gradients(model)
        lazy = [name for name, p in model.named_parameters() if nn.parameter.is_lazy(p)]
        assert lazy == [f"{'kqv_lin.lins' if kind is pyg.HGTConv else 'proj'}.d.weight"]
        with varcomm.debug():
            varcomm.data_parallel.sum_gradients(model)


@on_ranks(3)
def test_advice_that_runs(rank):
    """What a message advises, on all ranks: it runs, and is as in one process."""
    data = example()
    graph, row, col = partition(data, method="random"), *data.edge_index
    refuse, edges = partial(refused_alike, ArgumentError), graph.edge_index
    both = "before graph.partition: to_undirected"
    refuse(lambda: torch.cat([edges, edges.flip(0)], 1), both)
    refuse(lambda: torch.cat([edges[0], edges[1]]), both)
    refuse(lambda: to_undirected(edges), both)
    ends = graph.x[edges[0]], graph.x[edges[1]]
    sums = torch.zeros_like(graph.x).index_add(0, edges[1], ends[0]).index_add(0, edges[0], ends[1])
    expected = torch.zeros_like(data.x).index_add(0, col, data.x[row])
    expected = expected.index_add(0, row, data.x[col])[graph.owned_ids]
    torch.testing.assert_close(sums, expected)
    decoder = distribute(pyg.InnerProductDecoder(), graph)
    with pytest.raises(ArgumentError, match=r"all pairs .* z @ graph\.gather\(z\)\.t\(\)"):
        decoder.forward_all(graph.x)
    pairs = torch.sigmoid(graph.x @ graph.gather(graph.x).t())
    torch.testing.assert_close(pairs, torch.sigmoid(data.x @ data.x.t())[graph.owned_ids])
    scores = decoder(graph.x, edges)
    own = torch.isin(col, graph.owned_ids)
    torch.testing.assert_close(scores, pyg.InnerProductDecoder()(data.x, data.edge_index)[own])
    layer = pyg.RGATConv(4, 4, 3).double()
    layer.l2.data.fill_(rank)  # which PyG leaves as memory was
    refused_alike(DisagreementError, lambda: distribute(layer, graph), "broadcast_module(model)")
    varcomm.broadcast_module(layer)
    assert distribute(layer, graph) is layer


class Calls(nn.Module):
    """A model which is nothing but a call."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, edge_index, **more):
        return self.function(edge_index, **more)


def as_sparse(graph):
    sources, targets = graph.num_owned + graph.num_halo, graph.num_owned
    values = torch.ones(graph.edge_index.shape[1], dtype=torch.float64)
    edges = graph.edge_index.plain.flip(0)
    return torch.sparse_coo_tensor(edges, values, (targets, sources), check_invariants=True)


ROWS, EDGES = "rows, but this rank owns", "edges must be given as graph.edge_index"
OTHER = "numbers of another kind"

# arguments of a call of SAGEConv, and a part of the message
MISUSE = [
    (lambda g: (DATA.x, g.edge_index), ROWS),
    (lambda g: (g.with_halo(g.x), g.edge_index), ROWS),
    (lambda g: (torch.zeros(2, g.num_owned + 1, 4).double(), g.edge_index), ROWS),
    (lambda g: (g.x, DATA.edge_index), EDGES),
    (lambda g: (g.x, g.edge_index - 30), OTHER),
    (lambda g: (g.x, as_sparse(g)), EDGES),
    (lambda g: (g.x, "edges"), EDGES),
    (lambda g: (g.x, g.edge_index.plain.double()), EDGES),
    (lambda g: (g.x, g.edge_index.T.contiguous()), OTHER),
    (lambda g: (g.x, g.edge_index[0]), OTHER),
]
# other models, and their arguments
MISUSE_OF_OTHERS = [
    (lambda: Calls(gcn_norm), lambda g: (g.edge_index.float(),)),
    (lambda: Calls(partial(gcn_norm, num_nodes=30)), lambda g: (g.edge_index,)),
    (lambda: Calls(get_laplacian), lambda g: (g.edge_index + 30,)),
    (lambda: pyg.FastRGCNConv(24, 5, 3), lambda g: (g.number, g.edge_index, g.edge_type)),
    (
        lambda: pyg.GPSConv(4, None, norm=None).double(),
        lambda g: (torch.zeros(g.num_owned + 1, 4).double(), g.edge_index),
    ),
]


@on_ranks(3)
def test_arguments_that_do_not_fit(rank):
    """Refused on this rank before any communication: the ranks go on."""
    graph = partition(DATA, method="block")
    layer = distribute(seeded(lambda: sage().double()), graph)
    where = f"^(propagate|edge_index) on rank {rank} of 3: "
    for given, message in MISUSE:
        with pytest.raises(ArgumentError, match=f"{where}.*{message}"):
            layer(*given(graph))
        assert layer(graph.x, graph.edge_index).shape == (graph.num_owned, 4)
    for make, given in MISUSE_OF_OTHERS:
        model = distribute(seeded(make), graph)
        with pytest.raises(ArgumentError):
            model(*given(graph))
    told = "on rank 1: edge_index on rank 1 of 3: edges select from 24 rows"
    with varcomm.debug(), pytest.raises(DisagreementError, match=told):
        layer(graph.x if rank != 1 else DATA.x, graph.edge_index)
