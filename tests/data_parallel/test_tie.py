"""Outputs of replicated modules can be used as any others: written to, transformed, compiled."""

import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from tests.data_parallel.comparing import assert_same_gradients, replicated
from varcomm.data_parallel import replicate

X = torch.arange(6, dtype=torch.float64).view(2, 3) / 3


class Out(nn.Module):
    """A layer, and what is made of its result."""

    def __init__(self, make):
        super().__init__()
        self.layer, self.make = nn.Linear(3, 3).double(), make

    def forward(self, x):
        return self.make(self.layer(x))


def doubled(y):
    return y.mul_(2)


def some_rows(y):
    y[0] = 1
    return y


# how a module makes its output, and what its caller writes into it
WRITTEN = {
    "new": (lambda y: y + 1, doubled),
    "rows": (lambda y: y + 1, some_rows),
    "view": (lambda y: y.exp().squeeze(-1), some_rows),
    "transposed": (lambda y: y.T, doubled),
}


def written(rank, make, write):
    model, twin = replicated(lambda: Out(make))
    for module, parts in ((model, [rank]), (twin, [0, 1])):
        sum(write(module(X + part)).square().sum() for part in parts).backward()
    assert_same_gradients(model, twin)
    return model.layer.weight.grad.abs().sum().item() > 0


@pytest.mark.parametrize("what", WRITTEN)
def test_outputs_may_be_written_to(worlds, what):
    if what == "view":  # of what exp has kept
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            worlds.run(1, written, *WRITTEN[what])
    else:
        assert worlds.run(2, written, *WRITTEN[what]) == [True, True]


class Keeping(nn.Module):
    """Keeps what it returns, or a part of it; its caller may have a hook that does."""

    def __init__(self, what):
        super().__init__()
        self.layer, self.what = nn.Linear(3, 3).double(), what
        if what == "in a hook":
            self.register_forward_hook(self.note)

    def forward(self, x):
        y = self.layer(x)
        if self.what != "in a hook":
            self.kept = y[0] if self.what == "a part" else y
        return y.T if self.what == "what it is a part of" else y

    def note(self, module, args, output):
        self.kept = output


def kept(rank, what):
    """Whoever has the tensor too sees what is written, and its gradients."""
    model, twin = replicated(lambda: Keeping(what))
    for module, parts in ((model, [rank]), (twin, [0, 1])):
        for part in parts:
            nn.functional.relu(module(X + part), inplace=True)
            module.kept.square().sum().backward()
    assert_same_gradients(model, twin)
    return model.layer.weight.grad.abs().sum().item() > 0


@pytest.mark.parametrize("what", ["in itself", "in a hook", "a part", "what it is a part of"])
def test_outputs_that_others_keep_may_be_written_to(worlds, what):
    assert worlds.run(2, kept, what) == [True, True]


def constant(rank):
    """Where it is empty, as on a rank without rows, it may be written to."""
    model = replicate(Out(torch.tanh))
    model.forward = lambda x: x.new_ones(len(x), 2)
    nn.functional.relu(model(X[:0]), inplace=True).sum().backward()
    with pytest.raises(RuntimeError, match="is being modified inplace"):
        model(X).mul_(2)
    return model.layer.weight.grad


def test_constants(worlds):
    assert worlds.run(2, constant) == [None, None]


def whole_and_part(y):
    y = y + 1
    return y, y[:, 0]


def both_parts(y):
    y = y + 1
    return list(y.unbind(1))


def overwritten(rank, make):
    model = replicate(Out(make))
    with pytest.raises(RuntimeError, match="is being modified inplace"):
        model(X)[0].mul_(2)
    return model(X)[1].requires_grad


@pytest.mark.parametrize("make", [whole_and_part, both_parts])
def test_tensors_that_share_memory_may_not_be_written_to(worlds, make):
    """Torch would not know that the others change too."""
    assert worlds.run(2, overwritten, make) == [True, True]


def handed_on(rank):
    """An input that is an output may not be written to either, nor may a parameter."""
    model, x = replicate(Out(lambda y: y)), X.clone()
    model.forward = lambda x: (x, model.layer.bias)
    for out in model(x):
        with pytest.raises(RuntimeError, match="is being modified inplace"):
            out.mul_(2)
    return torch.equal(x, X)


def test_what_is_handed_on_may_not_be_written_to(worlds):
    assert worlds.run(2, handed_on) == [True, True]


def transformed(rank):
    """Derivatives for the input, by transforms of torch.func and in forward mode."""
    model, twin = replicated(lambda: Out(torch.tanh))
    ones = torch.ones_like(X)

    def forward_mode(module):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(module(forward_ad.make_dual(X, ones))).tangent

    transforms = [
        lambda f: torch.func.jvp(f, (X,), (ones,))[1],
        lambda f: torch.func.vjp(f, X)[1](ones)[0],
        lambda f: torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(X),
        lambda f: torch.func.jacrev(f)(X),
        lambda f: torch.func.jacfwd(f)(X),
        lambda f: torch.func.hessian(lambda x: f(x).sum())(X),
        lambda f: torch.autograd.functional.hessian(lambda x: f(x).sum(), X),
        forward_mode,
    ]
    same = [torch.allclose(get(model), get(twin), rtol=1e-13) for get in transforms]
    return all(same), model.layer.weight.grad


def test_transforms(worlds):
    assert worlds.run(2, transformed) == [(True, None)] * 2


def compiled(rank):
    model, twin = replicated(lambda: Out(torch.tanh))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler's own
        torch.compile(model, backend="aot_eager")(X + rank).sum().backward()
    (twin(X) + twin(X + 1)).sum().backward()
    assert_same_gradients(model, twin)
    return model.layer.weight.grad.abs().sum().item() > 0


def test_compiled_modules(worlds):
    assert worlds.run(2, compiled) == [True, True]


def forgotten(rank):
    """Nothing keeps a module, nor what sums its gradients, once it has been used."""
    model = replicate(Out(torch.tanh))
    (hook,) = model._forward_hooks.values()
    model(X).sum().backward()
    kept = [weakref.ref(hook), weakref.ref(model.layer.weight)]
    del model, hook
    return [reference() for reference in kept]


def test_modules_are_forgotten_without_the_garbage_collector(worlds):
    assert worlds.run(2, forgotten) == [[None, None]] * 2
