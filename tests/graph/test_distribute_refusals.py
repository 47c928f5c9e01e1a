"""Refusals of ``distribute``: on all ranks, with the module's name, before anything changes."""

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric.nn import MessagePassing

from tests.graph.graphs import wild
from varcomm import ArgumentError
from varcomm.graph import distribute, partition
from varcomm.graph.adapt.exact import EXACT, EXACT_AGGREGATIONS
from varcomm.graph.adapt.exact import REFUSED as LAYERS_REFUSED


class OverOutDegree(MessagePassing):
    def message(self, x_j, size_j):
        return x_j / size_j


class OwnAggregation(pyg.aggr.Aggregation):
    def forward(self, x, index=None, ptr=None, dim_size=None, dim=-2):
        return self.reduce(x, index, ptr, dim_size, dim, reduce="sum")


class OwnLSTM(pyg.aggr.LSTMAggregation):
    """Still PyG's."""


class OwnPooling(pyg.TopKPooling):
    """Still PyG's."""


class ReadOutWithTheLayers(nn.Module):
    """Its readout is known to the layer first."""

    def __init__(self):
        super().__init__()
        self.layer = pyg.SAGEConv(4, 4)
        self.readout = self.layer.aggr_module


class MyColours(pyg.WLConv):
    """A class of one's own does not make a layer of PyG another one."""


class Pooled(nn.Module):
    def __init__(self, readout):
        super().__init__()
        self.layers = nn.ModuleList([pyg.SAGEConv(4, 4)])
        self.readout = readout


def explained():
    layer = pyg.SAGEConv(4, 4)
    layer.explain = True
    return layer


def reads_out(kind, *args):
    return lambda: Pooled(kind(*args))


def in_a_layer(make):
    return lambda: pyg.SAGEConv(4, 4, aggr=make())


def scaled():
    inner, histogram = pyg.aggr.MedianAggregation(), torch.ones(3, dtype=torch.int64)
    return pyg.aggr.DegreeScalerAggregation(inner, "identity", histogram)


# models, and the name that the message has of the module
REFUSED = {
    "own colours": (MyColours, "MyColours"),
    "colours in a model": (reads_out(pyg.WLConv), "readout (WLConv)"),
    "a script": (lambda: Pooled(torch.jit.script(nn.Linear(4, 4))), "TorchScript"),
    "SyncBatchNorm": (reads_out(nn.SyncBatchNorm, 4), "(SyncBatchNorm)"),
    "InstanceNorm": (reads_out(nn.InstanceNorm1d, 4), "(InstanceNorm1d)"),
    "BatchNorm2d": (reads_out(nn.BatchNorm2d, 4), "(BatchNorm2d)"),
    "pooling": (reads_out(pyg.TopKPooling, 4), "readout (TopKPooling)"),
    "an own kind of pooling": (reads_out(OwnPooling, 4), "readout (OwnPooling)"),
    "readout": (reads_out(pyg.MedianAggregation), "(MedianAggregation)"),
    "several readouts": (
        reads_out(pyg.aggr.MultiAggregation, ["mean", "median"]),
        "readout (MultiAggregation)",
    ),
    "linear attention between all nodes": (
        lambda: pyg.GPSConv(4, None, norm=None, attn_type="performer"),
        "attn (PerformerAttention)",
    ),
    "linear attention": (reads_out(pyg.attention.PerformerAttention, 4, 1), "readout (Performer"),
    "decomposed layers": (lambda: pyg.SAGEConv(4, 4, decomposed_layers=2), "decomposed_layers"),
    "an aggregation in and out of a layer": (ReadOutWithTheLayers, "readout (MeanAggregation)"),
    "attention between rows": (reads_out(nn.MultiheadAttention, 4, 2), "(MultiheadAttention)"),
    "DeepGraphInfomax": (
        lambda: pyg.DeepGraphInfomax(4, pyg.SAGEConv(4, 4), torch.mean, torch.flip),
        "(DeepGraphInfomax)",
    ),
    "MetaLayer": (lambda: pyg.MetaLayer(nn.Linear(4, 4)), "(MetaLayer)"),
    "a dense adjacency": (lambda: pyg.DenseSAGEConv(4, 4), "(DenseSAGEConv)"),
    "DistributedDataParallel": (
        lambda: nn.parallel.DistributedDataParallel(pyg.SAGEConv(4, 4)),
        "(DistributedDataParallel)",
    ),
    "sizes of sources": (OverOutDegree, "size_j"),
    "an explained layer": (explained, "explain"),
    "aggregation by name": (lambda: pyg.SAGEConv(4, 4, aggr="median"), "MedianAggregation"),
    "an own LSTM": (in_a_layer(lambda: OwnLSTM(4, 4)), "aggr_module (OwnLSTM)"),
    "LSTM": (in_a_layer(lambda: pyg.aggr.LSTMAggregation(4, 4)), "LSTMAggregation"),
    "GRU": (in_a_layer(lambda: pyg.aggr.GRUAggregation(4, 4)), "GRUAggregation"),
    "LCM": (in_a_layer(lambda: pyg.aggr.LCMAggregation(4, 4)), "LCMAggregation"),
    "sorted": (in_a_layer(lambda: pyg.aggr.SortAggregation(2)), "SortAggregation"),
    "quantile": (in_a_layer(lambda: pyg.aggr.QuantileAggregation(0.3)), "QuantileAggregation"),
    "one of several": (
        in_a_layer(lambda: pyg.aggr.MultiAggregation(["mean", pyg.aggr.SortAggregation(2)])),
        "SortAggregation",
    ),
    "one in another": (in_a_layer(scaled), "MedianAggregation"),
    "no module": (lambda: [pyg.SAGEConv(4, 4)], "model must be a torch.nn.Module; got list"),
}


def message_of(model, graph):
    with pytest.raises(ArgumentError) as caught:
        distribute(model, graph)
    return str(caught.value)


def refused(rank):
    """Messages on one rank, of models that are refused on all, and of one that is on rank 1."""
    told, graph = {}, partition(wild(), method="block")
    for name, (make, _) in REFUSED.items():
        torch.manual_seed(0)
        model = make()
        told[name] = message_of(model, graph)
        layers = model.modules() if isinstance(model, nn.Module) else ()
        assert not any("varcomm" in repr(vars(layer).keys()) for layer in layers), name
    for name in LAYERS_REFUSED:
        told[name] = message_of(made_without_its_package(getattr(pyg, name)), graph)
    told["on rank 1"] = message_of(pyg.WLConv() if rank == 1 else pyg.SAGEConv(4, 4), graph)
    with pytest.raises(ArgumentError, match=r"must be a PartitionedGraph, .* order is distribute"):
        distribute(graph, pyg.SAGEConv(4, 4))
    return told


def made_without_its_package(kind):
    """A layer of a class which refuses to be made without a compiled package."""
    layer = kind.__new__(kind)
    (MessagePassing if issubclass(kind, MessagePassing) else nn.Module).__init__(layer)
    return layer


def test_refused_on_all_ranks(worlds):
    told, *others = worlds.run(3, refused)
    assert others == [told] * 2
    for name, message in told.items():
        assert message.startswith("graph.distribute: refused on rank "), name
        if name in REFUSED:
            assert REFUSED[name][1] in message
        elif name in LAYERS_REFUSED:
            assert f"{name} is not exact on a part of the graph: {LAYERS_REFUSED[name]}" in message
    assert ", ".join(sorted(EXACT)) in told["own colours"]
    assert ", ".join(sorted(EXACT_AGGREGATIONS)) in told["aggregation by name"]


class Unheard(pyg.SAGEConv):
    """As if PyG had got one more layer."""


def unheard(rank):
    torch.manual_seed(0)
    layer = Unheard(4, 4)
    Unheard.__module__ = "torch_geometric.nn.conv.unheard"
    return message_of(layer, partition(wild(), method="block"))


def test_a_layer_that_pyg_adds_is_refused(worlds):
    for told in worlds.run(3, unheard):
        assert "Unheard is not known to be exact on a part of the graph" in told


ALLOWED = {
    "norms of one node": lambda: Pooled(nn.Sequential(nn.LayerNorm(4), nn.GroupNorm(2, 4))),
    "PyG's norm of one node": lambda: Pooled(pyg.LayerNorm(4, mode="node")),
    "MessageNorm": lambda: Pooled(pyg.MessageNorm()),
    "aggregation in a layer": lambda: pyg.SAGEConv(4, 4, aggr=pyg.aggr.MultiAggregation(["max"])),
    "an own subclass": lambda: type("MySAGE", (pyg.SAGEConv,), {})(4, 4),
    "no layer": lambda: nn.Linear(4, 4),
    "an own aggregation": lambda: pyg.SAGEConv(4, 4, aggr=OwnAggregation()),
    "PyG's MLP": lambda: Pooled(pyg.MLP([4, 4], norm=None)),
}


def allowed(rank):
    graph = partition(wild(), method="block")
    for make in ALLOWED.values():
        torch.manual_seed(0)
        model = make()
        assert distribute(model, graph) is model


def test_not_refused(worlds):
    assert worlds.run(3, allowed) == [None] * 3
