"""What ``distribute`` and a distributed model refuse, since it would be wrong without a word."""

import re

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric.nn import MessagePassing

import varcomm
from tests.graph.graphs import wild
from varcomm import ArgumentError, DisagreementError
from varcomm.graph import distribute, partition
from varcomm.graph.running.layers import EXACT, EXACT_AGGREGATIONS
from varcomm.graph.running.layers import REFUSED as LAYERS_REFUSED


class BothAtOnce(MessagePassing):
    def message(self, x_j, x):
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


def seeded_sage(**settings):
    torch.manual_seed(0)
    return pyg.SAGEConv(4, 4, **settings).double()


def misuse(rank, x_of, edges_of, message):
    data = wild()
    graph = partition(data, method="block")
    torch.manual_seed(0)
    layer = distribute(pyg.GATConv(4, 4, add_self_loops=False).double(), graph)
    message = message.format(n=graph.num_owned, h=graph.num_halo, all=data.num_nodes)
    where = f"edge_updater on rank {rank} of 2: "
    with pytest.raises(ArgumentError, match=re.escape(where + message)):
        layer(x_of(data, graph), edges_of(data, graph))
    # the refusal came before any communication: the ranks go on
    assert layer(graph.x, graph.edge_index).shape == (graph.num_owned, 4)


def whole(data, graph):
    return data.x


def own(data, graph):
    return graph.x


def with_halo(data, graph):
    return graph.with_halo(graph.x)


def global_edges(data, graph):
    return data.edge_index


def local_edges(data, graph):
    return graph.edge_index


ROWS = "'alpha' has {} rows, but this rank owns {{n}} nodes. Call the model with the local part"


@pytest.mark.parametrize(
    ("x_of", "edges_of", "message"),
    [
        (whole, local_edges, ROWS.format("{all}")),
        (own, global_edges, "edges reach beyond the "),
        (whole, global_edges, "edges reach beyond the "),
    ],
)
def test_the_whole_graph_in_place_of_the_local_part(worlds, x_of, edges_of, message):
    assert worlds.run(2, misuse, x_of, edges_of, message) == [None] * 2


def misuse_of_sage(rank, edges_of, message):
    graph = partition(wild(), method="block")
    layer = distribute(seeded_sage(), graph)
    with pytest.raises(ArgumentError, match=re.escape(message)):
        layer(graph.x, edges_of(graph))
    assert layer(graph.x, graph.edge_index).shape == (graph.num_owned, 4)


def as_sparse(graph):
    sources, targets = graph.num_owned + graph.num_halo, graph.num_owned
    values = torch.ones(graph.edge_index.shape[1], dtype=torch.float64)
    edges = graph.edge_index.flip(0)
    return torch.sparse_coo_tensor(edges, values, (targets, sources), check_invariants=True)


@pytest.mark.parametrize("edges_of", [as_sparse, lambda graph: "edges"], ids=["sparse", "text"])
def test_edges_must_be_a_dense_tensor(worlds, edges_of):
    message = "edges must be given as graph.edge_index, of shape (2, E); got "
    assert worlds.run(2, misuse_of_sage, edges_of, message) == [None] * 2


def halo_twice(rank):
    """A rank without a halo cannot notice; so each of these two has one."""
    graph = partition(wild(), method="block")
    layer = distribute(seeded_sage(), graph)
    with pytest.raises(ArgumentError, match="halos are added by varcomm"):
        layer(with_halo(None, graph), graph.edge_index)


def test_halos_added_by_hand(worlds):
    assert worlds.run(2, halo_twice) == [None] * 2


def one_is_wrong(rank):
    data = wild()
    graph = partition(data, method="block")
    layer = distribute(seeded_sage(), graph)
    x = graph.x if rank != 1 else data.x
    with varcomm.debug(), pytest.raises(DisagreementError) as caught:
        layer(x, graph.edge_index)
    return str(caught.value)


def test_in_debug_all_ranks_raise_where_one_has_to(worlds):
    for told in worlds.run(3, one_is_wrong):
        assert "not called, since on rank 1: propagate on rank 1 of 3: 'x' has 24 rows" in told


def some_edges(rank):
    """Edges may be left out, as by dropout_edge, and no edges at all are edges too."""
    data = wild()
    graph = partition(data, method="random")
    layer = distribute(seeded_sage(aggr="sum"), graph)
    nothing = layer(graph.x, graph.edge_index[:, :0])
    torch.testing.assert_close(nothing, layer.lin_l.bias + layer.lin_r(graph.x))
    kept = torch.arange(data.num_edges) % 3 > 0
    owned = torch.isin(data.edge_index[1], graph.owned_ids)
    part = layer(graph.x, graph.edge_index[:, kept[owned]])
    del layer.propagate
    alone = layer(data.x, data.edge_index[:, kept])
    torch.testing.assert_close(part, alone[graph.owned_ids], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ranks", [1, 3])
def test_edges_may_be_left_out(worlds, ranks):
    assert worlds.run(ranks, some_edges) == [None] * ranks


class ThreeSides(MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=(x, x, x))


def shapes(rank):
    graph = partition(wild(), method="block")
    n = graph.num_owned
    sage, own = distribute(seeded_sage(), graph), distribute(MessagePassing(), graph)
    for shape in ((2, n + 1, 4), (n + 1, 4)):
        with pytest.raises(ArgumentError, match=f"'x' has {n + 1} rows, but this rank owns {n} "):
            sage(torch.zeros(shape, dtype=torch.float64), graph.edge_index)
    with pytest.raises(
        ArgumentError, match=r"'x' has shape \(\d+,\), in which .* dimension -2, where"
    ):
        own.propagate(graph.edge_index, x=graph.x[:, 0])
    with pytest.raises(ArgumentError, match=r"must be a tensor or a pair of them, .*; got 3"):
        distribute(ThreeSides(), graph)(graph.x, graph.edge_index)
    return tuple(sage(graph.x, graph.edge_index).shape) == (n, 4)


def test_nodes_must_be_where_the_layer_looks_for_them(worlds):
    assert worlds.run(2, shapes) == [True] * 2


@pytest.mark.parametrize(
    "edges_of",
    [
        lambda graph: graph.edge_index.double(),
        lambda graph: graph.edge_index.T.contiguous(),
        lambda graph: graph.edge_index[0],
    ],
    ids=["floats", "rows", "one row"],
)
def test_edges_must_be_numbers_of_shape_2_e(worlds, edges_of):
    message = "edges must be given as graph.edge_index, of shape (2, E); got Tensor"
    assert worlds.run(2, misuse_of_sage, edges_of, message) == [None] * 2


def test_negative_edges(worlds):
    wrong = lambda graph: graph.edge_index - 30  # noqa: E731
    assert worlds.run(2, misuse_of_sage, wrong, "edges reach beyond the ") == [None] * 2
