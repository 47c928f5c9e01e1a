"""Transforms of torch around collectives; most are in tests/transforms."""

import warnings

import pytest
import torch
import torch.autograd.forward_ad as forward_ad

import varcomm
from tests.ops.comparing import Failures, assert_none
from tests.ops.primitives import case
from tests.ops.test_async import COMMUNICATE


def check_async_under_transforms(rank, name):
    failures = Failures()
    c = case(name, "off by one", 2)  # the root is rank 1
    op, x = c.bind(), c.input(rank, torch.float64)
    weight = torch.linspace(1, 2, op(x).numel(), dtype=torch.float64)

    def now(x):
        return (op(x**2).flatten() * weight).sum()

    def later(x):
        return (op(x**2, async_op=True).wait().flatten() * weight).sum()

    with failures.named("grad"):
        assert torch.equal(torch.func.grad(later)(x), torch.func.grad(now)(x))
    with failures.named("jvp"):
        pairs = zip(torch.func.jvp(later, (x,), (x,)), torch.func.jvp(now, (x,), (x,)), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    return failures


@pytest.mark.parametrize("name", COMMUNICATE)
def test_asynchronous_calls_under_transforms(worlds, name):
    assert_none(worlds.run(2, check_async_under_transforms, name))


def reverse_over_forward(rank, name):
    """The tangent on rank 1 depends on nothing, and yet rank 1 takes part in its derivative."""
    c = case(name, "even", 2)  # the root is rank 1
    op = c.bind()
    x = c.input(rank, torch.float64).requires_grad_()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        y = op(dual**3 if rank == 0 else dual.clone())
        tangent = forward_ad.unpack_dual(y).tangent
        (gradient,) = torch.autograd.grad(tangent.sum(), x)
    return float((gradient - 6 * x).abs().max()), float(gradient.abs().max())


SUMMED_ONCE = ("all_to_all_v", "transpose_v", "gather_v")


@pytest.mark.parametrize("name", SUMMED_ONCE)
def test_reverse_over_forward_mode_where_one_rank_is_linear(worlds, name):
    (cubed, _), (_, linear) = worlds.run(2, reverse_over_forward, name)
    assert cubed < 1e-12
    assert linear == 0


@pytest.mark.parametrize("name", ["all_gather_v", "all_reduce", "plan_from_needed", "broadcast"])
def test_reverse_over_forward_mode_ends(worlds, name):
    *_, (_, linear) = worlds.run(2, reverse_over_forward, name)
    assert linear == 0


def compiled_transforms(rank):
    """Run as they are, at a break of the graph: torch's operators have no rules for transforms."""
    sizes = [2, 1]
    x = torch.arange(3.0 * sizes[rank]).view(3, sizes[rank]) + rank

    def gather(x):
        return varcomm.all_gather_v(x**2, sizes)

    def later(x):
        return varcomm.all_gather_v(x**2, sizes, async_op=True).wait()

    answers = []
    for fn in (gather, later):
        for transformed in (
            lambda x, fn=fn: torch.func.jvp(fn, (x[0],), (x[1],))[1],
            lambda x, fn=fn: torch.func.vmap(fn)(x),
        ):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the compiler's, of what it does not know
                with varcomm.trace() as t:
                    got = torch.compile(transformed, backend="eager")(x)
            answers.append((torch.equal(got, transformed(x)), t.total.calls))
    return answers


def test_compiled_transforms_are_run_as_they_are():
    # a value and a tangent, or one call for the batch
    assert varcomm.launch(compiled_transforms, 2) == [[(True, 2), (True, 1)] * 2] * 2
