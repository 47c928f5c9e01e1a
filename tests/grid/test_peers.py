"""The cases that DistDL and PhysicsNeMo test, those that they mark as failing included."""

import random
from itertools import product
from math import prod

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import varcomm as vc
from tests.grid.comparing import apart_from_one, lengths_of
from tests.grid.peers import CASES
from tests.worlds import on_ranks, refused_alike

SMALL, LARGE = 1 << 12, 1 << 18  # elements
FEW = 20  # cases of a test


def failures(table, numbers, even):
    """Return the cases that differ from one process: in balanced sizes as theirs, or in any."""
    meshes, found = {}, []
    for at in numbers:
        shape, ranks, function, parameters = CASES[table][at]
        torch.manual_seed(at)
        x = torch.randn(shape, dtype=torch.float64)
        made = [torch.randn(p, dtype=torch.float64) for p in parameters]
        split = [dim for dim, count in enumerate(ranks) if count > 1] or [len(shape) - 1]
        counts = [ranks[dim] for dim in split]
        if len(split) == 2 and not meshes:
            meshes[2] = init_device_mesh("cpu", (2, 2))
        sizes = [None] * len(shape)
        for dim, count in zip(split, counts, strict=True):
            sizes[dim] = [*vc.ShardSizes.balanced(shape[dim], count)]
        if not even:
            sizes = lengths_of(random.Random(at), shape, split, counts)
        first = split[0]
        grid = vc.grid.Grid(shape[first:], meshes.get(len(split)), sizes[first:])
        worst = apart_from_one(function, x, made, grid, second=False)
        if not worst < 1e-12:
            found.append(f"case {at}, {shape} in {sizes}: {worst}")
    return found


def parts(wanted):
    """Return tables, numbers of ranks, and the numbers of a few of their cases."""
    found = []
    for table, ranks in product(CASES, (1, 2, 3, 4)):
        of = [(at, prod(case[0])) for at, case in enumerate(CASES[table]) if prod(case[1]) == ranks]
        at = [at for at, elements in of if wanted(elements)]
        for first in range(0, len(at), FEW):
            few = at[first : first + FEW]
            found.append(pytest.param(table, ranks, few, id=f"{table} {ranks} {few[0]}"))
    return found


@pytest.mark.parametrize(("table", "ranks", "at"), parts(lambda elements: elements <= SMALL))
@on_ranks()
def test_small_cases(rank, table, at):
    return failures(table, at, even=True)


@pytest.mark.slow
@pytest.mark.parametrize(("table", "ranks", "at"), parts(lambda elements: elements > SMALL))
@on_ranks()
def test_large_cases(rank, table, at):
    return failures(table, at, even=True)


@pytest.mark.slow
@pytest.mark.parametrize(("table", "ranks", "at"), parts(lambda elements: elements <= LARGE))
@on_ranks()
def test_cases_in_other_sizes(rank, table, at):
    """Sizes that peers refuse: drawn, ranks without rows included."""
    return failures(table, at, even=False)


LOW = {  # in autocast: shape, function
    "layer_norm": ((2, 16, 128), lambda x: F.layer_norm(x, (128,))),
    "group_norm": ((2, 256, 32, 32), lambda x: F.group_norm(x, 4)),
    "attention": ((2, 8, 256, 32), lambda x: F.scaled_dot_product_attention(x, x.sin(), x.cos())),
}


@pytest.mark.parametrize("name", LOW)
@on_ranks(3)
def test_autocast(rank, name):
    """PhysicsNeMo's cases in bf16, by its bounds."""
    shape, function = LOW[name]
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = []
    for x in (vc.grid.Grid(shape[2:]).scatter(whole), whole.clone()):
        x.requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = function(x * 1)
        y.float().square().mean().backward()
        found.append([y, x.grad])
    for split, one in zip(*found, strict=True):
        assert split.dtype == one.dtype
        torch.testing.assert_close(split.gather(), one, rtol=5e-2, atol=5e-2)


# --- What peers test and a field refuses, by the name of the function, and why


def fields(rank):
    """Return a field in three parts of rows, and one of them in parts of columns or channels."""
    x = torch.arange(3 * 9 * 12.0).view(1, 3, 9, 12)
    grids = [((9, 12), None), ((9, 12), [None, [4, 4, 4]]), ((3, 9, 12), None)]
    return [vc.grid.Grid(shape, sizes=sizes).scatter(x) for shape, sizes in grids]


WEIGHT = torch.ones(3, 3, 3, 3)
REFUSED = {
    # DistDL, test_channel_conv_2d.py, test_general_conv2d.py: varcomm.tensor_parallel splits layers
    "conv2d of split channels": lambda rows, columns, channels: F.conv2d(channels, WEIGHT),
    # test_batchnorm.py
    "batch_norm of split channels": lambda rows, columns, channels: F.batch_norm(
        channels, None, None, training=True
    ),
    # PhysicsNeMo, test_index.py: which rows travel would depend on values
    "an index of tensors along or beside a split dimension": lambda rows, columns, channels: rows[
        0, 0
    ][torch.tensor([[3, -1], [3, 8]])],
    "index_select along the split dimension": lambda rows, columns, channels: rows.index_select(
        2, torch.tensor([1])
    ),
    # test_select.py: an index that is split; index.gather() is enough
    "index_select with an operand behind the first that is split": lambda rows, *_: (
        rows.index_select(1, (rows[0, 0, :, 0] * 0).long())
    ),
    # test_cross.py, which refuses the same
    "cross along a split dimension": lambda rows, columns, channels: torch.cross(
        channels, channels, dim=1
    ),
    # test_detach.py: detach() has a rule
    "detach_": lambda rows, columns, channels: rows.mul(2).detach_(),
    # test_compile_ops.py: see test_below_functions.py
}


@pytest.mark.parametrize("words", REFUSED)
@on_ranks(3)
def test_refused(rank, words):
    refused_alike(vc.ArgumentError, lambda: REFUSED[words](*fields(rank)), words)
