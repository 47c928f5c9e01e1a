"""Sizes, ids and weights that tests of embeddings share."""

import torch
import torch.nn.functional as F

from varcomm import ShardSizes

V, H, PAD = 11, 3, 4

# ids that ranks own, and rows of the sequence that they get
PATTERNS = {
    1: {"one": ([11], [6])},
    2: {
        "even": ([6, 5], [3, 3]),
        "uneven": ([2, 9], [5, 1]),
        "no ids": ([0, 11], [2, 4]),
        "no rows": ([7, 4], [0, 6]),
        "all on one": ([11, 0], [0, 6]),
    },
    3: {
        "even": ([4, 4, 3], [2, 2, 2]),
        "uneven": ([1, 8, 2], [3, 1, 2]),
        "empty": ([5, 0, 6], [4, 2, 0]),
        "all on one": ([0, 11, 0], [0, 0, 6]),
    },
    4: {"uneven": ([3, 0, 6, 2], [1, 3, 0, 2])},
}


def draw(*shape, dtype=torch.float64, seed=0):
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    ).to(dtype)


def drawn_ids(*shape, seed=0, high=V):
    """Ids with repetitions, the padding among them where there are enough."""
    ids = torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))
    if ids.numel() > 2:
        ids.view(-1)[1:3] = PAD
    return ids


def own_rows(whole, sizes, rank):
    ids = ShardSizes(sizes).range(rank)
    return whole[ids.start : ids.stop].clone()


def on_one_process(ids, whole, padding=None):
    """F.embedding, whose second derivative fails where there are no ids."""
    if ids.numel():
        return F.embedding(ids, whole, padding)
    return whole[ids]


def derivatives(loss, weight):
    (first,) = torch.autograd.grad(loss, weight, create_graph=True)
    (second,) = torch.autograd.grad((first**2 + first).sum(), weight)
    return first.detach(), second
