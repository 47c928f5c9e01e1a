"""Derivatives of first, second and third order and forward mode, of every primitive."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad

import varcomm
from tests.ops.comparing import Failures, assert_none
from tests.ops.primitives import PATTERNS, PRIMITIVES, SPLITS, case
from tests.worlds import WORLDS
from varcomm.testing import gradcheck, gradgradcheck

ROOTED = ("scatter_v", "broadcast")
# Each dimension with an even and an uneven pattern.
DIMS = {"even": 1, "off by one": 0, "one empty": -1, "all on one": 0}


def check_derivatives(rank, name, ranks, pattern, dtype, fast_mode):
    c = case(name, pattern, ranks, DIMS[pattern], rest=(2,))
    op = c.bind()

    def fn(x):
        return torch.sin(op(torch.sin(x)))

    gradcheck(fn, c.input(rank, dtype), fast_mode=fast_mode)
    gradgradcheck(fn, c.input(rank, dtype), fast_mode=fast_mode)


@pytest.mark.parametrize(("ranks", "pattern"), SPLITS)
@pytest.mark.parametrize("name", PRIMITIVES)
def test_first_and_second_derivatives(worlds, name, ranks, pattern):
    told = worlds.run(ranks, check_derivatives, name, ranks, pattern, torch.float64, True)
    assert told == [None] * ranks


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("name", PRIMITIVES)
def test_derivatives_coordinate_by_coordinate(worlds, name, dtype):
    told = worlds.run(3, check_derivatives, name, 3, "off by one", dtype, False)
    assert told == [None] * 3


def given_tensors(c, dtype, seed=0):
    return [x for x in c.draw(dtype, seed) if x is not None]


def tangents_of_twin(c, dtype):
    """Differentiate the reference in forward mode: the tangents of all ranks' results."""
    inputs = c.draw(dtype)

    def reference(*given):
        left = iter(given)
        return tuple(c.reference([None if x is None else next(left) for x in inputs]))

    primals, tangents = given_tensors(c, dtype), given_tensors(c, dtype, seed=1)
    return torch.func.jvp(reference, tuple(primals), tuple(tangents))


def check_jvp(rank, name, ranks):
    failures = Failures()
    for pattern in PATTERNS:
        for dtype in (torch.float64, torch.complex128):
            c = case(name, pattern, ranks, DIMS[pattern])
            op = c.bind()
            x, tangent = c.input(rank, dtype), c.input(rank, dtype, seed=1)
            got = torch.func.jvp(op, (x,), (tangent,))
            want = tangents_of_twin(c, dtype)
            with failures.named(pattern, dtype):
                for part, parts in zip(got, want, strict=True):
                    torch.testing.assert_close(part, parts[rank], rtol=1e-14, atol=1e-14)
    return failures


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("name", PRIMITIVES)
def test_forward_mode(worlds, name, ranks):
    assert_none(worlds.run(ranks, check_jvp, name, ranks))


def check_jvp_of_none(rank, name, ranks):
    failures = Failures()
    c = case(name, "off by one", ranks)
    op, x = c.bind(), c.draw(torch.float64)[rank]
    with forward_ad.dual_level():
        if x is not None:
            x = forward_ad.make_dual(x, c.draw(torch.float64, seed=1)[rank])
        value, tangent = forward_ad.unpack_dual(op(x))
    values, tangents = tangents_of_twin(c, torch.float64)
    with failures.named(name):
        assert torch.equal(value, values[rank])
        assert tangent is not None
        assert torch.equal(tangent, tangents[rank])
    return failures


@pytest.mark.parametrize("ranks", [3])
@pytest.mark.parametrize("name", ROOTED)
def test_forward_mode_with_none_off_the_root(worlds, name, ranks):
    assert_none(worlds.run(ranks, check_jvp_of_none, name, ranks))


def losses(results, kind):
    """One loss a rank: cubic, but rank 0's is of another kind."""
    for rank, y in enumerate(results):
        if rank > 0 or kind == "cubic":
            yield (y**3).sum()
        else:
            yield y.sum() if kind == "linear" else 0 * y.sum()


def penalty(losses, inputs, order):
    """Differentiate all but once; what is differentiated next is the squared gradient."""
    for _ in range(order - 1):
        gradients = torch.autograd.grad(losses, inputs, create_graph=True, materialize_grads=True)
        losses = [sum((g**2).sum() for g in gradients)]
    return losses


def check_order(rank, name, ranks, order, kind, async_op=False):
    failures = Failures()
    for pattern in PATTERNS:
        c = case(name, pattern, ranks, DIMS[pattern])
        inputs = [None if x is None else x.requires_grad_() for x in c.draw(torch.float64)]
        given = [x for x in inputs if x is not None]
        # the zeros: where all is linear, gradients would not depend on the inputs
        total = sum(0 * (x**4).sum() for x in given) + sum(losses(c.reference(inputs), kind))
        wanted = iter(torch.autograd.grad(penalty([total], given, order), given))
        want = [None if x is None else next(wanted) for x in inputs][rank]

        x = c.input(rank, torch.float64).requires_grad_()
        results = [torch.zeros(0)] * ranks
        results[rank] = c.bind()(x, async_op=True).wait() if async_op else c.bind()(x)
        own = list(losses(results, kind))[rank]
        (got,) = torch.autograd.grad(penalty([own], [x], order), x)
        with failures.named(pattern, order, kind):
            want = torch.zeros_like(x) if want is None else want
            torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    return failures


COLLECTIVE = [name for name in PRIMITIVES if name != "shard_v"]
QUICK = ("all_gather_v", "all_reduce", "broadcast", "gather_v", "plan_from_needed")
SOME = [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in COLLECTIVE]


@pytest.mark.parametrize("kind", ["none at all", pytest.param("linear", marks=pytest.mark.slow)])
@pytest.mark.parametrize("ranks", [3])
@pytest.mark.parametrize("name", COLLECTIVE)
def test_second_derivative_where_one_rank_has_none(worlds, name, ranks, kind):
    assert_none(worlds.run(ranks, check_order, name, ranks, 2, kind))


@pytest.mark.parametrize("kind", ["linear", pytest.param("cubic", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SOME)
def test_third_derivative(worlds, name, kind):
    assert_none(worlds.run(3, check_order, name, 3, 3, kind))


def gradient_ignored_on_one_rank(rank):
    """The gradient of the first pass enters the second loss by a zero on rank 1."""
    x = torch.tensor([rank + 1.0], dtype=torch.float64, requires_grad=True)
    total = varcomm.all_reduce(x**2)
    (gradient,) = torch.autograd.grad((total**2).sum(), x, create_graph=True)
    loss = gradient.sum() * (0.0 if rank == 1 else 1.0)
    return gradient.item(), torch.autograd.grad(loss, x)[0].item()


def test_second_derivative_where_one_rank_ignores_the_first(worlds):
    # S = 1 + 4 + 9; the total loss is 3 S^2, so g_i = 12 x_i S and
    # d(g_0 + g_2) / dx_k = 24 x_k (x_0 + x_2) + 12 S [k is 0 or 2]
    answers = worlds.run(3, gradient_ignored_on_one_rank)
    assert [first for first, _ in answers] == [12.0 * 14, 24.0 * 14, 36.0 * 14]
    assert [second for _, second in answers] == [96.0 + 168, 192.0, 288.0 + 168]
