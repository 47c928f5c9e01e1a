"""Pools over the nodes of each graph, beside what PyG gives in one process."""

import torch
from torch_geometric.utils import scatter, softmax

from tests.graph.batches import derivatives
from varcomm import graph as pooling
from varcomm.graph import replicated


def scattered(reduce):
    """PyG's pools have nodes along the last dimension but one; here they come first."""

    def pool(x, batch, size=None):
        if batch is not None:
            return scatter(x, batch, 0, size, reduce)
        if reduce == "max":
            return x.max(dim=0, keepdim=True)[0]
        return scatter(x, torch.zeros(len(x), dtype=torch.int64), 0, 1, reduce)

    return pool


def soft(x, batch, size=None):
    batch = torch.zeros(len(x), dtype=torch.int64) if batch is None else batch
    return softmax(x, batch, num_nodes=size)


POOLS = {
    "add": (pooling.global_add_pool, scattered("sum")),
    "mean": (pooling.global_mean_pool, scattered("mean")),
    "max": (pooling.global_max_pool, scattered("max")),
    "min": (pooling.global_min_pool, scattered("min")),
    "softmax": (pooling.global_softmax, soft),
}


def twice(pool, x, arguments, loss_of, total):
    """Return a result, the gradient of a loss of it, and that of the gradient's squared length."""
    x = x.clone().requires_grad_()
    out, first, second = derivatives(lambda: pool(x, *arguments), [x], loss_of, total)
    return out, first[0], second[0]


def curved(out):
    """A loss of results that is not linear, and in which each has a weight of its own."""
    weight = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view(out.shape)
    return (out.sin() * weight + out**2).sum()


def loss_of(name):
    """Return a loss of what a pool gives: a row for each graph, or for each node."""
    return (lambda out: (out.sin() * out).sum()) if name == "softmax" else curved


def loss_on(graph, name):
    """Return the same, counted once, where nodes are split."""
    if name == "softmax":
        return lambda out: graph.sum(out.sin() * out)
    return lambda out: replicated(curved(out), graph)
