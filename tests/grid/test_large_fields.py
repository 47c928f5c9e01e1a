"""Convolutions of large fields: of own rows while other ranks' rows travel, then of these."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import varcomm as vc
from tests.grid.comparing import apart_from_one
from tests.worlds import on_ranks

ROWS, COLUMNS = 700, 576
CASES = {
    "3 x 3": ([2, 1, 3, 3], {"padding": 1}),
    "no padding": ([1, 1, 4, 3], {}),
    "stride 2": ([1, 1, 3, 3], {"stride": 2, "padding": 1}),
    "stride 3 of 2 rows": ([1, 1, 2, 2], {"stride": 3, "padding": 1}),
    "dilated": ([1, 1, 3, 3], {"dilation": (4, 1), "padding": (4, 0)}),
    "same, even kernel": ([1, 1, 4, 5], {"padding": "same"}),
    "wide": ([1, 1, 31, 1], {"padding": (15, 0)}),
    "same, even columns": ([1, 1, 3, 4], {"padding": "same"}),
    "more padding than kernel": ([1, 1, 3, 3], {"padding": (3, 2)}),
    "padding beyond 1 row": ([1, 1, 1, 1], {"padding": (3, 0)}),
    "padding beyond 2 rows": ([1, 1, 2, 1], {"padding": (5, 0)}),
}


def compare(case, sizes, mesh=None):
    weight, how = CASES[case]
    torch.manual_seed(0)
    x = torch.randn(1, 1, ROWS, COLUMNS, dtype=torch.float64)
    made = [torch.randn(weight, dtype=torch.float64), torch.randn(weight[0], dtype=torch.float64)]

    def convolved(x, weight, bias):
        return F.conv2d(x, weight, bias, **how).sin()

    return apart_from_one(convolved, x, made, vc.grid.Grid((ROWS, COLUMNS), mesh, sizes))


@pytest.mark.parametrize("case", ["3 x 3", "stride 2", "same, even kernel", "no padding"])
@on_ranks(3)
def test_convolutions(rank, case):
    torch.set_num_threads(1)
    assert compare(case, [[333, 70, 297], None]) < 1e-11


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@on_ranks(2, 3, 5)
def test_convolutions_of_many_sizes(rank, case, ranks):
    torch.set_num_threads(1)
    for own in (ROWS // ranks + 1, 9, 3):  # a rank of few rows ends the overlap
        first = [own] * (ranks - 1)
        assert compare(case, [[*first, ROWS - sum(first)], None]) < 1e-11


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@on_ranks(4)
def test_convolutions_on_a_mesh(rank, case):
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2))
    assert compare(case, [[333, 367], [100, 476]], mesh) < 1e-11


@on_ranks(4)
def test_a_rank_without_columns(rank):
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2))
    assert compare("3 x 3", [[350, 350], [0, 576]], mesh) < 1e-11


@on_ranks(2)
def test_a_transform_of_weights(rank):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    weight, image = (torch.rand(1, 1, *n).double() for n in ((3, 3), (ROWS, COLUMNS)))
    field = vc.grid.Grid((ROWS, COLUMNS)).scatter(image)
    found, expected = (
        torch.func.grad(lambda w, x=x: F.conv2d(x, w, padding=1).sin().mean())(weight)
        for x in (field, image)
    )
    torch.testing.assert_close(vc.all_reduce(found), expected)


@on_ranks(2)
def test_autocast_without_padding_has_one_dtype(rank):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Conv2d(2, 1, 4))
    grid, image = vc.grid.Grid((ROWS, COLUMNS)), torch.randn(1, 1, ROWS, COLUMNS)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = layers(grid.scatter(image)), layers(image)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.gather(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("case", CASES)
@on_ranks(3)
def test_as_many_rows_travel_as_of_a_small_field(rank, case):
    """Of which they are those that are needed (test_bytes.py)."""
    weight, how = CASES[case]
    sent = []
    for columns in (COLUMNS, 12):
        grid = vc.grid.Grid((ROWS, columns), sizes=[[333, 70, 297], None])
        x = grid.field(torch.ones(1, 1, len(grid.ranges[0]), columns, requires_grad=True))
        with vc.trace() as forward:
            y = F.conv2d(x, torch.ones(weight), **how)
        with vc.trace() as backward:
            y.backward(torch.ones_like(y))
        sent.append([calls.total.sent / columns for calls in (forward, backward)])
    assert sent[0] == sent[1]


@on_ranks(2)
def test_a_large_convolution_sends_its_halo_and_keeps_no_copy(rank):
    torch.set_num_threads(1)
    grid = vc.grid.Grid((ROWS, COLUMNS))
    kept = []
    x = grid.field(torch.randn(1, 1, len(grid.ranges[0]), COLUMNS, requires_grad=True))
    weight = torch.randn(1, 1, 3, 3, requires_grad=True)

    def keep(tensor):
        kept.append(tensor.untyped_storage().nbytes())
        return tensor

    with vc.trace() as calls, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y = F.conv2d(x, weight, padding=1)
    assert calls.total.sent == COLUMNS * 4
    own = x.local.nbytes
    assert max(kept) == own
    assert sum(n for n in kept if n != own) < own / 10
    with vc.trace() as calls:
        y.sum().backward()
    sent = sum(call.sent for call in calls if call.name != "all_reduce")
    assert sent == COLUMNS * 4
