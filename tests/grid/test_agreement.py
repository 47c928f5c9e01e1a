"""Ranks that make different calls on fields: one error on all ranks."""

import pytest
import torch
from torch.nn import functional as F

import varcomm as vc
from tests.worlds import on_ranks


def field(dtype=torch.float32):
    grid = vc.grid.Grid((9, 4), sizes=[[5, 3, 1], None])
    return grid, grid.field(torch.ones(1, 1, len(grid.ranges[0]), 4, dtype=dtype))


DIFFERENT = {
    "kernel": lambda x, other: F.avg_pool2d(x, 5 if other else 3, 1, 2 if other else 1),
    "dtype": lambda x, other: F.avg_pool2d(x.double() if other else x, 3, 1, 1),
    "a norm more": lambda x, other: F.group_norm(x, 1) if other else x.sum(2),
    "channels": lambda x, other: F.avg_pool2d(torch.cat([x, x], 1) if other else x, 3, 1, 1),
}


@pytest.mark.parametrize("name", DIFFERENT)
@on_ranks(3)
def test_inside_debug(rank, name):
    _, x = field()
    with vc.debug(timeout=20), pytest.raises(vc.DisagreementError):
        DIFFERENT[name](x, rank == 1)
    with vc.debug():
        F.avg_pool2d(x, 3, 1, 1)  # the group works on


EQUAL_SIZES = {
    "dtype": lambda x, other: F.max_pool2d(x.int() if other else x, 3, 1, 1),
    "order": lambda x, other: [f(x) for f in PAIR[:: -1 if other else 1]],
}
PAIR = [lambda x: F.max_pool2d(x, 3, 1, 1), lambda x: F.max_pool2d(x.int(), 3, 1, 1)]


@pytest.mark.parametrize("name", EQUAL_SIZES)
@on_ranks(3)
def test_at_the_next_sum(rank, name):
    grid, x = field()
    EQUAL_SIZES[name](x, rank == 2)
    with pytest.raises(vc.DisagreementError, match="read_rows"):
        grid.sum(x)
    grid.sum(x)  # the group works on


class WithTable(torch.nn.Linear):
    """A layer with a table of this rank's own rows, which no other rank has."""

    def __init__(self, rows):
        super().__init__(4, 4)
        self.table = torch.nn.Parameter(torch.ones(rows, 1))

    def forward(self, x):
        return super().forward(x) + self.table.sum()


@pytest.mark.parametrize("own_rows", [False, True])
@on_ranks(3)
def test_a_forgotten_sum_is_found_inside_debug(rank, own_rows):
    torch.manual_seed(0)
    grid, x = field()
    right = torch.nn.Conv2d(1, 1, 3, padding=1)
    wrong = WithTable(rank + 1) if own_rows else torch.nn.Linear(4, 4)

    def step(model):
        grid.mean(model(x).square()).backward()
        if model is right:
            vc.data_parallel.sum_gradients(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        model.zero_grad()

    def steps(model, count):
        for _ in range(count):
            with torch.no_grad():
                grid.mean(x)  # a metric
            step(model)

    with vc.debug():
        steps(right, 12)
        with pytest.raises(vc.DisagreementError, match=r"shape \(4, 4\).* no longer have the same"):
            steps(wrong, 20)
