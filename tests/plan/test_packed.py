"""Several tensors in one exchange of a plan: values, messages, derivatives, refusals."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad

import varcomm
from tests.plan.naive import all_to_all_needs, in_a_ring, of_first_rank
from tests.worlds import WORLDS, on_ranks
from varcomm import ArgumentError

DTYPES = [
    (torch.float64, torch.float64, torch.float64),
    (torch.float32, torch.int64, torch.float32),
    (torch.bfloat16, torch.complex64, torch.bool),
]


def drawn(plan, dtypes=DTYPES[0]):
    shapes = zip([(2, 3), (), (1,)], dtypes, strict=True)
    return [torch.randn(plan.num_rows, *shape).to(dtype) for shape, dtype in shapes]


ALL_TO_ALL, OF_FIRST = all_to_all_needs(3), of_first_rank(3)


@pytest.mark.parametrize("make", [all_to_all_needs, of_first_rank, in_a_ring])
@on_ranks(*WORLDS)
def test_rows_bytes_and_messages(rank, ranks, make):
    """Compare with one exchange for each tensor: rows, bytes, messages."""
    plan = make(ranks).plan_of_indices(rank)
    for dtypes in DTYPES:
        xs = drawn(plan, dtypes)
        with varcomm.trace() as packed:
            together = plan(*xs)
        with varcomm.trace() as one_by_one:
            apart = [plan(x) for x in xs]
        assert all(map(torch.equal, together, apart))
        assert len(packed) == len(set(dtypes))
        assert packed.total.sent == one_by_one.total.sent
        assert packed.total.messages_sent * 3 == one_by_one.total.messages_sent * len(set(dtypes))
    x, y, _ = drawn(plan)
    x = x.movedim(0, -1)
    assert all(map(torch.equal, plan(x, y, dim=-1), (plan(x, -1), plan(y))))
    wide, narrow = plan(x, y, dim=-1)
    wide.zero_()  # results may be written into
    assert torch.equal(narrow, plan(y))


def energy(outs):
    a, b, c = outs
    return (a.sin().sum((1, 2)) * b**3).sum() + (c * c * b.view(-1, 1)).sum()


@pytest.mark.parametrize("make", [all_to_all_needs, of_first_rank])
@on_ranks(*WORLDS)
def test_derivatives(rank, ranks, make):
    """Compare derivatives of three orders, and of both modes, with one exchange for each tensor."""
    plan = make(ranks).plan_of_indices(rank)
    xs = [x.requires_grad_() for x in drawn(plan)]
    apart, found = (lambda *xs: [plan(x) for x in xs]), []
    for call in (plan, apart):
        value, orders = energy(call(*xs)), []
        for _ in range(3):
            gradients = torch.autograd.grad(value, xs, create_graph=True)
            orders.append([g.detach() for g in gradients])
            value = sum((g**2).sum() for g in gradients)
        with varcomm.trace() as calls:
            torch.autograd.grad(energy(call(*xs)), xs)
        found.append(orders)
        assert len(calls) == (2 if call is plan else 6)
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    given, ones = [x.detach() for x in xs], torch.ones_like(xs[0])
    with forward_ad.dual_level():
        duals = plan(forward_ad.make_dual(given[0], ones), *given[1:])
        assert bool(forward_ad.unpack_dual(duals[0]).tangent.eq(1).all())
        assert bool(forward_ad.unpack_dual(duals[1]).tangent.eq(0).all())
    out, tangents = torch.func.jvp(plan, (given[0],) * 2, (ones, 2 * ones))
    assert torch.equal(out[1], plan(given[0]))
    assert bool(tangents[1].eq(2).all())
    some = plan(xs[0], given[1])  # of which one has no gradient
    (gradient,) = torch.autograd.grad(some[0].sum() + some[1].sum(), xs[0])
    assert torch.equal(gradient, plan.adjoint(torch.ones_like(some[0])))
    with varcomm.debug():
        energy(plan(*xs)).backward()
    assert all(x.grad.shape == x.shape for x in xs)


@on_ranks(3)
def test_sums_follow_the_rule_of_fp32(rank):
    """Copies of narrow floats are summed in fp32, unless the caller says otherwise."""
    plan = OF_FIRST.plan_of_indices(rank)
    x, y = (torch.randn(plan.num_rows, 2).bfloat16().requires_grad_() for _ in range(2))
    for use_fp32 in (True, False):
        outs = plan(x, y, use_fp32=use_fp32)
        grads = [torch.randn_like(out) for out in outs]
        found = torch.autograd.grad(outs, [x, y], grads)
        want = [plan.adjoint(g, use_fp32=use_fp32) for g in grads]
        assert all(map(torch.equal, found, want))


@on_ranks(3)
def test_forward_over_reverse(rank):
    """The tangent of a gradient is that of separate calls."""
    plan = OF_FIRST.plan_of_indices(rank)
    xs = [torch.randn(plan.num_rows, k, dtype=torch.float64) for k in (2, 3)]
    ts = [torch.randn_like(x) for x in xs]

    def tangents(call):
        with forward_ad.dual_level():
            duals = [
                forward_ad.make_dual(x.clone().requires_grad_(), t)
                for x, t in zip(xs, ts, strict=True)
            ]
            found = torch.autograd.grad(sum((y**3).sum() for y in call(*duals)), duals)
            return [forward_ad.unpack_dual(each).tangent for each in found]

    together = tangents(plan)
    torch.testing.assert_close(together, tangents(lambda *xs: [plan(x) for x in xs]))


@on_ranks(3)
def test_arguments_by_position(rank):
    """A dimension by position, and the rule of sums by name."""
    plan = OF_FIRST.plan_of_indices(rank)
    x = torch.randn(2, plan.num_rows).bfloat16().requires_grad_()
    g = torch.randn(2, sum(plan.recv_counts)).bfloat16()
    for use_fp32 in (True, False):
        (found,) = torch.autograd.grad(plan(x, 1, use_fp32=use_fp32), x, g)
        assert torch.equal(found, plan.adjoint(g, 1, use_fp32))


@pytest.mark.slow
@on_ranks(3)
def test_compiled(rank):
    plan = ALL_TO_ALL.plan_of_indices(rank)
    xs = [x.requires_grad_() for x in drawn(plan)]
    fast = torch.compile(lambda *xs: energy(plan(*xs)), fullgraph=True, backend="aot_eager")
    with varcomm.trace() as calls:
        got = torch.autograd.grad(fast(*xs), xs)
    torch.testing.assert_close(got, torch.autograd.grad(energy(plan(*xs)), xs))
    assert len(calls) == 2


@on_ranks(3)
def test_refusals_before_any_message(rank):
    plan = ALL_TO_ALL.plan_of_indices(rank)
    x, y, _ = drawn(plan)
    with varcomm.trace() as calls:
        for second in (torch.cat([y, y[:1]]), None):
            with pytest.raises(ArgumentError):
                plan(x, y, second)
        with pytest.raises(ArgumentError):
            plan(x, y, dim=1)
        with pytest.raises(ArgumentError, match="1 more"):
            plan(x, 0, True, 1)
    assert not calls
