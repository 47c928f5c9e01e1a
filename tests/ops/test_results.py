"""What a result may be: written to, of any dtype, and free of what made it."""

import gc
import weakref

import pytest
import torch

import varcomm
from tests.ops.comparing import Failures, assert_none
from tests.ops.primitives import PRIMITIVES, Setting, case
from varcomm import ArgumentError, ExchangePlan

MADE = [name for name in PRIMITIVES if name != "shard_v"]  # which gives a view


def check_in_place(rank, name):
    failures = Failures()
    cases = [case(name, pattern, 3, dim) for pattern in ("even", "one empty") for dim in (0, 1)]
    if name in ("all_reduce", "reduce", "broadcast"):
        cases.append(PRIMITIVES[name](Setting((9000, 0, 0), 0, (1,), 2)))  # by pieces
    for number, c in enumerate(cases):
        op = c.bind()
        x = c.input(rank, torch.float64).requires_grad_()
        y = op(x)
        want = y.detach() * 2
        (gradient,) = torch.autograd.grad(y.sum(), x)
        z = op(x)
        z.mul_(2)
        (doubled,) = torch.autograd.grad(z.sum(), x)
        with failures.named(number):
            assert torch.equal(z, want)
            assert torch.equal(doubled, 2 * gradient)
    return failures


@pytest.mark.parametrize("name", MADE)
def test_result_may_be_changed_in_place(worlds, name):
    assert_none(worlds.run(3, check_in_place, name))


FLOATS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.complex64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32]
UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]


def check_dtype(rank, dtype):
    """All values are small whole numbers, so that nothing but the last step rounds."""
    failures = Failures()
    for name in PRIMITIVES:
        c = case(name, "off by one", 3)
        if c.sums and dtype in UNSIGNED:
            continue
        generator = torch.Generator().manual_seed(4)
        inputs = [
            s if s is None else torch.randint(0, 3, s, generator=generator).double()
            for s in c.shapes
        ]
        x = torch.ones(2).to(dtype) if inputs[rank] is None else inputs[rank].to(dtype)
        back = dtype in FLOATS and name != "shard_v"
        x.requires_grad_(back)
        y = c.bind()(x)
        with failures.named(name):
            assert y.dtype == dtype
            want = c.reference(inputs)[rank].to(dtype)
            assert torch.equal(y.detach().to(torch.complex128), want.to(torch.complex128))
        if back:
            (gradient,) = torch.autograd.grad(y, x, torch.ones(y.shape).to(dtype))
            with failures.named(name, "backward"):
                assert gradient.dtype == dtype
                assert gradient.shape == x.shape
    return failures


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, *UNSIGNED], ids=str)
def test_dtypes(worlds, dtype):
    assert_none(worlds.run(3, check_dtype, dtype))


def unsummable(rank):
    plan = ExchangePlan.from_needed(torch.tensor([0]), [1, 1])
    sums = (
        varcomm.all_reduce,
        varcomm.reduce,
        lambda x, **how: varcomm.reduce_scatter_v(x, [1, 0], **how),
        plan.adjoint,
    )
    eighth = torch.ones(1).to(torch.float8_e5m2)
    for op in sums:
        for dtype in UNSIGNED:
            with pytest.raises(ArgumentError, match=rf"torch cannot add {dtype}. Take another dt"):
                op(torch.ones(1).to(dtype))
        with pytest.raises(ArgumentError, match=r"add torch\.float8_e5m2\. Take use_fp32=True"):
            op(eighth, use_fp32=False)
    packed = torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    with pytest.raises(ArgumentError, match=r"holds two values a byte. Pass view\(torch.uint8\)"):
        varcomm.all_gather_v(packed, [2, 2])
    return varcomm.all_reduce(eighth).float().item()


def test_dtypes_without_a_sum_are_refused(worlds):
    assert worlds.run(2, unsummable) == [2.0, 2.0]


def freed(rank):
    x = torch.ones(10)
    handle = varcomm.all_gather_v(x, [10, 10], async_op=True)
    gone = weakref.ref(x)
    result = handle.wait()
    del x
    gc.collect()
    return gone() is None, handle.wait() is result


def test_a_handle_that_is_done_keeps_the_result_alone(worlds):
    assert worlds.run(2, freed) == [(True, True)] * 2


def with_other_default_device(rank):
    plan = ExchangePlan.from_needed(torch.tensor([0, 1]), [1, 1])
    with torch.device("meta"):
        sent = torch.full((1,), 3.0, device="cpu") if rank == 0 else None
        return varcomm.broadcast(sent).item(), plan(torch.ones(1, device="cpu")).tolist()


def test_default_device_does_not_matter(worlds):
    assert worlds.run(2, with_other_default_device) == [(3.0, [1.0, 1.0])] * 2
