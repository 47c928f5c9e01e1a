"""Layers and models of a user's own, which call functions of PyG that need the whole graph."""

from functools import cache, partial

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_geometric import utils
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import add_remaining_self_loops, add_self_loops, softmax

import varcomm
from tests.graph.graphs import split_by
from tests.graph.layers import example
from tests.graph.test_distribute import check_model
from tests.ops.comparing import Failures, assert_none
from varcomm.graph import distribute, partition

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


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


class Diffusion(nn.Module):
    def __init__(self, normalization, loops):
        super().__init__()
        self.settings = {"normalization": normalization}
        self.loops = loops
        self.layer = pyg.GraphConv(4, 4)

    def forward(self, x, edge_index, weight):
        nodes = len(x) if self.loops else None
        edge_index, weight = utils.get_laplacian(
            edge_index, weight, dtype=x.dtype, num_nodes=nodes, **self.settings
        )
        return self.layer(x, edge_index, weight)


class Looped(nn.Module):
    """Self loops up to the last node that has an edge: the last node of all has none."""

    def __init__(self, add, fill):
        super().__init__()
        self.add, self.fill = add, fill
        self.layer = pyg.GraphConv(4, 4, bias=False)

    def forward(self, x, edge_index, weight):
        edge_index, weight = self.add(edge_index, weight, self.fill)
        return self.layer(x, edge_index, weight)


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
}
for normalization in (None, "sym", "rw"):
    for loops in (True, False)[: 2 - (normalization == "rw")]:  # others need num_nodes
        name = f"Laplacian {normalization}, {'all' if loops else 'some'} loops"
        MODELS[name] = partial(Diffusion, normalization, loops)
for add in (add_self_loops, add_remaining_self_loops):
    for fill in (None, 0.5, "mean"):
        MODELS[f"{add.__name__} filled by {fill}"] = partial(Looped, add, fill)

data_of = cache(example)


@cache
def graph_of(method):
    data = data_of()
    ranks = torch.distributed.get_world_size()
    return partition(data, method=split_by(method, data.num_nodes, ranks))


def check_models(rank):
    failures = Failures()
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model = make().double()
        check_model(failures, name, model, data_of(), graph_of("a rank owns nothing"), "weight")
    return failures


@pytest.mark.parametrize(
    "ranks", [3, *(pytest.param(r, marks=pytest.mark.slow) for r in (1, 2, 5))]
)
def test_own_code_equals_its_single_process_twin(worlds, ranks):
    assert_none(worlds.run(ranks, check_models))


# layers, and their exchanges in three calls
CACHED = {
    "GCNConv": (lambda: pyg.GCNConv(4, 5, cached=True), [2, 1, 1]),
    "SGConv": (lambda: pyg.SGConv(4, 5, K=2, cached=True), [3, 0, 0]),
    "APPNP": (lambda: pyg.APPNP(2, 0.1, cached=True), [3, 2, 2]),
    "EGConv": (lambda: pyg.EGConv(4, 6, ["max"], 3, 2, cached=True), [2, 1, 1]),
}


def cached(rank):
    """Cached values of a graph are dropped when a layer moves to another."""
    data, other = data_of(), utils.coalesce(data_of().edge_index)[:, ::2]
    positive = data.edge_subgraph(data.positive)
    parts = (data, graph_of("random")), (positive, partition(positive, method="block"))
    for make, times in CACHED.values():
        torch.manual_seed(0)
        layer = make().double()
        layer(data.x, other)  # of a graph in one process
        for whole, graph in (*parts, parts[0]):
            alone = make().double()
            alone.load_state_dict(layer.state_dict())
            expected = alone(whole.x, whole.edge_index)[graph.owned_ids]
            distribute(layer, graph)
            for exchanges in times:
                with varcomm.trace() as calls:
                    out = layer(graph.x, graph.edge_index)
                torch.testing.assert_close(out, expected, **CLOSE)
                assert len(calls) == exchanges


def test_cached_layers(worlds):
    assert worlds.run(3, cached) == [None] * 3
