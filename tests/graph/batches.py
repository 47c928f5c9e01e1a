"""Batches of graphs that span ranks, and how a function of nodes is differentiated twice."""

from dataclasses import dataclass

import torch
from torch_geometric.data import Data

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


def no_edges(nodes, **values):
    return Data(edge_index=torch.zeros(2, 0, dtype=torch.int64), num_nodes=nodes, **values)


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


def curved(out):
    """A loss of results that is not linear, and in which each has a weight of its own."""
    weight = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view(out.shape)
    return (out.sin() * weight + out**2).sum()


def summed(gradients):
    """Keep the first, of own rows; sum the others, of replicated parameters, over ranks."""
    return [gradients[0], *map(varcomm.all_reduce, gradients[1:])]


def assert_same(got, expected, ids, rows=True):
    """Compare a rank's derivatives, and a result of `rows`, with `ids` of those of one process."""
    torch.testing.assert_close(got[0], expected[0][ids] if rows else expected[0], **FIRST)
    for kind, close in ((1, FIRST), (2, SECOND)):
        mine, theirs = summed(got[kind]), expected[kind]
        torch.testing.assert_close(mine[0], theirs[0][ids], **close)
        for one, other in zip(mine[1:], theirs[1:], strict=True):
            torch.testing.assert_close(one, other, **close)
