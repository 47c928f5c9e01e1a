"""Transforms of torch around collectives: those that work, and those that must be refused."""

import re
import warnings

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import varcomm
from tests.ops.comparing import Failures, assert_none
from tests.ops.primitives import PRIMITIVES, case
from tests.ops.test_async import COMMUNICATE

MADE = [name for name in PRIMITIVES if name != "shard_v"]


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


def jit_trace(op, x):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".torch.jit.trace. is deprecated")
        return torch.jit.trace(op, (x,), check_trace=False)


def refused(rank, name):
    c = case(name, "off by one", 2)
    call, x = c.bind(), c.input(rank, torch.float64)
    told = []

    def op(x):  # tracers look at signatures
        return call(x)

    for transform in (
        lambda: torch.func.linearize(op, x),
        lambda: make_fx(op)(x),
        lambda: jit_trace(op, x),
        lambda: torch.func.vmap(op)(torch.stack([x, x])),
        lambda: torch.func.jacrev(op)(x),
    ):
        with pytest.raises(varcomm.ArgumentError) as caught:
            transform()
        told.append(str(caught.value))
    varcomm.all_reduce(torch.ones(1))
    return told


@pytest.mark.parametrize("name", [name for name in MADE if name not in ("broadcast", "scatter_v")])
def test_tracing_and_batching_are_refused(worlds, name):
    for rank, told in enumerate(worlds.run(2, refused, name)):
        for text in told[:3]:
            assert re.match(rf"\w+ on rank {rank} of 2: a collective cannot be traced", text)
        for text in told[3:]:
            assert re.match(rf"\w+ on rank {rank} of 2: vmap, and with it jacrev", text)


def compiled(rank, backend):
    sizes = [2, 1]

    def fn(x):
        return varcomm.all_gather_v(x**2, sizes).sin() * varcomm.all_reduce(x.sum())

    x = torch.arange(1.0, sizes[rank] + 1).requires_grad_()
    want = fn(x)
    (gradient,) = torch.autograd.grad(want.sum(), x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's, of what it does not know
        got = torch.compile(fn, backend=backend)(x)
    (of_compiled,) = torch.autograd.grad(got.sum(), x)
    return torch.allclose(got, want), torch.allclose(of_compiled, gradient)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_functions_break_their_graph_at_collectives(backend):
    """In ranks of its own: the compiler stays in a process."""
    assert varcomm.launch(compiled, 2, backend) == [(True, True)] * 2
