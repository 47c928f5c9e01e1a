"""Sums of the copies of each row: against index_add in fp64, and how many rounds they take."""

from math import ceil, log2

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.ops.primitives import random
from varcomm.plan.row_sum import RowSum


def index_add(index, values, num_rows):
    wide = torch.complex128 if values.is_complex() else torch.float64
    total = torch.zeros(num_rows, *values.shape[1:], dtype=wide)
    return total.index_add(0, index, values.to(wide))


def most_copies(index):
    return int(torch.bincount(index, minlength=1).max())


@given(
    st.lists(st.integers(0, 6), max_size=40),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.complex128]),
    st.booleans(),
)
def test_sum(rows, dtype, use_fp32):
    index = torch.tensor(rows, dtype=torch.int64)
    values = random((len(rows), 2, 3), dtype, torch.Generator().manual_seed(len(rows)))
    before = values.clone()
    got = RowSum.of(index)(values, 7, use_fp32)
    assert (got.dtype, got.shape) == (dtype, (7, 2, 3))
    assert torch.equal(values, before)
    depth = ceil(log2(max(most_copies(index), 1)))  # roundings that a value can meet
    summed_in = torch.float32 if use_fp32 and dtype == torch.bfloat16 else dtype
    bound = (depth + 1) * torch.finfo(summed_in).eps * index_add(index, values.abs(), 7)
    want = index_add(index, values, 7)
    bound = bound + torch.finfo(dtype).eps / 2 * want.abs()
    assert bool(((got - want).abs() <= bound).all())


@given(st.lists(st.integers(0, 6), max_size=40))
def test_integers_are_exact(rows):
    index = torch.tensor(rows, dtype=torch.int64)
    values = torch.randint(-(2**50), 2**50, (len(rows), 2))
    want = torch.zeros(7, 2, dtype=torch.int64).index_add(0, index, values)
    assert torch.equal(RowSum.of(index)(values, 7, True), want)


@given(st.lists(st.integers(0, 3), max_size=60))
def test_rounds_are_few_and_no_two_additions_of_a_round_meet(rows):
    index = torch.tensor(rows, dtype=torch.int64)
    rounds = RowSum.of(index).rounds
    assert len(rounds) == ceil(log2(max(most_copies(index), 1)))
    for to, what in rounds:
        places = torch.cat([to, what])
        assert len(places.unique()) == len(places)
        assert torch.equal(index[to], index[what])


def test_rounds_of_a_row_that_all_have():
    assert len(RowSum.of(torch.zeros(100_000, dtype=torch.int64)).rounds) == 17
    assert RowSum.of(torch.arange(100_000)).rounds == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sum_does_not_depend_on_threads(dtype):
    index = torch.randint(0, 50, (20_000,))
    values = torch.randn(20_000, 8).to(dtype)
    threads = torch.get_num_threads()
    sums = []
    for count in (1, 2, 4):
        torch.set_num_threads(count)
        sums.append(RowSum.of(index)(values, 60, True))
    torch.set_num_threads(threads)
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], sums[2])
    assert bool((sums[0][50:] == 0).all())


def test_sum_of_nothing():
    nothing = RowSum.of(torch.zeros(0, dtype=torch.int64))
    assert torch.equal(nothing(torch.zeros(0, 2), 3, True), torch.zeros(3, 2))
    assert nothing(torch.zeros(0, 2), 0, True).shape == (0, 2)


def test_sum_elsewhere():
    index = torch.tensor([1, 0, 1, 1])
    values = torch.tensor([1.0, 2.0, 3.0, 4.0])
    there = RowSum.of(index).to("meta")
    assert there(values.to("meta"), 2, True).shape == (2,)
    assert RowSum.of(index).to("cpu")(values, 2, True).tolist() == [2, 8]
