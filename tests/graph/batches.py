"""Batches of graphs that span ranks, and how a function of nodes is differentiated twice."""

from dataclasses import dataclass

import torch

import varcomm
from tests.graph.graphs import split_by, wild
from varcomm.graph import partition

NODES = 23
GRAPHS = 6  # of which 2 and 5 have no nodes

FIRST = {"rtol": 1e-10, "atol": 1e-10}
SECOND = {"rtol": 1e-9, "atol": 1e-9}


@dataclass
class Whole:
    """Values of all nodes, of which each rank takes its own."""

    x: torch.Tensor
    batch: torch.Tensor
    kinds: torch.Tensor
    weight: torch.Tensor

    def rows(self, ids):
        return Whole(self.x[ids], self.batch[ids], self.kinds[ids], self.weight[ids])


def whole(*features, dtype=torch.float64, nodes=NODES):
    """Nodes with a graph each, not sorted, and a kind each; the same at every call."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(nodes, *features, dtype=torch.float64, generator=generator).to(dtype)
    weight = torch.randn(nodes, *features, dtype=torch.float64, generator=generator).to(dtype)
    batch = torch.tensor([4, 0, 1, 0, 3, 4, 1])[torch.arange(nodes) * 5 % 7]
    kinds = torch.tensor([0, 2, 2])[torch.arange(nodes) % 3]
    return Whole(x, batch, kinds, weight)


def partitions():
    """Split these nodes at random, and so that a rank owns nothing."""
    ranks = torch.distributed.get_world_size()
    methods = ("random", split_by("a rank owns nothing", NODES, ranks))
    return [partition(wild(NODES), method=method) for method in methods]


def derivatives(run, leaves, loss, total):
    """Return the result of `run`, and what a loss and its squared gradient derive to at leaves.

    `total` sums over all nodes. The first leaf has a row for each node.
    """
    out = run()
    first = torch.autograd.grad(loss(out), leaves, create_graph=True, materialize_grads=True)
    length = total(first[0] ** 2 * 3) + 0 * total(leaves[0])
    second = torch.autograd.grad(length, leaves, materialize_grads=True)
    return out.detach(), [g.detach() for g in first], list(second)


def summed(gradients):
    """Keep the first, of own rows; sum the others, of replicated parameters, over ranks."""
    return [gradients[0], *map(varcomm.all_reduce, gradients[1:])]


def assert_same(got, expected, ids):
    """Compare a rank's result and derivatives with the rows `ids` of those of one process."""
    torch.testing.assert_close(got[0], expected[0][ids], **FIRST)
    for kind, close in ((1, FIRST), (2, SECOND)):
        mine, theirs = summed(got[kind]), expected[kind]
        torch.testing.assert_close(mine[0], theirs[0][ids], **close)
        for one, other in zip(mine[1:], theirs[1:], strict=True):
            torch.testing.assert_close(one, other, **close)
