"""What is summed over ranks, against the same on one process."""

import pytest
import torch

from varcomm.graph.partitioners.totals import Alone, Together
from varcomm.transport.group import resolve

WORLDS = (1, 2, 3, 5)
SHAPES = [(0,), (1,), (4,), (3, 5), (1000, 6)]


def value(rank, shape, dtype):
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-(2**40), 2**40, shape, generator=generator).to(dtype)


def folded(rank):
    everyone = Together(resolve(None))
    found = []
    for shape in SHAPES:
        numbers = value(rank, shape, torch.int64)
        bounds = value(rank, shape, torch.float64)
        if rank == 1:
            bounds = torch.full_like(bounds, torch.inf)
        found.append((everyone.total(numbers), everyone.before(numbers), everyone.least(bounds)))
    return found


@pytest.mark.parametrize("ranks", WORLDS)
def test_ranks_together(worlds, ranks):
    got = worlds.run(ranks, folded)
    for number, shape in enumerate(SHAPES):
        parts = [value(rank, shape, torch.int64) for rank in range(ranks)]
        bounds = [value(rank, shape, torch.float64) for rank in range(ranks) if rank != 1]
        for rank in range(ranks):
            total, before, least = got[rank][number]
            assert torch.equal(total, sum(parts))
            assert torch.equal(before, sum(parts[:rank], torch.zeros_like(parts[0])))
            assert torch.equal(least, torch.stack(bounds).amin(0))


def test_alone():
    x = torch.tensor([3, -4])
    assert Alone().total(x).tolist() == Alone().least(x).tolist() == [3, -4]
    assert Alone().before(x).tolist() == [0, 0]
