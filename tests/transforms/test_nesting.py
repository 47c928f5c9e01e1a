"""Derivatives of derivatives by torch.func: no nesting hangs where one rank's loss is linear."""

from itertools import product

import pytest
import torch
from torch.func import grad, jvp, vjp

import varcomm
from tests.ops.comparing import Failures
from tests.worlds import on_ranks
from varcomm.tensor_parallel import column_parallel_linear, row_parallel_linear

SIZES = [2, 1]
X = torch.tensor([0.4, -1.1, 0.7], dtype=torch.float64)


def by_grad(f, rank):
    return grad(lambda *xs: f(*xs).sum(), argnums=rank)


def by_vjp(f, rank):
    def pulled(*xs):
        y, pull = vjp(f, *xs)
        return pull(torch.linspace(1, 2, y.numel(), dtype=y.dtype).view(y.shape))[rank]

    return pulled


def by_jvp(f, rank):
    def pushed(*xs):
        along = tuple(torch.linspace(1, 2, len(x), dtype=x.dtype) for x in xs)
        return jvp(f, xs, along)[1]

    return pushed


TRANSFORMS = {"grad": by_grad, "vjp": by_vjp, "jvp": by_jvp}
NESTINGS = [words for depth in (1, 2, 3) for words in product(TRANSFORMS, repeat=depth)]


def twin(functions, word):
    """Differentiate the ranks' functions of all inputs in one process, as `word` does on ranks."""
    if word == "jvp":
        return [by_jvp(f, 0) for f in functions]

    def total(*xs):
        ys = [f(*xs) for f in functions]
        if word == "grad":
            return sum(y.sum() for y in ys)
        weights = [torch.linspace(1, 2, y.numel(), dtype=y.dtype).view(y.shape) for y in ys]
        return sum((w * y).sum() for w, y in zip(weights, ys, strict=True))

    return [grad(total, argnums=rank) for rank in range(len(functions))]


def loss_of(y, rank):
    return (y**3).sum() if rank == 0 else y.sum()


@pytest.mark.parametrize("async_op", [False, pytest.param(True, marks=pytest.mark.slow)])
@on_ranks(2, timeout=40)
def test_nestings_where_one_rank_is_linear(rank, async_op):
    """Only rank 0 has a gradient that depends on anything."""
    failures = Failures()

    def loss(x):
        y = varcomm.all_gather_v(x, SIZES, async_op=async_op)
        return loss_of(y.wait() if async_op else y, rank)

    for words in NESTINGS:
        f, one = loss, [lambda *xs, r=r: loss_of(torch.cat(xs), r) for r in (0, 1)]
        for word in reversed(words):
            f, one = TRANSFORMS[word](f, 0), twin(one, word)
        parts = X.split(SIZES)
        got, want = f(parts[rank]), one[rank](*parts)
        with failures.named("(".join(words)):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    return failures


@on_ranks(2)
def test_forward_mode_over_forward_mode_of_layers(rank):
    """What a layer's own derivative computes is differentiated again, with torch's operations."""
    weight = torch.linspace(-1, 1, 6, dtype=torch.float64).view(3, 2)
    own = list(torch.arange(3).split(SIZES))[rank]

    def layer(x):
        y = column_parallel_linear(x, weight[own]).sin()
        return row_parallel_linear(y, weight.T[:, own])

    def alone(x):
        return (x @ weight.T).sin() @ weight

    def twice(f):
        x, t = torch.tensor([[0.3, -0.8]], dtype=torch.float64), torch.ones(1, 2).double()
        return jvp(lambda x: jvp(f, (x,), (t,))[1], (x,), (t,))[1]

    torch.testing.assert_close(twice(layer), twice(alone), rtol=0, atol=1e-14)
    assert twice(alone).abs().max() > 1e-14
