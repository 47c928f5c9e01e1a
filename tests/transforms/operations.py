"""Operations for transforms: each as a function of a few numbers, beside one process.

A rank's function is ``y(theta)``, with ``theta`` of three numbers, through an input that depends on
them. So all ranks have as many directions, whatever their shards are.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import nn

import varcomm
from tests.graph.graphs import split_by, wild
from tests.ops.primitives import PRIMITIVES, case
from varcomm.graph import distribute, partition
from varcomm.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from varcomm.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from varcomm.transport.agreement import share
from varcomm.transport.group import resolve

THETA = torch.tensor([0.5, -0.3, 0.7], dtype=torch.float64)
DIRECTION = torch.tensor([0.2, 1.0, -0.4], dtype=torch.float64)


@dataclass
class Operation:
    """One operation on this rank: `call`, ``x -> y``, and its `reference` in one process.

    `inputs` are three inputs of each rank; a rank without an input has one that is not read. The
    `reference` maps the inputs of all ranks to the outputs of all. Losses are "own", one per rank;
    or all ranks compute the same one of a replicated result, from replicated inputs ("alike") or
    from each rank's own ("one").
    """

    rank: int
    call: Callable
    inputs: list
    reference: Callable
    losses: str = "own"
    module: nn.Module | None = None

    def x(self, theta, rank=None):
        a, b, c = self.inputs[self.rank if rank is None else rank]
        return a + theta[0] * b + theta[1] * theta[2] * c

    def y(self, theta):
        """Return this rank's output."""
        return self.call(self.x(theta))

    def loss(self, theta):
        """Return this rank's loss."""
        return self._loss(self.y(theta), self.rank)

    def one_y(self, thetas):
        """Return the outputs of all ranks, in one process."""
        return self.reference([self.x(theta, rank) for rank, theta in enumerate(thetas)])

    def one_loss(self, thetas):
        """Return what the losses of all ranks are together, in one process."""
        losses = [self._loss(y, rank) for rank, y in enumerate(self.one_y(thetas))]
        return losses[0] if self.losses == "one" else sum(losses)

    @property
    def thetas(self):
        return [THETA.clone() for _ in self.inputs]

    def _loss(self, y, rank):
        """Weigh a cubic one; but rank 0's own is linear, so that its gradient is a constant."""
        weight = torch.linspace(1, 2, y.numel(), dtype=y.dtype).view(y.shape)
        linear = self.losses == "own" and rank == 0
        return (weight * (y if linear else y**3)).sum()


def primitive(name, asynchronous):
    def make(rank, ranks):
        c = case(name, "off by one", ranks)
        shape = next(shape for shape in c.shapes if shape is not None)
        drawn = [c.draw(torch.float64, seed) for seed in range(3)]
        inputs = [
            [torch.ones(shape, dtype=torch.float64) if x[r] is None else x[r] for x in drawn]
            for r in range(ranks)
        ]
        op = c.bind()
        if asynchronous:
            return Operation(rank, lambda x: op(x, async_op=True).wait(), inputs, c.reference)
        return Operation(rank, lambda x: op(x), inputs, c.reference)

    return make


def drawn(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def made(make):
    torch.manual_seed(3)
    return make().double()


def of_nodes(rank, ranks):
    """Return a graph, this rank's part, and three inputs and the nodes of each rank."""
    data = wild(10)
    graph = partition(data, method=split_by("block", data.num_nodes, ranks))
    ids = share("nodes", lambda: (graph.owned_ids.tolist(), graph.halo_ids.tolist()), resolve(None))
    wholes = [drawn(data.num_nodes, 4, seed=seed) for seed in range(3)]
    return data, graph, [[whole[own] for whole in wholes] for own, _ in ids], ids


def whole(xs, ids):
    order = torch.tensor([node for own, _ in ids for node in own])
    return torch.cat(xs)[torch.argsort(order)]


def halo(rank, ranks):
    _, graph, inputs, ids = of_nodes(rank, ranks)

    def reference(xs):
        x = whole(xs, ids)
        return [x[own + others] for own, others in ids]

    return Operation(rank, lambda x: graph.with_halo(x), inputs, reference)


class OnGraph(nn.Module):
    """A model with its graph, as a function of features."""

    def __init__(self, model, edge_index):
        super().__init__()
        self.model, self.edge_index = model, edge_index

    def forward(self, x):
        return self.model(x, self.edge_index)


def model_of(layer):
    def make(rank, ranks):
        data, graph, inputs, ids = of_nodes(rank, ranks)
        alone = made(
            lambda: pyg.Sequential(
                "x, edge_index", [(layer(), "x, edge_index -> x"), nn.Tanh(), nn.Linear(6, 2)]
            )
        )
        module = OnGraph(distribute(copy.deepcopy(alone), graph), graph.edge_index)

        def reference(xs):
            out = alone(whole(xs, ids), data.edge_index)
            return [out[own] for own, _ in ids]

        def call(x):
            return module(x)

        return Operation(rank, call, inputs, reference, "own", module)

    return make


def linear(kind, **options):
    def make(rank, ranks):
        alone = made(lambda: nn.Linear(4, 5))
        module = kind.from_linear(alone, **options)
        inputs = [[drawn(3, 4, seed=seed) for seed in range(3)] for _ in range(ranks)]
        call, reference = lambda x: module(x), lambda xs: list(map(alone, xs))
        return Operation(rank, call, inputs, reference, "alike", module)

    return make


def cross_entropy(rank, ranks):
    sizes, classes = varcomm.ShardSizes.balanced(5, ranks), [4, 0, 2]
    target = torch.tensor(classes)
    wholes = [drawn(3, 5, seed=seed).split(list(sizes), -1) for seed in range(3)]
    return Operation(
        rank,
        # made in the call, so that it is a fake tensor where x is
        lambda x: vocab_parallel_cross_entropy(x, torch.tensor(classes), sizes),
        [[parts[r] for parts in wholes] for r in range(ranks)],
        lambda xs: [F.cross_entropy(torch.cat(xs, -1), target, reduction="none")] * ranks,
        "one",
    )


PLANS = ("plan_from_indices", "plan_from_needed", "adjoint_from_indices", "adjoint_from_needed")


def of_primitives(asynchronous):
    views = ("shard_v",) if asynchronous else ()  # it has nothing to wait for
    names = [name for name in PRIMITIVES if name not in (*PLANS, *views)]
    return {name: primitive(name, asynchronous) for name in names}


# by the columns of the page
OPERATIONS = {
    "primitives": of_primitives(False),
    "with `async_op=True`": of_primitives(True),
    "`ExchangePlan`": {name: primitive(name, False) for name in PLANS},
    "halo exchange": {"with_halo": halo},
    "distributed models": {
        "SAGEConv": model_of(lambda: pyg.SAGEConv(4, 6)),
        "GATConv": model_of(lambda: pyg.GATConv(4, 3, heads=2)),
    },
    "parallel linear layers": {
        "ColumnParallelLinear": linear(ColumnParallelLinear, gather_output=True),
        "RowParallelLinear": linear(RowParallelLinear, input_is_parallel=False),
    },
    "cross entropy": {"vocab_parallel_cross_entropy": cross_entropy},
}
