"""Derivatives of every primitive: the dot test, gradients of a single-process twin, all orders."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad

import varcomm
from tests.ops.comparing import LAYOUTS, Failures, twin_gradients
from tests.ops.primitives import PATTERNS, PRIMITIVES, SPLITS, case, random
from tests.worlds import WORLDS, on_ranks
from varcomm.testing import dot_test, gradcheck, gradgradcheck

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.complex128)
# Rounding of 16 terms at most, in the dtype: bf16 is summed in fp32 and rounded once.
RTOL = {dtype: 8 * torch.finfo(dtype).eps for dtype in DTYPES}
ROOTED = ("scatter_v", "broadcast")
# Each dimension with an even and an uneven pattern.
DIMS = {"even": 1, "off by one": 0, "one empty": -1, "all on one": 0}
COLLECTIVE = [name for name in PRIMITIVES if name != "shard_v"]


def storage(x):
    return x.untyped_storage().data_ptr() or None


@pytest.mark.parametrize(("ranks", "pattern"), SPLITS)
@pytest.mark.parametrize("name", PRIMITIVES)
@on_ranks()
def test_adjoint(rank, name, pattern, ranks):
    failures = Failures()
    for dim, rest in ((0, (2, 3)), (1, (2, 3)), (-1, (2, 3)), (0, (2,))):
        c = case(name, pattern, ranks, dim, rest)
        op = c.bind()
        for dtype in DTYPES:
            with failures.named("dot test", dim, rest, dtype):
                dot_test(op, c.input(rank, dtype), rtol=RTOL[dtype])
        for layout in (None, *LAYOUTS):
            dtype = torch.complex128 if layout == "conjugate" else torch.float64
            inputs = [x if x is None else x.requires_grad_() for x in c.draw(dtype)]
            laid_out, generator = LAYOUTS.get(layout, lambda w: w), torch.Generator().manual_seed(7)
            weights = [laid_out(random(y.shape, dtype, generator)) for y in c.reference(inputs)]
            want = twin_gradients(c, inputs, weights)[rank]
            x, weight = inputs[rank], weights[rank]
            if x is None:  # any tensor serves, and gets zeros
                x = torch.ones(2, 3, dtype=dtype).T.requires_grad_()
                want = torch.zeros_like(x)
            before = weight.clone()
            (got,) = torch.autograd.grad(op(x), x, weight)
            with failures.named("gradient", dim, rest, layout):
                assert got.shape == x.shape
                torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)
                assert torch.equal(weight, before), "the incoming gradient has changed"
                if name != "shard_v":
                    shared = storage(got) in (storage(weight), storage(x))
                    assert not (storage(got) and shared), "the gradient shares memory"
    return failures


@on_ranks(3)
def test_results_are_recorded_on_all_ranks_or_on_none(rank):
    """Results require a gradient on all ranks or on none; other ranks' stand-ins get zeros."""
    failures = Failures()
    for name in COLLECTIVE:  # shard_v is a view, and follows torch's own rules under no_grad
        c = case(name, "off by one", 3)  # the root is rank 1
        op, x = c.bind(), c.draw(torch.float64)[rank]
        given = [x if x is None else x.clone().requires_grad_() for _ in range(2)]
        with torch.no_grad():
            off = op(given[0])
        with_none = op(given[1])
        at_root = x is not None
        stand_in = x if at_root else torch.ones(2, dtype=torch.float64, requires_grad=True)
        plain = op(stand_in)
        with failures.named(name):
            assert with_none.requires_grad
            assert not off.requires_grad
            assert not plain.requires_grad
        with_none.sum().backward()
        if name not in ROOTED:
            continue
        x = c.input(rank, torch.float64).requires_grad_()
        y = op(x**2)
        weight = torch.ones_like(y).requires_grad_()
        (gradient,) = torch.autograd.grad(y, x, weight, create_graph=True)
        (second,) = torch.autograd.grad(gradient.sum(), weight)
        # ask for a parameter's gradient and, as the docstring says, for that of a stand-in
        x = torch.empty(0) if not at_root else c.draw(torch.float64)[rank]
        factor = torch.ones((), dtype=torch.float64, requires_grad=True)
        loss = (op(x.requires_grad_()) * factor).sum()
        of_x, of_factor = torch.autograd.grad(loss, [x, factor])
        with failures.named(name, "zeros that belong to the graph"):
            assert gradient.requires_grad
            assert bool(gradient.abs().sum() > 0) == at_root
            assert second.sum() != 0
            assert of_x.shape == x.shape
            assert of_factor == loss
    # backward communicates, whichever gradient a rank asks for
    x, other = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    y = varcomm.all_reduce(x * other) * (rank + 1)
    (gradient,) = torch.autograd.grad(y, x if rank == 0 else other)
    with failures.named("one rank asks for another gradient"):
        assert gradient == 6
    return failures


def check_derivatives(rank, name, ranks, pattern, dtype=torch.float64, fast_mode=True):
    c = case(name, pattern, ranks, DIMS[pattern], rest=(2,))
    op = c.bind()

    def fn(x):
        return torch.sin(op(torch.sin(x)))

    gradcheck(fn, c.input(rank, dtype), fast_mode=fast_mode)
    gradgradcheck(fn, c.input(rank, dtype), fast_mode=fast_mode)


@pytest.mark.parametrize(("ranks", "pattern"), SPLITS)
@pytest.mark.parametrize("name", PRIMITIVES)
@on_ranks()
def test_first_and_second_derivatives(rank, name, ranks, pattern):
    check_derivatives(rank, name, ranks, pattern)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("name", PRIMITIVES)
@on_ranks(3)
def test_derivatives_coordinate_by_coordinate(rank, name, dtype):
    check_derivatives(rank, name, 3, "off by one", dtype, fast_mode=False)


def tangents_of_twin(c, dtype):
    """Differentiate the reference in forward mode: the tangents of all ranks' results."""
    primals, tangents = ([x for x in c.draw(dtype, seed) if x is not None] for seed in (0, 1))

    def reference(*given):
        left = iter(given)
        return tuple(c.reference([None if shape is None else next(left) for shape in c.shapes]))

    return torch.func.jvp(reference, tuple(primals), tuple(tangents))


@pytest.mark.parametrize("name", PRIMITIVES)
@on_ranks(*WORLDS)
def test_forward_mode(rank, name, ranks):
    failures = Failures()
    for pattern in PATTERNS:
        for dtype in (torch.float64, torch.complex128):
            c = case(name, pattern, ranks, DIMS[pattern])
            x, tangent = c.input(rank, dtype), c.input(rank, dtype, seed=1)
            got = torch.func.jvp(c.bind(), (x,), (tangent,))
            with failures.named(pattern, dtype):
                for part, parts in zip(got, tangents_of_twin(c, dtype), strict=True):
                    torch.testing.assert_close(part, parts[rank], rtol=1e-14, atol=1e-14)
    if name in ROOTED:  # with None on non-root ranks
        c = case(name, "off by one", ranks)
        op, x = c.bind(), c.draw(torch.float64)[rank]
        with forward_ad.dual_level():
            if x is not None:
                x = forward_ad.make_dual(x, c.draw(torch.float64, seed=1)[rank])
            value, tangent = forward_ad.unpack_dual(op(x))
        values, tangents = tangents_of_twin(c, torch.float64)
        with failures.named("None"):
            assert torch.equal(value, values[rank])
            assert torch.equal(tangent, tangents[rank])
    return failures


def losses(results, kind):
    """One loss per rank: cubic, but rank 0's is of another kind."""
    for rank, y in enumerate(results):
        if rank > 0 or kind == "cubic":
            yield (y**3).sum()
        else:
            yield y.sum() if kind == "linear" else 0 * y.sum()


def penalty(losses, inputs, order):
    """Differentiate all but once; the squared gradient is differentiated next."""
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


QUICK = ("all_gather_v", "all_reduce", "broadcast", "gather_v", "plan_from_needed")
SLOW = pytest.mark.slow
ORDERS = [
    *(pytest.param(name, 2, "none at all") for name in COLLECTIVE),
    *(pytest.param(name, 2, "linear", marks=SLOW) for name in COLLECTIVE),
    *(pytest.param(name, 3, "linear", marks=[] if name in QUICK else SLOW) for name in COLLECTIVE),
    *(pytest.param(name, 3, "cubic", marks=SLOW) for name in COLLECTIVE),
]


@pytest.mark.parametrize(("name", "order", "kind"), ORDERS)
@on_ranks(3)
def test_higher_derivatives_where_rank_0_has_another_loss(rank, name, order, kind):
    return check_order(rank, name, 3, order, kind)
