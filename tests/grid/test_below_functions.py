"""Transforms, scripts and custom functions, which reach a field below torch's functions."""

import pytest
import torch
from torch import nn

import varcomm as vc
from tests.grid.test_fields import field_of
from tests.worlds import on_ranks, refused_alike

REFUSED = {
    "vmap": lambda x: torch.vmap(torch.sin)(x),
    "vmap over rows": lambda x: torch.vmap(lambda y: y * 2, in_dims=2)(x),
    "vmap beside an ordinary tensor": lambda x: torch.vmap(torch.mul)(torch.ones(2, 1, 1, 1), x),
    "grad": lambda x: torch.func.grad(lambda y: y.mean())(x),
    "vjp": lambda x: torch.func.vjp(torch.sin, x),
    "jacrev": lambda x: torch.func.jacrev(lambda y: y.mean())(x),
    "functionalize": lambda x: torch.func.functionalize(torch.sin)(x),
    "jvp": lambda x: torch.func.jvp(torch.sin, (x,), (x,)),
    "tensor": lambda x: torch.tensor(x),
    "set_": lambda x: torch.empty(0, dtype=x.dtype).set_(x),
    "_make_subclass": lambda x: torch.Tensor._make_subclass(torch.Tensor, x),
}


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("name", REFUSED)
@on_ranks(3)
def test_refusals(rank, name):
    _, _, x = field_of(3)
    refused_alike(vc.ArgumentError, lambda: REFUSED[name](x))


@on_ranks(3)
def test_a_script_is_refused(rank):
    _, _, x = field_of(3)
    scripted = torch.jit.script(_scripted)
    with pytest.raises(RuntimeError, match=r"x - x\.mean"):
        scripted(x)


def _scripted(x):
    return x - x.mean()


class Reversed(torch.autograd.Function):
    """A gradient times a number, as of domain-adversarial networks; the tensor or a view of it."""

    @staticmethod
    def forward(ctx, x, how):
        return how(x)

    @staticmethod
    def backward(ctx, gradient):
        return -2 * gradient, None


@on_ranks(3)
def test_functions_of_their_own(rank):
    """Forward gets fields; backward gets the part of the gradient, as of ordinary tensors."""
    whole, _, x = field_of(3)
    for how in (lambda x: x, lambda x: x.view_as(x), lambda x: x * 1):
        own = x.clone().requires_grad_()
        Reversed.apply(own * 3, how).square().sum().backward()
        torch.testing.assert_close(own.grad.gather(), -36 * whole)


@on_ranks(3)
def test_leaves(rank):
    """Hooks, gradients that are set or kept, optimizers of split parameters."""
    whole, _, x = field_of(3)
    own, seen = x.clone().requires_grad_(), []
    own.register_hook(lambda g: seen.append(tuple(g.shape)))
    middle = own * 2
    middle.retain_grad()
    middle.square().sum().backward()
    assert seen == [tuple(whole.shape)]
    torch.testing.assert_close(middle.grad.gather(), 4 * whole)
    own.grad = x.clone()  # autograd adds to it
    own.sum().backward()
    torch.testing.assert_close(own.grad.gather(), whole + 1)
    trained = []
    for start, factor in ((x, x), (whole, whole)):
        parameter = nn.Parameter(start.clone())
        optimizer = torch.optim.AdamW([parameter], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            (parameter * factor).square().mean().backward()
            optimizer.step()
        trained.append(parameter)
    torch.testing.assert_close(trained[0].gather(), trained[1].detach(), rtol=1e-12, atol=1e-12)


@on_ranks(3)
def test_transforms_of_parameters(rank):
    """torch.func.grad for parameters returns this rank's part, as torch.autograd.grad does."""
    whole, _, x = field_of(3)
    torch.manual_seed(0)
    norms = nn.BatchNorm2d(2, track_running_stats=False), nn.GroupNorm(1, 2)
    model = nn.Sequential(nn.Conv2d(3, 2, 3, padding=1), *norms, nn.Sigmoid()).double()

    def loss(parameters, data):
        return torch.func.functional_call(model, parameters, (data,)).square().mean()

    parameters = dict(model.named_parameters())
    expected = torch.func.grad(loss)(parameters, whole)
    found = torch.func.grad(lambda given: loss(given, x))(parameters)
    for name, part in found.items():
        torch.testing.assert_close(vc.all_reduce(part), expected[name], rtol=1e-12, atol=1e-12)


class Split(nn.Module):
    def __init__(self, x):
        super().__init__()
        self.positions, self.conv = nn.Parameter(x), nn.Conv2d(3, 3, 1)
        self.register_buffer("mask", x > 0)

    def forward(self, x):
        return self.conv(x) * self.mask + self.positions


@on_ranks(3)
def test_modules_that_hold_fields(rank):
    whole, _, x = field_of(3)
    torch.manual_seed(0)
    alone = Split(whole.float())
    torch.manual_seed(0)
    split = Split(x.float())
    split.load_state_dict({**alone.state_dict(), "positions": split.positions, "mask": split.mask})
    torch.testing.assert_close(split(x.float()).gather(), alone(whole.float()))
    refused_alike(vc.ArgumentError, split.double)


COMPILED = {
    "module": lambda x: torch.compile(nn.Conv2d(3, 1, 1).double(), backend="eager")(x),
    "whole graph": lambda x: torch.compile(lambda y: y * 2, backend="eager", fullgraph=True)(x),
    "part of a model": lambda x: compiled_inside(x),
    "made inside": lambda x: torch.compile(vc.grid.Grid.field, backend="eager")(field_of(3)[1], x),
}


def compiled_inside(x):
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.GroupNorm(1, 3)).double()
    model[1].compile(backend="eager")
    return model(x)


@pytest.mark.parametrize("name", COMPILED)
@on_ranks(3)
def test_compilers_are_refused(rank, name):
    _, _, x = field_of(3)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"without torch\.compile"):
        COMPILED[name](x.local if name == "made inside" else x)
