"""Sizes, ids and weights that tests of embeddings share."""

import torch
import torch.nn.functional as F

from varcomm import ShardSizes

V, H, PAD = 11, 3, 4

# ids that ranks own, and rows of the sequence that they get
PATTERNS = {
    1: [([11], [6])],
    2: [([2, 9], [5, 1]), ([0, 11], [2, 4]), ([7, 4], [0, 6])],
    3: [([5, 0, 6], [4, 2, 0]), ([1, 8, 2], [3, 1, 2]), ([0, 11, 0], [0, 0, 6])],
}


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
