"""Models of PyG's layers and of a user's own code: as in one process, also for forces."""

import io
from functools import partial
from itertools import product

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_geometric import utils
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import add_remaining_self_loops, add_self_loops, degree, softmax

import varcomm
from tests.graph.against_one import assert_verdicts, compare
from tests.graph.graphs import split_by, wild
from tests.graph.layers import example
from tests.ops.comparing import assert_none
from tests.worlds import WORLDS, on_ranks
from varcomm.graph import distribute, partition

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


class Jumping(nn.Module):
    """Layers of several kinds in a ModuleList, all of whose outputs are read."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            [pyg.SAGEConv(4, 6, aggr="max"), pyg.GATConv(6, 3, heads=2), pyg.TransformerConv(6, 6)]
        )
        self.norms = nn.ModuleList(pyg.LayerNorm(6, mode="node") for _ in self.layers)
        self.jump = pyg.JumpingKnowledge("cat")
        self.read = nn.Linear(18, 2)

    def forward(self, x, edge_index):
        seen = []
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(layer(x, edge_index)).tanh()
            seen.append(x)
        return self.read(self.jump(seen))


class Attending(MessagePassing):
    """A layer of a user's own: weights of edges by edge_updater, two propagations, an update."""

    def __init__(self):
        super().__init__(aggr="add", node_dim=0)
        self.key, self.query = nn.Linear(4, 5), nn.Linear(4, 5)
        self.value = nn.Linear(4, 5)

    def forward(self, x, edge_index):
        weight = self.edge_updater(edge_index, query=self.query(x), key=self.key(x))
        once = self.propagate(edge_index, value=self.value(x), weight=weight, kept=x)
        return self.propagate(edge_index, value=once.tanh(), weight=weight, kept=x)

    def edge_update(self, query_i, key_j, index, size_i):
        return softmax((query_i * key_j).sum(-1), index, num_nodes=size_i)

    def message(self, value_j, weight):
        return value_j * weight.view(-1, 1)

    def update(self, inputs, kept):
        return inputs + kept.sum(1, keepdim=True)


class DegreesThroughPropagate(MessagePassing):
    """GCN with self loops: what is needed of sources is handed to propagate."""

    def __init__(self):
        super().__init__(aggr="add")
        self.lin = nn.Linear(4, 4)

    def forward(self, x, edge_index):
        edge_index, _ = add_remaining_self_loops(edge_index, num_nodes=len(x))
        scale = degree(edge_index[1], len(x), x.dtype).rsqrt().view(-1, 1)
        return self.propagate(edge_index, x=self.lin(x), scale=scale)

    def message(self, x_j, scale_i, scale_j):
        return scale_i * scale_j * x_j


class PairsAsLists(MessagePassing):
    """PyG takes lists for pairs, and whatever else is read at edges as it is."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=[self.lin(x), x], power=3, nothing=None)

    def message(self, x_j, x_i, power, nothing_j):
        assert nothing_j is None
        return (x_j - x_i) ** power


class Twice(nn.Module):
    """One layer used twice, and a residual around it."""

    def __init__(self):
        super().__init__()
        self.layer = pyg.GraphConv(4, 4)

    def forward(self, x, edge_index):
        return x + self.layer(self.layer(x, edge_index).tanh(), edge_index)


def sequential():
    return pyg.Sequential(
        "x, edge_index",
        [
            (pyg.SAGEConv(4, 6), "x, edge_index -> x"),
            nn.Tanh(),
            (nn.Dropout(0.0), "x -> x"),
            (pyg.GATv2Conv(6, 3, heads=2), "x, edge_index -> x"),
            nn.Linear(6, 2),
        ],
    )


class OwnGCN(pyg.GCNConv):
    """Calls what it is derived from."""

    def forward(self, x, edge_index, edge_weight=None):
        return super().forward(x.tanh(), edge_index, edge_weight).sin()


class OwnGCNTwice(OwnGCN):
    def forward(self, x, edge_index, edge_weight):
        edge_index, edge_weight = gcn_norm(edge_index, edge_weight, len(x), flow=self.flow)
        return super().forward(x, edge_index, edge_weight)


class NormalisedOnce(nn.Module):
    """Degrees are counted in the model, for all of its layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(pyg.GCNConv(4, 4, normalize=False) for _ in range(2))

    def forward(self, x, edge_index, weight):
        edge_index, weight = gcn_norm(edge_index, weight, num_nodes=x.size(0))
        for layer in self.layers:
            x = layer(x, edge_index, weight).tanh()
        return x


class MadeEdges(nn.Module):
    """A layer on edges and weights that a function makes of x, edges and weights."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.layer = pyg.GraphConv(4, 4)

    def forward(self, x, edge_index, weight):
        return self.layer(x, *self.function(x, edge_index, weight))


def laplacian(x, edges, weight, normalization, loops):
    nodes = len(x) if loops else None
    return utils.get_laplacian(edges, weight, normalization, x.dtype, nodes)


def looped(x, edges, weight, add, fill):
    """Self loops up to the last node that has an edge: the last node of all has none."""
    return add(edges, weight, fill)


class LoopedWithoutWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = pyg.SAGEConv(4, 4, aggr="sum")

    def forward(self, x, edge_index, weight):
        x = self.layer(x, add_self_loops(edge_index)[0]) * (1 + 0 * weight.sum())
        return self.layer(x, gcn_norm(edge_index, dtype=x.dtype)[0])


class LoopedByItself(pyg.SAGEConv):
    """Up to the last node with an edge; also where the edges are turned round."""

    def forward(self, x, edge_index):
        return super().forward(x, add_self_loops(edge_index)[0])


class BothWays(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = pyg.DirGNNConv(LoopedByItself(4, 4, aggr="sum"))

    def forward(self, x, edge_index, weight):
        return self.layer(x + 0 * weight.sum(), edge_index)


class EarlyReturn(MessagePassing):
    """Where there are no edges, its messages do not look at what came."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x, edge_index, weight):
        weight = self.edge_updater(edge_index, x=x, weight=weight)
        return self.propagate(edge_index, x=self.lin(x), weight=weight)

    def edge_update(self, x_j, weight):
        if len(x_j) == 0:
            return x_j[:, 0]
        return weight * x_j.sin().sum(1)

    def message(self, x_j, weight):
        if len(x_j) == 0:
            return x_j.new_zeros(0, 4)
        return x_j * weight.view(-1, 1)

    def update(self, inputs, x):
        return inputs if isinstance(x, tuple) else inputs + x


class IgnoresValues(MessagePassing):
    """Its message names tensors of two dtypes at the sources, and uses the values of one."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x, edge_index, weight):
        rows = self.lin(x)
        out = self.propagate(edge_index, x=rows, w=rows.to(torch.complex128), weight=weight)
        out += 1  # in place, as layers add their bias
        return out

    def message(self, x_j, w_j, weight):
        return x_j * weight.view(-1, 1)


class IgnoresTheFirst(IgnoresValues):
    def message(self, x_j, w_j, weight):
        return w_j.real * weight.view(-1, 1)


class IgnoresTheFirstInPairs(IgnoresTheFirst):
    def forward(self, x, edge_index, weight):
        rows = self.lin(x)
        out = self.propagate(edge_index, x=rows, w=rows.to(torch.complex128), weight=weight)
        return out[0] + out[1]

    def update(self, inputs):
        return inputs, 2 * inputs


class IgnoresAll(IgnoresValues):
    def message(self, x_j, weight):
        return torch.ones_like(x_j) * weight.view(-1, 1)


class PairInUpdate(MessagePassing):
    def forward(self, x, edge_index, weight):
        return self.propagate(edge_index, x=(x.sin(), x), weight=weight)

    def message(self, x_j, weight):
        return x_j * weight.view(-1, 1)

    def update(self, inputs, x):
        return inputs + 2 * x[0] + 3 * x[1]


class OwnAttention(MessagePassing):
    """Without annotations, which PyG does not need of what it provides itself."""

    def forward(self, x, edge_index, weight):
        return self.propagate(edge_index, x=x, weight=weight)

    def message(self, x_i, x_j, weight, index, ptr, size_i):
        return softmax((x_i * x_j).sum(1) * weight, index, ptr, size_i).view(-1, 1) * x_j


class OwnPropagate(MessagePassing):
    """For which PyG makes no template."""

    def propagate(self, edge_index, size=None, **values):
        return super().propagate(edge_index, size, **values).tanh()

    def forward(self, x, edge_index, weight):
        return self.propagate(edge_index, x=[x.sin(), x.cos()], weight=weight)

    def message(self, x_i, x_j, weight):
        return (x_i - 2 * x_j) * weight.view(-1, 1)


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.layers = nn.ModuleList(
            [
                pyg.GCNConv(4, 4),
                pyg.TransformerConv(4, 4),
                pyg.DirGNNConv(pyg.GATConv(4, 4)),
            ]
        )

    def forward(self, x, edge_index, weight):
        for layer in self.layers:
            more = (weight,) if isinstance(layer, pyg.GCNConv) else ()
            x = checkpoint(layer, x, edge_index, *more, use_reentrant=self.reentrant).tanh()
        return x


class Deep(nn.Module):
    """Checkpointing of PyG's own, and of half of a model at once."""

    def __init__(self):
        super().__init__()
        self.layer = pyg.DeepGCNLayer(
            pyg.GCNConv(4, 4), nn.LayerNorm(4), nn.Tanh(), block="dense", ckpt_grad=True
        )
        self.rest = pyg.GCN(8, 6, 2, 3, act="tanh", jk="lstm")

    def forward(self, x, edge_index, weight):
        x = self.layer(x, edge_index, weight)
        return checkpoint(self.rest, x, edge_index, weight, use_reentrant=False)


MODELS = {
    "a model of layers": Jumping,
    "a layer of one's own": Attending,
    "a layer used twice": Twice,
    "Sequential": sequential,
    "GraphSAGE": lambda: pyg.GraphSAGE(4, 6, 3, 2, jk="lstm", norm=pyg.LayerNorm(6, mode="node")),
    "GAT": lambda: pyg.GAT(4, 6, 2, 2, heads=2, jk="max", dropout=0.0),
    "GIN": lambda: pyg.GIN(4, 6, 2, 2, act="tanh"),
    "DeepGCNLayer": lambda: pyg.DeepGCNLayer(pyg.SAGEConv(4, 4), nn.LayerNorm(4), nn.Tanh()),
    "a degree of sources": DegreesThroughPropagate,
    "pairs as lists": PairsAsLists,
    "EdgeCNN": lambda: pyg.EdgeCNN(4, 6, 2, 2),
    "GCN": lambda: pyg.GCN(4, 6, 3, 2, jk="cat", norm=pyg.LayerNorm(6, mode="node")),
    "PNA": lambda: pyg.PNA(
        4,
        6,
        2,
        2,
        aggregators=["mean", "max", "std"],
        scalers=["identity", "attenuation"],
        deg=torch.tensor([2, 1, 3, 5, 4, 3]),
    ),
}


def made(name):
    torch.manual_seed(0)
    return MODELS[name]().double()


# these take weights of edges as well
OWN_CODE = {
    "an own GCN": lambda: OwnGCN(4, 5, improved=True),
    "an own GCN, normalised twice": lambda: OwnGCNTwice(4, 5),
    "normalised in the model": NormalisedOnce,
    "self loops without weights": LoopedWithoutWeights,
    "self loops both ways": BothWays,
    "early return": EarlyReturn,
    "a pair in an update": PairInUpdate,
    "own attention": OwnAttention,
    "own propagate": OwnPropagate,
    "checkpointed": lambda: Checkpointed(reentrant=False),
    "checkpointed, reentrant": lambda: Checkpointed(reentrant=True),
    "PyG's checkpointing": Deep,
    "ignores values": IgnoresValues,
    "ignores values of the first": IgnoresTheFirst,
    "ignores values of the first, in pairs": IgnoresTheFirstInPairs,
    "ignores all values": IgnoresAll,
}
for normalization, loops in product((None, "sym", "rw"), (True, False)):
    if loops or normalization != "rw":  # which needs num_nodes
        function = partial(laplacian, normalization=normalization, loops=loops)
        name = f"Laplacian {normalization}, {'all' if loops else 'some'} loops"
        OWN_CODE[name] = partial(MadeEdges, function)
for add, fill in product((add_self_loops, add_remaining_self_loops), (None, 0.5, "mean")):
    function = partial(looped, add=add, fill=fill)
    OWN_CODE[f"{add.__name__} filled by {fill}"] = partial(MadeEdges, function)


def models():
    plain = {name: (make, lambda m, g: m(g.x, g.edge_index)) for name, make in MODELS.items()}
    return plain | {
        name: (make, lambda m, g: m(g.x, g.edge_index, g.weight), "x", "weight")
        for name, make in OWN_CODE.items()
    }


@pytest.mark.parametrize("ranks", WORLDS)
def test_model_equals_its_single_process_twin(worlds, ranks):
    assert_verdicts(worlds, models, dict.fromkeys(models(), "exact"), ranks=ranks)


class Potential(MessagePassing):
    """Energies of nodes by what they see of their neighbours' positions."""

    def __init__(self):
        super().__init__(aggr="sum")
        self.pair = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))
        self.own = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, pos, edge_index):
        received = self.propagate(edge_index, pos=pos)
        # once more, so that forces go through two exchanges
        return self.own(received) * self.propagate(edge_index, pos=received[:, :2]).sin()

    def message(self, pos_i, pos_j):
        step = pos_i - pos_j
        return self.pair(torch.cat([step, step.square().sum(1, keepdim=True)], dim=1))


def forces_of(model, g):
    """Forces are minus the gradient of the energy of all nodes."""
    total = torch.sum if g.graph is None else g.graph.sum
    energy = total(model(g.pos, g.edge_index))
    return torch.autograd.grad(-energy, g.pos, create_graph=True)[0]


def check_forces(rank, method):
    """Compare forces, and what a loss of forces derives to, also for parameters."""
    data = wild()
    graph = partition(data, method=method)
    return compare(Potential, forces_of, data, graph, ("pos",), second=True)


@pytest.mark.parametrize("ranks", WORLDS)
def test_forces_and_what_a_loss_of_forces_teaches(worlds, ranks):
    method = split_by("a rank owns nothing", wild().num_nodes, ranks)
    assert_none(worlds.run(ranks, check_forces, method))


@on_ranks(3)
def test_the_state_of_a_model_is_as_without_ranks(rank):
    for name in ("a model of layers", "GCN"):
        model = made(name)
        distribute(model, partition(wild(), method="block"))
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        made(name).load_state_dict(state)  # strict: the same keys as without varcomm
        assert all(torch.equal(state[key], value) for key, value in made(name).state_dict().items())


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
