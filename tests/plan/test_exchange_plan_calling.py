"""Plans at work: the same sums at every run, bytes, derivatives."""

import time
from itertools import pairwise

import pytest
import torch

import varcomm
from tests.plan.naive import SHAPES, WORLDS, many_copies
from varcomm.testing import dot_test, gradcheck, gradgradcheck


def late(rank, needs, dtype):
    """Sum many times, whichever rank's messages come last."""
    plan = needs.plan_of_indices(rank)
    generator = torch.Generator().manual_seed(rank)
    copies = sum(needs.counts_to(rank))
    y = torch.randn(copies, 3, dtype=torch.float64, generator=generator)
    y = (y * 10.0 ** torch.randint(-6, 7, (copies, 1), generator=generator)).to(dtype)
    totals = []
    for turn in range(6):
        time.sleep(0.01 * ((rank + turn) % needs.ranks))
        again = plan if turn < 3 else needs.plan_of_needed(rank)
        totals.append(again.adjoint(y))
    return [torch.equal(a, b) for a, b in pairwise(totals)], bool(totals[0].abs().sum() > 0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", WORLDS)
def test_sums_are_the_same_bit_for_bit_whoever_is_late(worlds, ranks, dtype):
    answers = worlds.run(ranks, late, many_copies(ranks, 40), dtype)
    assert answers == [([True] * 5, rank == 0) for rank in range(ranks)]


def narrow_sum(rank, dtype, big):
    """Each rank has one copy of the row of rank 0: `big` and 3/4 and 3/4.

    Beside `big` the spacing of `dtype` is 2, so that in `dtype` itself 3/4 is lost each time.
    """
    plan = many_copies(3, 1).plan_of_needed(rank)
    y = torch.tensor([big if rank == 0 else 0.75], dtype=dtype)
    sums = [plan.adjoint(y, use_fp32=wide) for wide in (True, False)]
    for wide in (True, False):
        x = torch.zeros(plan.num_rows, dtype=dtype, requires_grad=True)
        sums.append(torch.autograd.grad(plan(x, use_fp32=wide), x, y)[0])
    assert {total.dtype for total in sums} == {dtype}
    return [total.tolist() for total in sums]


@pytest.mark.parametrize(("dtype", "big"), [(torch.bfloat16, 256.0), (torch.float16, 2048.0)])
def test_narrow_floats_are_summed_in_fp32_and_rounded_once(worlds, dtype, big):
    zero, *others = worlds.run(3, narrow_sum, dtype, big)
    assert zero == [[big + 2], [big], [big + 2], [big]]
    assert others == [[[]] * 4] * 2


def bytes_both_ways(rank, needs, dim):
    """Compare what the plan says that it sends with what goes out, in forward and backward."""
    plan = needs.plan_of_needed(rank)
    x = torch.zeros(needs.sizes[rank], 3, 2).movedim(0, dim).requires_grad_()
    with varcomm.trace() as calls:
        plan(x, dim).sum().backward()
    return plan.nbytes(x, dim), [(call.name, call.sent, call.received) for call in calls]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ranks", [3])
def test_bytes_are_those_of_the_rows_for_others(worlds, ranks, shape, dim):
    needs = SHAPES[shape](ranks)
    for rank, (nbytes, calls) in enumerate(worlds.run(ranks, bytes_both_ways, needs, dim)):
        own, row = needs.counts_from(rank)[rank], 3 * 2 * 4
        sent = (sum(needs.counts_from(rank)) - own) * row
        received = (sum(needs.counts_to(rank)) - own) * row
        assert nbytes == sent
        assert calls == [("exchange", sent, received), ("exchange_adjoint", received, sent)]


def derivatives(rank, shape, ranks, fast_mode):
    needs = SHAPES[shape](ranks)
    plan, other = needs.plan_of_indices(rank), needs.plan_of_needed(rank)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(needs.sizes[rank], 2, dtype=torch.float64, generator=generator)
    y = torch.randn(1, sum(plan.recv_counts), dtype=torch.float64, generator=generator)

    def there(x):
        return plan(x**2).sin()

    def started(x):
        return plan.start((x**2).T, dim=1).wait().exp()

    def and_back(x, y):
        halo = plan.start(x.sin()).wait()
        return other.adjoint(halo * y.T), other.adjoint(y**3, dim=1)

    dot_test(plan, x)
    dot_test(lambda y: plan.adjoint(y, dim=-1), y)
    for fn, inputs in ((there, [x]), (started, [x]), (and_back, [x, y])):
        gradcheck(fn, *inputs, fast_mode=fast_mode)
        gradgradcheck(fn, *inputs, fast_mode=fast_mode)


# the last has many copies of one row, the first none on some ranks
@pytest.mark.parametrize("shape", ["for_last_rank", "all_to_all_needs", "many_copies"])
@pytest.mark.parametrize("ranks", WORLDS)
def test_derivatives(worlds, ranks, shape):
    assert worlds.run(ranks, derivatives, shape, ranks, True) == [None] * ranks
