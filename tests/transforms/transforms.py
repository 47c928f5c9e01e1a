"""Transforms of operations, each compared with one process.

A function takes an :class:`~tests.transforms.operations.Operation` and asserts. All ranks call it
together.
"""

import copy
import warnings
from functools import partial

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, jvp, linearize, vjp
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from tests.transforms.operations import DIRECTION, THETA

TRANSFORMS = {}


class NothingToDo(Exception):
    """The transform is not for this operation."""


def transform(title):
    def add(fn):
        TRANSFORMS[title] = fn
        return fn

    return add


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


def one_gradient(op, thetas):
    """Return this rank's gradient of the loss in one process, as a function of all thetas."""
    leaves = tuple(thetas)
    return grad(lambda *given: op.one_loss(given), argnums=op.rank)(*leaves)


@transform("`torch.func.grad`")
def check_grad(op):
    close(grad(op.loss)(THETA), one_gradient(op, op.thetas))


@transform("`torch.func.vjp`")
def check_vjp(op):
    y, pull = vjp(op.loss, THETA)
    (got,) = pull(torch.full_like(y, 2))
    close(got, 2 * one_gradient(op, op.thetas))


@transform("`torch.func.jvp`")
def check_jvp(op):
    got = jvp(op.y, (THETA,), (DIRECTION,))
    want = jvp(
        lambda *thetas: tuple(op.one_y(thetas)),
        tuple(op.thetas),
        (DIRECTION,) * len(op.thetas),
    )
    for ours, parts in zip(got, want, strict=True):
        close(ours, parts[op.rank])


@transform("`jvp` of `jvp` of `grad`")
def check_nested(op):
    def along(f):
        return lambda theta: jvp(f, (theta,), (DIRECTION,))[1]

    close(
        along(along(grad(op.loss)))(THETA),
        along(along(lambda theta: one_gradient(op, [theta] * len(op.thetas))))(THETA),
    )


@transform("`torch.func.linearize`")
def check_linearize(op):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of a deprecated way to fold constants
        value, push = linearize(op.y, THETA)
        first, pushed = push(DIRECTION), push(DIRECTION)
    _, want = jvp(lambda theta: op.one_y([theta] * len(op.thetas))[op.rank], (THETA,), (DIRECTION,))
    close(value, op.one_y(op.thetas)[op.rank])
    close(first, want)
    close(pushed, want)


class Holding(nn.Module):
    """The operation as a module, whose parameter is theta."""

    def __init__(self, op):
        super().__init__()
        self.op, self.theta = op, nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, factor):
        return self.op.y(self.theta * factor)


@transform("`functional_call`")
def check_functional_call(op):
    one = torch.ones((), dtype=torch.float64)
    close(functional_call(Holding(op), {"theta": THETA}, (one,)), op.one_y(op.thetas)[op.rank])
    if op.module is not None:
        changed = copy.deepcopy(op.module)
        with torch.no_grad():
            for parameter in changed.parameters():
                parameter.mul_(0.5)
        x = op.x(THETA)
        values = {name: value.detach() / 2 for name, value in op.module.named_parameters()}
        close(functional_call(op.module, values, (x,)), changed(x))


def check_checkpoint(op, reentrant):
    theta = THETA.clone().requires_grad_()
    checkpoint(op.loss, theta, use_reentrant=reentrant).backward()
    close(theta.grad, one_gradient(op, op.thetas))


for reentrant in (False, True):
    title = f"`torch.utils.checkpoint`, `use_reentrant={reentrant}`"
    TRANSFORMS[title] = partial(check_checkpoint, reentrant=reentrant)


@transform("`torch.autocast`")
def check_autocast(op):
    """What only moves is not cast; products of layers are, as torch's own."""
    x, module = op.x(THETA).float().requires_grad_(), op.module and copy.deepcopy(op.module).float()
    call = op.call if module is None else module
    plain = call(x)
    (want,) = torch.autograd.grad(plain.sum(), x)
    with torch.autocast("cpu", torch.bfloat16):
        y = call(x)
        (got,) = torch.autograd.grad(y.sum(), x)
    assert y.dtype == (torch.float32 if module is None else torch.bfloat16)
    bound = 0 if module is None else 0.05
    torch.testing.assert_close(y.float(), plain, rtol=bound, atol=bound)
    torch.testing.assert_close(got, want, rtol=bound, atol=bound)


@transform("`torch.inference_mode`")
def check_inference_mode(op):
    with torch.inference_mode():
        y = op.y(THETA)
    assert y.is_inference()
    close(y.clone(), op.one_y(op.thetas)[op.rank])


@transform("`torch.no_grad`")
def check_no_grad(op):
    with torch.no_grad():
        y = op.y(THETA.clone().requires_grad_())
    assert not y.requires_grad
    close(y, op.one_y(op.thetas)[op.rank])


@transform("`copy.deepcopy` of a module")
def check_deepcopy(op):
    if op.module is None:
        raise NothingToDo
    again = copy.deepcopy(op.module)
    close(again(op.x(THETA)), op.one_y(op.thetas)[op.rank])


def check_fake(op, mode):
    x = op.x(THETA).requires_grad_()
    real = op.call(x)
    (gradient,) = torch.autograd.grad(real.sum(), x)
    values = x.detach()
    with mode:
        fake = mode.from_tensor(values).requires_grad_()
        tensors = fakes(op.module, mode)
        y = functional_call(op.module, tensors, (fake,)) if tensors else op.call(fake)
        (of_fake,) = torch.autograd.grad(y.sum(), fake)
    for ours, theirs in ((y, real), (of_fake, gradient)):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert ours.numel() == 0 or ours.stride() == theirs.stride()


TRANSFORMS["`FakeTensorMode()`"] = lambda op: check_fake(op, FakeTensorMode())
TRANSFORMS["`FakeTensorMode(allow_non_fake_inputs=True)`"] = lambda op: check_fake(
    op, FakeTensorMode(allow_non_fake_inputs=True)
)


def fakes(module, mode):
    """Return the tensors of a module as fakes; none of none."""
    if module is None:
        return {}
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: mode.from_tensor(value) for name, value in tensors.items()}


@transform("`make_fx`")
def check_make_fx(op):
    traced = make_fx(lambda theta: op.y(theta))(THETA)
    close(traced(DIRECTION), op.one_y([DIRECTION] * len(op.thetas))[op.rank])


@transform("`torch.func.vmap`")
def check_vmap(op):
    torch.func.vmap(op.call)(torch.stack([op.x(THETA)] * 2))


@transform("`torch.func.hessian`")
def check_hessian(op):
    torch.func.hessian(op.loss)(THETA)


class Program(nn.Module):
    def __init__(self, op):
        super().__init__()
        self.call, self.module = op.call, op.module

    def forward(self, x):
        return self.call(x)


@transform("`torch.jit.trace`")
def check_jit(op):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        traced = torch.jit.trace(Program(op), (op.x(THETA),), check_trace=False)
    close(traced(op.x(DIRECTION)), op.one_y([DIRECTION] * len(op.thetas))[op.rank])


def check_export(op, strict):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own
        program = torch.export.export(Program(op), (op.x(THETA),), strict=strict)
    got = program.module()(op.x(DIRECTION))
    close(got, op.one_y([DIRECTION] * len(op.thetas))[op.rank])


for strict in (False, True):
    title = f"`torch.export` on one rank, `strict={strict}`"
    TRANSFORMS[title] = partial(check_export, strict=strict)
