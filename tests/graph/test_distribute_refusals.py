"""What ``distribute`` refuses, since it would be wrong without a word."""

import re

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric.nn import MessagePassing

from tests.graph.graphs import wild
from varcomm import ArgumentError
from varcomm.graph import distribute, partition
from varcomm.graph.adapt.layers import EXACT, EXACT_AGGREGATIONS
from varcomm.graph.adapt.layers import REFUSED as LAYERS_REFUSED


class BothAtOnce(MessagePassing):
    def message(self, x_j, x):
        return x_j + x.mean()


class BothAtOnceAtEdges(MessagePassing):
    def edge_update(self, x_j, x):
        return x_j + x.mean()


class OverOutDegree(MessagePassing):
    def message(self, x_j, size_j):
        return x_j / size_j


class OfSources(MessagePassing):
    def message(self, x_j):
        return x_j

    def update(self, inputs, edge_index):
        return inputs + edge_index.max()


class EdgesByNumber(MessagePassing):
    def edge_update(self, x_j, edge_index_j):
        return x_j * edge_index_j


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


NORMALISES = "it normalises over all nodes, in a way that is not known across ranks."
POOLS = "it pools over all nodes, and would do so over this rank's only."
READS_OUT = "it reads out all nodes, in a way that is not known across ranks."
PAST = "it looks at other nodes, or at the edges, past the propagate of MessagePassing"


BETWEEN = "it attends between the rows that it is given, and would see this rank's nodes only."


def explained():
    layer = pyg.SAGEConv(4, 4)
    layer.explain = True
    return layer


COLOURS = "WLConv is not exact on a part of the graph: it numbers colours in the order in which"


REFUSED = {
    "colours": (pyg.WLConv, "the model (WLConv): " + COLOURS),
    "own colours": (MyColours, "the model (MyColours): " + COLOURS),
    "colours in a model": (lambda: Pooled(pyg.WLConv()), "readout (WLConv): " + COLOURS),
    "a script": (lambda: Pooled(torch.jit.script(nn.Linear(4, 4))), "TorchScript, in which"),
    "SyncBatchNorm": (lambda: Pooled(nn.SyncBatchNorm(4)), "(SyncBatchNorm): " + NORMALISES),
    "InstanceNorm": (lambda: Pooled(nn.InstanceNorm1d(4)), "(InstanceNorm1d): " + NORMALISES),
    "pooling": (lambda: Pooled(pyg.TopKPooling(4)), "readout (TopKPooling): " + POOLS),
    "self-attention pooling": (lambda: Pooled(pyg.SAGPooling(4, GNN=pyg.GraphConv)), POOLS),
    "readout": (lambda: Pooled(pyg.MedianAggregation()), "(MedianAggregation): " + READS_OUT),
    "several readouts": (
        lambda: Pooled(pyg.aggr.MultiAggregation(["mean", "median"])),
        "readout (MultiAggregation): " + READS_OUT,
    ),
    "median": (
        lambda: pyg.SAGEConv(4, 4, aggr="median"),
        "aggr_module (MedianAggregation): MedianAggregation is not known to be exact",
    ),
    "linear attention between all nodes": (
        lambda: pyg.GPSConv(4, None, norm=None, attn_type="performer"),
        "attn (PerformerAttention): " + PAST,
    ),
    "linear attention": (
        lambda: Pooled(pyg.attention.PerformerAttention(4, 1)),
        "readout (PerformerAttention): " + PAST,
    ),
    "decomposed layers": (
        lambda: pyg.SAGEConv(4, 4, decomposed_layers=2),
        "decomposed_layers is not supported.",
    ),
    "an own kind of pooling": (lambda: Pooled(OwnPooling(4)), "readout (OwnPooling): " + POOLS),
    "an aggregation in and out of a layer": (
        ReadOutWithTheLayers,
        "readout (MeanAggregation): it reads out all nodes, and is a layer's aggregation as well",
    ),
    "an own kind of LSTM": (
        lambda: pyg.SAGEConv(4, 4, aggr=OwnLSTM(4, 4)),
        "aggr_module (OwnLSTM): LSTMAggregation is not known to be exact",
    ),
    "attention between rows": (lambda: Pooled(nn.MultiheadAttention(4, 2)), BETWEEN),
    "a transformer of torch": (lambda: Pooled(nn.TransformerEncoderLayer(4, 2)), BETWEEN),
    "DeepGraphInfomax": (
        lambda: pyg.DeepGraphInfomax(4, pyg.SAGEConv(4, 4), torch.mean, torch.flip),
        "(DeepGraphInfomax): DeepGraphInfomax is not known to be exact",
    ),
    "DimeNet": (lambda: pyg.DimeNet(8, 1, 1, 1, 7, 6), "(DimeNet): DimeNet is not known"),
    "MetaLayer": (lambda: pyg.MetaLayer(nn.Linear(4, 4)), "(MetaLayer): MetaLayer is not known"),
    "a dense adjacency": (lambda: pyg.DenseSAGEConv(4, 4), "(DenseSAGEConv): " + PAST),
    "DistributedDataParallel": (
        lambda: nn.parallel.DistributedDataParallel(pyg.SAGEConv(4, 4)),
        "(DistributedDataParallel): it averages gradients over ranks, while",
    ),
    "numbers of sources": (OverOutDegree, "its functions take size_j, which would be numbers of"),
    "edges in an update": (OfSources, "its functions take edge_index, which would be"),
    "edges in an edge update": (EdgesByNumber, "its functions take edge_index_j, which would be"),
    "an explained layer": (explained, "explain is on; explain the model on the whole graph"),
    "the whole at edges": (
        BothAtOnceAtEdges,
        "take x both at the source of edges and as a whole, which would be a pair",
    ),
    "the whole in a message": (
        BothAtOnce,
        "take x both at the source of edges and as a whole, which would be a pair",
    ),
}


def refused(rank, name):
    make, message = REFUSED[name]
    model = make()
    with pytest.raises(ArgumentError, match=re.escape(message)) as caught:
        distribute(model, partition(wild(), method="block"))
    # PyG puts functions there by itself
    changed = [m for m in model.modules() if getattr(vars(m).get("propagate"), "graph", None)]
    return str(caught.value), changed


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_has_changed(worlds, name):
    (told, changed), other = worlds.run(2, refused, name)
    prefix = "graph.distribute: refused on rank 0 of 2 (and on 1 more: [1]): cannot distribute "
    assert told.startswith(prefix)
    assert (told, changed) == other
    assert not changed, "a layer runs on ranks although its model was refused"


def names_of_what_is_known(rank):
    graph = partition(wild(), method="block")
    with pytest.raises(ArgumentError, match=", ".join(sorted(EXACT))):
        distribute(pyg.WLConv(), graph)
    with pytest.raises(ArgumentError, match=", ".join(sorted(EXACT_AGGREGATIONS))):
        distribute(pyg.SAGEConv(4, 4, aggr="median"), graph)


def test_the_message_names_what_is_known(worlds):
    assert worlds.run(1, names_of_what_is_known) == [None]


def made_without_its_package(kind):
    """A layer of a class which refuses to be made where a compiled package is missing."""
    layer = kind.__new__(kind)
    (MessagePassing if issubclass(kind, MessagePassing) else nn.Module).__init__(layer)
    return layer


def refused_layers(rank):
    graph = partition(wild(), method="block")
    told = {}
    for name in LAYERS_REFUSED:
        with pytest.raises(ArgumentError) as caught:
            distribute(made_without_its_package(getattr(pyg, name)), graph)
        told[name] = str(caught.value)
    return told


def test_layers_that_are_refused_say_why(worlds):
    (told,) = worlds.run(1, refused_layers)
    for name, reason in LAYERS_REFUSED.items():
        assert f"{name} is not exact on a part of the graph: {reason}. Known are" in told[name]


class Unheard(pyg.HypergraphConv):
    """As if PyG had got one more layer."""


def unheard(rank):
    layer = Unheard(4, 4)
    Unheard.__module__ = "torch_geometric.nn.conv.unheard"
    with pytest.raises(ArgumentError, match="Unheard is not known to be exact on a part of the"):
        distribute(layer, partition(wild(), method="block"))


def test_a_layer_that_nobody_has_heard_of(worlds):
    assert worlds.run(2, unheard) == [None] * 2


ALLOWED = {
    "norms of one node": lambda: Pooled(nn.Sequential(nn.LayerNorm(4), nn.GroupNorm(2, 4))),
    "PyG's norm of one node": lambda: Pooled(pyg.LayerNorm(4, mode="node")),
    "MessageNorm": lambda: Pooled(pyg.MessageNorm()),
    "aggregation in a layer": lambda: pyg.SAGEConv(4, 4, aggr=pyg.aggr.MultiAggregation(["max"])),
    "an own subclass": lambda: type("MySAGE", (pyg.SAGEConv,), {})(4, 4),
    "no layer": lambda: nn.Linear(4, 4),
    "an aggregation of one's own": lambda: pyg.SAGEConv(4, 4, aggr=OwnAggregation()),
    "PyG's MLP": lambda: Pooled(pyg.MLP([4, 4], norm=None)),
}


def allowed(rank, name):
    torch.manual_seed(0)
    model = ALLOWED[name]()
    return distribute(model, partition(wild(), method="block")) is model


@pytest.mark.parametrize("name", ALLOWED)
def test_not_refused(worlds, name):
    assert worlds.run(2, allowed, name) == [True] * 2
