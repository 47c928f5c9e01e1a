"""Transforms of cases, each compared with one process; all ranks call a transform together."""

import copy
import warnings
from functools import partial

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, jvp, linearize, vjp
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

TRANSFORMS = {}


class Operation:
    """A case on this rank, beside one process with the inputs of all ranks.

    `y` and `loss` map this rank's `x`, `ys` and `losses` those of all ranks. Losses are cubic, but
    rank 0's own is linear, so that its gradient is a constant.
    """

    def __init__(self, case, rank, is_async):
        self.case, self.rank, bound = case, rank, case.bind()
        self.call = (lambda x: bound(x, async_op=True).wait()) if is_async else bound
        self.module = bound if isinstance(bound, nn.Module) else None
        self.xs, self.directions = (tuple(case.filled(torch.float64, seed)) for seed in (0, 1))
        self.x, self.direction = self.xs[rank], self.directions[rank]

    def y(self, x):
        return self.call(x.sin())

    def ys(self, *xs):
        return tuple(self.case.reference([x.sin() for x in xs]))

    def loss(self, x):
        return self._loss(self.y(x), self.rank)

    def losses(self, *xs):
        """Return the sum of all ranks' losses, or the one loss that all ranks compute."""
        losses = [self._loss(y, rank) for rank, y in enumerate(self.ys(*xs))]
        return losses[0] if self.case.losses == "one" else sum(losses)

    def gradient(self, *xs):
        """Return this rank's gradient, from one process."""
        return grad(self.losses, argnums=self.rank)(*xs)

    def _loss(self, y, rank):
        weight = torch.linspace(1, 2, y.numel(), dtype=y.dtype).view(y.shape)
        linear = self.case.losses == "own" and rank == 0
        return (weight * (y if linear else y**3)).sum()


def transform(title):
    def add(fn):
        TRANSFORMS[title] = fn
        return fn

    return add


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


@transform("`torch.func.grad`")
def check_grad(op):
    close(grad(op.loss)(op.x), op.gradient(*op.xs))


@transform("`torch.func.vjp`")
def check_vjp(op):
    y, pull = vjp(op.loss, op.x)
    (got,) = pull(torch.full_like(y, 2))
    close(got, 2 * op.gradient(*op.xs))


@transform("`torch.func.jvp`")
def check_jvp(op):
    got = jvp(op.y, (op.x,), (op.direction,))
    for ours, parts in zip(got, jvp(op.ys, op.xs, op.directions), strict=True):
        close(ours, parts[op.rank])


@transform("`jvp` of `jvp` of `grad`")
def check_nested(op):
    def along(f, directions):
        return lambda *xs: jvp(f, xs, directions)[1]

    got = along(along(grad(op.loss), (op.direction,)), (op.direction,))(op.x)
    close(got, along(along(op.gradient, op.directions), op.directions)(*op.xs))


@transform("`torch.func.linearize`")
def check_linearize(op):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of a deprecated way to fold constants
        value, push = linearize(op.y, op.x)
        tangents = push(op.direction), push(op.direction)
    ys, want = jvp(op.ys, op.xs, op.directions)
    close(value, ys[op.rank])
    for tangent in tangents:
        close(tangent, want[op.rank])


class Holding(nn.Module):
    """The operation as a module, whose parameter is the input."""

    def __init__(self, op):
        super().__init__()
        self.op, self.x = op, nn.Parameter(torch.zeros_like(op.x))

    def forward(self, factor):
        return self.op.y(self.x * factor)


@transform("`functional_call`")
def check_functional_call(op):
    one = torch.ones((), dtype=torch.float64)
    close(functional_call(Holding(op), {"x": op.x}, (one,)), op.ys(*op.xs)[op.rank])
    if op.module is not None:
        changed = copy.deepcopy(op.module)
        with torch.no_grad():
            for parameter in changed.parameters():
                parameter.mul_(0.5)
        values = {name: value.detach() / 2 for name, value in op.module.named_parameters()}
        close(functional_call(op.module, values, (op.x,)), changed(op.x))


def check_checkpoint(op, reentrant):
    x = op.x.clone().requires_grad_()
    checkpoint(op.loss, x, use_reentrant=reentrant).backward()
    close(x.grad, op.gradient(*op.xs))


for reentrant in (False, True):
    title = f"`torch.utils.checkpoint`, `use_reentrant={reentrant}`"
    TRANSFORMS[title] = partial(check_checkpoint, reentrant=reentrant)


@transform("`torch.autocast`")
def check_autocast(op):
    """What only moves is not cast; products of layers are, as torch's own."""
    x, call = op.x.float().requires_grad_(), op.call
    dtype, bound = torch.float32, 0
    if op.module is not None:
        call, dtype, bound = copy.deepcopy(op.module).float(), torch.bfloat16, 0.05
    plain = call(x)
    (want,) = torch.autograd.grad(plain.sum(), x)
    with torch.autocast("cpu", torch.bfloat16):
        y = call(x)
        (got,) = torch.autograd.grad(y.sum(), x)
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), plain, rtol=bound, atol=bound)
    torch.testing.assert_close(got, want, rtol=bound, atol=bound)


@transform("`torch.inference_mode`")
def check_inference_mode(op):
    with torch.inference_mode():
        y = op.y(op.x)
    assert y.is_inference()
    close(y.clone(), op.ys(*op.xs)[op.rank])


@transform("`torch.no_grad`")
def check_no_grad(op):
    with torch.no_grad():
        y = op.y(op.x.clone().requires_grad_())
    assert not y.requires_grad
    close(y, op.ys(*op.xs)[op.rank])


@transform("`copy.deepcopy` of a module")
def check_deepcopy(op):
    if op.module is not None:
        close(copy.deepcopy(op.module)(op.x.sin()), op.ys(*op.xs)[op.rank])


def check_fake(op, mode):
    x = op.x.clone().requires_grad_()
    real = op.call(x)
    (gradient,) = torch.autograd.grad(real.sum(), x)
    with mode:
        fake = mode.from_tensor(op.x).requires_grad_()
        tensors = {} if op.module is None else op.module.state_dict(keep_vars=True)
        tensors = {name: mode.from_tensor(value) for name, value in tensors.items()}
        y = functional_call(op.module, tensors, (fake,)) if tensors else op.call(fake)
        (of_fake,) = torch.autograd.grad(y.sum(), fake)
    for ours, theirs in ((y, real), (of_fake, gradient)):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert ours.numel() == 0 or ours.stride() == theirs.stride()


TRANSFORMS["`FakeTensorMode()`"] = lambda op: check_fake(op, FakeTensorMode())
TRANSFORMS["`FakeTensorMode(allow_non_fake_inputs=True)`"] = lambda op: check_fake(
    op, FakeTensorMode(allow_non_fake_inputs=True)
)


@transform("`make_fx`")
def check_make_fx(op):
    traced = make_fx(lambda x: op.y(x))(op.x)
    close(traced(op.direction), op.ys(*op.directions)[op.rank])


@transform("`torch.func.vmap`")
def check_vmap(op):
    torch.func.vmap(op.call)(torch.stack([op.x] * 2))


@transform("`torch.func.hessian`")
def check_hessian(op):
    torch.func.hessian(op.loss)(op.x)


class Program(nn.Module):
    def __init__(self, op):
        super().__init__()
        self.call = op.call

    def forward(self, x):
        return self.call(x.sin())


@transform("`torch.jit.trace`")
def check_jit(op):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        traced = torch.jit.trace(Program(op), (op.x,), check_trace=False)
    close(traced(op.direction), op.ys(*op.directions)[op.rank])


def check_export(op, strict):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own
        program = torch.export.export(Program(op), (op.x,), strict=strict)
    close(program.module()(op.direction), op.ys(*op.directions)[op.rank])


for strict in (False, True):
    title = f"`torch.export` on one rank, `strict={strict}`"
    TRANSFORMS[title] = partial(check_export, strict=strict)
