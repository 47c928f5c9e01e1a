"""``distribute`` on models that are saved, cached, changed and moved to other graphs."""

import io

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric import utils
from torch_geometric.data import Data
from torch_geometric.explain.algorithm.utils import clear_masks, set_masks

import varcomm
from tests.graph import typed_layers
from tests.graph.against_one import CLOSE, data_of, graph_of
from tests.graph.graphs import wild
from tests.graph.layers import NODE, example
from tests.graph.models import MODELS, Parts, gcn
from tests.worlds import on_ranks
from varcomm import ArgumentError, DisagreementError
from varcomm.graph import distribute, partition


def made(name):
    torch.manual_seed(0)
    return MODELS[name]()


@on_ranks(3)
def test_the_state_of_a_model_is_as_without_ranks(rank):
    for name in ("GraphSAGE", "GCN"):
        model = made(name)
        distribute(model, partition(wild(), method="block"))
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        made(name).load_state_dict(state)  # strict: the same keys as without varcomm
        assert all(torch.equal(state[key], value) for key, value in made(name).state_dict().items())


@on_ranks(3)
def test_spectral_norm(rank):
    """Each look at its weight, in training, is a step of the power iteration."""
    data, ends = example(), []
    for graph in (data, partition(data, method="random")):
        torch.manual_seed(0)
        layers = [pyg.SAGEConv(4, 4), pyg.GCNConv(4, 4), pyg.GATv2Conv(4, 2, add_self_loops=False)]
        model = pyg.Sequential("x, edges", [(layer, "x, edges -> x") for layer in layers]).double()
        for module in [*model.modules()]:
            if isinstance(module, pyg.Linear):
                nn.utils.parametrizations.spectral_norm(module)
        if graph is not data:
            distribute(model, graph)
        ends.append([model(graph.x, graph.edge_index) for _ in range(2)])
    torch.testing.assert_close(ends[1], [out[graph.owned_ids] for out in ends[0]], **CLOSE)


# layers, and their exchanges in three calls
CACHED = {
    "GCNConv": (lambda: pyg.GCNConv(4, 5, cached=True), [2, 1, 1]),
    "SGConv": (lambda: pyg.SGConv(4, 5, K=2, cached=True), [3, 0, 0]),
    "APPNP": (lambda: pyg.APPNP(2, 0.1, cached=True), [3, 2, 2]),
    "EGConv": (lambda: pyg.EGConv(4, 6, ["max"], 3, 2, cached=True), [2, 1, 1]),
}


@on_ranks(3)
def test_cached_layers(rank):
    """Cached values of a graph are dropped when a layer moves to another."""
    data, other = example(), utils.coalesce(example().edge_index)[:, ::2]
    positive = data.edge_subgraph(data.positive)
    parts = (
        (data, partition(data, method="random")),
        (positive, partition(positive, method="block")),
    )
    for name, (make, times) in CACHED.items():
        torch.manual_seed(0)
        layer = make().double()
        layer(data.x, other)  # of a graph in one process
        for number, (whole, graph) in enumerate((*parts, parts[0])):
            alone = make().double()
            alone.load_state_dict(layer.state_dict())
            expected = alone(whole.x, whole.edge_index)[graph.owned_ids]
            distribute(layer, graph)
            # a graph keeps the number of nodes with edges, which EGConv asks for
            is_counted = name == "EGConv" and number == 2
            for exchanges in (times[0] - is_counted, *times[1:]):
                with varcomm.trace() as calls:
                    out = layer(graph.x, graph.edge_index)
                torch.testing.assert_close(out, expected, **CLOSE)
                assert len(calls) == exchanges


class Changing(Parts):
    def forward(self, x, edge_index):
        return self.head(self.conv(x, edge_index))


@on_ranks(3)
def test_a_model_that_changes_after_distribute(rank):
    """Explained, and with a part put in: refused on all ranks, and right again afterwards."""
    data = data_of()
    graph = graph_of(data)
    torch.manual_seed(0)
    model = Changing(conv=gcn(), head=nn.Identity()).double()
    expected = model(data.x, data.edge_index)[graph.owned_ids]
    model = distribute(model, graph)
    set_masks(model, torch.ones(graph.edge_index.shape[1]).double(), graph.edge_index)
    with pytest.raises(ArgumentError, match="is being explained"):
        model(graph.x, graph.edge_index)
    clear_masks(model)
    torch.testing.assert_close(model(graph.x, graph.edge_index), expected)
    for part in (pyg.BatchNorm(NODE), gcn(), pyg.MeanAggregation(), nn.MultiheadAttention(4, 1)):
        model.head = part.double()
        with pytest.raises(ArgumentError, match=r"head \(.*put into the model after distribute"):
            model(graph.x, graph.edge_index)
    model.head = nn.Identity()
    for norm in (pyg.BatchNorm(NODE), pyg.PairNorm(), pyg.LayerNorm(NODE, mode="graph")):
        for model.norms in ([norm], {"last": [nn.Sequential(norm)]}):
            with pytest.raises(ArgumentError, match="norms in a list"):
                distribute(model, graph)(graph.x, graph.edge_index)
    model.norms = [mean := pyg.MeanAggregation()]
    distribute(model, graph)(graph.x, graph.edge_index)
    pooled = pyg.MeanAggregation()(data.x, data.batch)
    torch.testing.assert_close(mean(graph.x, graph.batch), pooled)
    with pytest.raises(ArgumentError, match="this rank's rows alone"):
        mean(graph.x)
    model.norms, model.head = None, pyg.BatchNorm(NODE).double()
    out = distribute(model, graph)(graph.x, graph.edge_index)
    assert varcomm.all_reduce(out.sum(0)).abs().max() < 1e-10


@on_ranks(3)
def test_types_of_edges(rank):
    """Copies of edges are still of their type; ordinary tensors and other edges are refused."""
    torch.manual_seed(0)
    graph = graph_of(typed_layers.data_of(), "random")
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
    some = torch.arange(edges.shape[1]) % 2 == 0
    fewer = layer(graph.x_dict, {kind: edges[:, some]})
    assert fewer["b"].shape == (graph["b"].num_owned, 5)


@on_ranks(3)
def test_bases(rank):
    """PyG adds offsets to the ids of all types."""
    graph, edges = graph_of(typed_layers.data_of()), ["to", "back"]
    kinds = [key for key in typed_layers.EDGES if key[1] in edges]
    model = pyg.to_hetero_with_bases(typed_layers.OneKind(), (["a", "b"], kinds), 2, {"x": 4})
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
    layer, data = pyg.SGConv(4, 5).double(), typed_layers.data_of()
    graph = graph_of(data, "random")
    plain = data["a", "other", "a"].edge_index
    whole = layer(data["a"].x, plain)
    alone = partition(Data(x=data["a"].x, edge_index=plain), method="block")
    for _ in range(2):
        part = distribute(layer, graph)(graph["a"].x, graph["a", "other", "a"].edge_index)
        torch.testing.assert_close(part, whole[graph["a"].owned_ids], **CLOSE)
        part = distribute(layer, alone)(alone.x, alone.edge_index)
        torch.testing.assert_close(part, whole[alone.owned_ids], **CLOSE)
    assert "forward" not in vars(layer)


class RunSum(pyg.aggr.Aggregation):
    """Sums runs of edges, which must be sorted by their targets."""

    def forward(self, x, index=None, ptr=None, dim_size=None, dim=-2):
        assert (index.plain.diff() >= 0).all()
        return self.reduce(x, index, ptr, dim_size, dim, reduce="sum")


class Counts(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x


class Stores(pyg.MessagePassing):
    """Keeps its last messages, or returns them under names."""

    def __init__(self, returns=None):
        super().__init__()
        self.returns = returns

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        if self.returns:
            return self.returns(x_i * x_j)
        self.last = x_i * x_j
        return self.last


class Seen(pyg.MessagePassing):
    """Notes the number of edges in each call of its message."""

    def __init__(self):
        super().__init__(aggr="mean")
        self.seen = []

    def forward(self, x, edge_index, values):
        return self.propagate(edge_index, x=x, values=values, scale=2.0)

    def message(self, x_i, x_j, values, scale):
        self.seen.append(len(x_j))
        return (x_i - x_j) * values * scale


@on_ranks(3)
def test_overlap(rank):
    """Messages are computed in two parts, if no other rank's rows are among their values."""
    graph = graph_of(data_of())
    parts = [count for count in (len(graph.interior), len(graph.boundary)) if count] or [0]
    outs = []
    for overlap, seen in ((True, parts), (False, [sum(parts)]), (True, parts)):
        model = distribute(Seen(), graph, overlap=overlap)
        outs.append(model(graph.x, graph.edge_index, graph.edge_attr[:, :1]))
        assert model.seen == seen
    torch.testing.assert_close(outs[0], outs[1], **CLOSE)
    distribute(model, graph)
    model(graph.x, graph.edge_index, graph.edge_attr[:, :1])
    assert model.seen == [*parts, sum(parts)]
    with torch.no_grad():
        model = distribute(Seen(), graph, overlap=True)
        model((graph.x, graph.x), graph.edge_index, torch.tensor(3.0))
        assert model.seen == parts
    for values in (torch.ones(2, 4), [graph.edge_attr], nn.Parameter(graph.edge_attr)):
        with pytest.raises(ArgumentError, match=r"overlap=True .* values is"):
            model(graph.x, graph.edge_index, values)
    of_all = data_of().x
    with pytest.raises(ArgumentError, match=r"x must have .* rows, those of the targets"):
        model((graph.x, of_all), graph.edge_index, 1.0)
    with pytest.raises(
        DisagreementError,
        match=r"disagree on overlap: rank 0 has False; rank 1 has True.*differ from rank 0: 1",
    ):
        distribute(model, graph, overlap=rank == 1)
    with pytest.raises(ArgumentError, match="overlap must be True or False"):
        distribute(model, graph, overlap=1 if rank == 1 else True)
    for returns in (
        None,
        lambda x: {"message": x},
        lambda x: (x, None),
        lambda x: x[None],
        lambda x: varcomm.all_reduce(x.sum()) * x,
        Counts(),
    ):
        layer = distribute(Stores(returns), graph, overlap=True)
        with pytest.raises(ArgumentError, match="without overlap"):
            layer(graph.x, graph.edge_index)


@on_ranks(3)
def test_overlap_of_several_values_and_own_aggregations(rank):
    """As without: messages between ranks, edges in their order, hooks and compilers of one rank."""
    data = data_of()
    data = Data(x=data.x, edge_index=data.edge_index[:, data.edge_index[1].argsort(stable=True)])
    graph = graph_of(data)
    torch.manual_seed(0)
    gated = pyg.ResGatedGraphConv(4, 5, act=nn.Tanh()).double()
    own = pyg.EdgeConv(nn.Linear(8, 5), aggr=RunSum()).double()
    for layer in (gated, own):
        expected = distribute(layer, graph)(graph.x, graph.edge_index)
        distribute(layer, graph, overlap=True)
        with varcomm.trace() as calls:
            out = layer(graph.x, graph.edge_index)
        assert len(calls) == 1
        torch.testing.assert_close(out, expected, **CLOSE)
    if rank == 0:  # which does not overlap, then
        gated.register_propagate_forward_hook(lambda *_: None)
    out = gated(graph.x, graph.edge_index)
    out.sum().backward()
    torch.testing.assert_close(out, expected_of(gated, data)[graph.owned_ids], **CLOSE)


def expected_of(layer, data):
    """Return a result of one process, of a layer with the same parameters."""
    alone = pyg.ResGatedGraphConv(4, 5, act=nn.Tanh()).double()
    alone.load_state_dict(layer.state_dict())
    return alone(data.x, data.edge_index)
