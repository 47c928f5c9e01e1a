"""Sums of the copies of each row: bit for bit those of adding them one by one, in one order."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.primitives import random
from varcomm.plan.row_sum import RowSum

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2]
OTHERS = [torch.complex64, torch.complex128, torch.int64, torch.int16, torch.uint8]
SHAPES = [(), (1,), (3,), (2, 3), (17,), (5, 4), (0,)]


def one_by_one(index, values, num_rows, summed_in=None):
    """Add to each row its first copy, then its second, and so on, and round once."""
    total = torch.zeros(num_rows, *values.shape[1:], dtype=summed_in or values.dtype)
    for row, value in zip(index.tolist(), values, strict=True):
        total[row] += value.to(total.dtype)
    return total.to(values.dtype)


def accumulator(dtype):
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def bits(x):
    x = torch.view_as_real(x) if x.is_complex() else x
    return x.contiguous().view(torch.uint8) if x.numel() else x.shape


def same(x, y):
    if x.numel() == 0:
        return x.shape == y.shape
    return x.shape == y.shape and x.dtype == y.dtype and torch.equal(bits(x), bits(y))


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 6), max_size=40),
    st.sampled_from(FLOATS + OTHERS),
    st.sampled_from(SHAPES),
    st.sampled_from([7, 30]),
)
def test_copies_are_added_one_by_one(rows, dtype, shape, num_rows):
    index = torch.tensor(rows, dtype=torch.int64)
    values = random((len(rows), *shape), dtype, torch.Generator().manual_seed(len(rows)))
    before = values.clone()
    got = RowSum(index, num_rows)(values)
    assert same(got, one_by_one(index, values, num_rows, accumulator(dtype)))
    assert same(values, before)


def test_narrow_floats_in_their_own_dtype_and_half_a_bit():
    index = torch.randint(0, 20, (2000,))
    for dtype, shape in product((torch.bfloat16, torch.float16), [(), (1,), (3,), (20,)]):
        values = torch.randn(2000, *shape).to(dtype)
        got = RowSum(index, 20)(values, use_fp32=False)
        assert same(got, one_by_one(index, values, 20))
        assert not same(got, RowSum(index, 20)(values))
    index = torch.tensor([0, 0, 1, 1])
    values = torch.tensor([1.0, 2**-8, 1 + 2**-7, 2**-8], dtype=torch.bfloat16)
    want = torch.tensor([1.0, 1 + 2**-6], dtype=torch.bfloat16)  # rounded to even
    for width in (1, 2, 20):
        got = RowSum(index, 2)(values.view(4, 1).expand(4, width).contiguous())
        assert torch.equal(got, want.view(2, 1).expand_as(got))


def halo(num_rows):
    """A tenth of the rows for one neighbour or for both."""
    rows = torch.randperm(num_rows)[: num_rows // 10].sort().values
    return [rows[: len(rows) // 2], rows[len(rows) // 3 :]]


def dense(num_rows):
    """All rows for each of eight."""
    return [torch.arange(num_rows)] * 8


@pytest.mark.parametrize("width", [1, 3, 16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("copies", [halo, dense])
def test_sum_is_in_rank_order_on_any_number_of_threads_at_every_run(copies, dtype, width):
    to_each = copies(6000)
    from_each = [torch.randn(len(rows), width).to(dtype) for rows in to_each]
    want = torch.zeros(6000, width, dtype=accumulator(dtype))
    for rows, values in zip(to_each, from_each, strict=True):
        want[rows] += values.to(want.dtype)
    threads = torch.get_num_threads()
    sums = []
    for count in (1, 2, 4, 4):
        torch.set_num_threads(count)
        sums.append(RowSum(torch.cat(to_each), 6000)(torch.cat(from_each)))
    torch.set_num_threads(threads)
    assert all(same(total, want.to(dtype)) for total in sums)


def test_strides_and_sums_of_nothing():
    index, nothing = torch.randint(0, 9, (50,)), torch.zeros(0, dtype=torch.int64)
    for values in (
        torch.randn(20).expand(50, 20),
        torch.randn(20, 50).t(),
        torch.randn(50, 20, dtype=torch.complex64).conj(),
    ):
        assert same(RowSum(index, 9)(values), RowSum(index, 9)(values.clone().resolve_conj()))
    assert torch.equal(RowSum(nothing, 3)(torch.zeros(0, 20)), torch.zeros(3, 20))
    assert RowSum(nothing, 0)(torch.zeros(0, 2)).shape == (0, 2)
    assert RowSum(torch.tensor([1]), 2)(torch.zeros(1, 0, 3)).shape == (2, 0, 3)
