"""Backward is the adjoint: the dot test, and the gradients of a single-process twin."""

import pytest
import torch

import varcomm
from tests.ops.comparing import LAYOUTS, Failures, assert_none, twin_gradients
from tests.ops.primitives import PRIMITIVES, SPLITS, Setting, case, random
from tests.worlds import WORLDS
from varcomm.testing import dot_test

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.complex128)
# Rounding of 16 terms at most, in the dtype: bf16 is summed in fp32 and rounded once.
RTOL = {dtype: 8 * torch.finfo(dtype).eps for dtype in DTYPES}


def check_adjoint(rank, name, pattern, ranks):
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
            weights = weights_of(c, inputs, LAYOUTS.get(layout, lambda w: w))
            want = twin_gradients(c, inputs, weights)[rank]
            x = inputs[rank]
            if x is None:  # any tensor will do, and gets zeros
                x = torch.ones(2, 3, dtype=dtype).T.requires_grad_()
                want = torch.zeros_like(x)
            before = weights[rank].clone()
            (got,) = torch.autograd.grad(op(x), x, weights[rank])
            with failures.named("gradient", dim, rest, layout):
                assert got.shape == x.shape
                torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)
                assert torch.equal(weights[rank], before), "the incoming gradient has changed"
                if name != "shard_v":
                    assert got.untyped_storage().data_ptr() not in (
                        weights[rank].untyped_storage().data_ptr() or None,
                        x.untyped_storage().data_ptr() or None,
                    ), "the gradient shares memory"
    return failures


def weights_of(c, inputs, laid_out):
    generator = torch.Generator().manual_seed(7)
    return [laid_out(random(y.shape, y.dtype, generator)) for y in c.reference(inputs)]


@pytest.mark.parametrize(("ranks", "pattern"), SPLITS)
@pytest.mark.parametrize("name", PRIMITIVES)
def test_adjoint(worlds, name, ranks, pattern):
    assert_none(worlds.run(ranks, check_adjoint, name, pattern, ranks))


def check_large(rank, ranks):
    """Sum large tensors, which go by pieces: the dot test, and the order of the sum."""
    failures = Failures()
    for name in ("all_reduce", "reduce", "broadcast"):
        c = PRIMITIVES[name](Setting((8300,) + (0,) * (ranks - 1), 0, (), ranks - 1))
        for dtype in DTYPES:
            with failures.named(name, dtype):
                dot_test(c.bind(), c.input(rank, dtype), rtol=RTOL[dtype])
    return failures


@pytest.mark.parametrize("ranks", WORLDS)
def test_adjoint_of_large_sums(worlds, ranks):
    assert_none(worlds.run(ranks, check_large, ranks))


def who_requires(rank, name):
    c = case(name, "off by one", 3)  # the root is rank 1
    op = c.bind()
    x = c.draw(torch.float64)[rank]
    given = [x if x is None else x.clone().requires_grad_() for _ in range(2)]
    with torch.no_grad():
        off = op(given[0])
    if x is None:  # a tensor off the root does not decide
        x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    return op(given[1]).requires_grad, op(x).requires_grad, off.requires_grad


# shard_v is a view, and views follow torch's own rules under no_grad
@pytest.mark.parametrize("name", [name for name in PRIMITIVES if name != "shard_v"])
def test_result_requires_grad_on_all_ranks_or_none(worlds, name):
    assert worlds.run(3, who_requires, name) == [(True, False, False)] * 3


def zero_off_the_root(rank, name):
    """Pass a tensor that is not to be read; its gradient is zeros that belong to the graph."""
    c = case(name, "off by one", 3)
    x = c.input(rank, torch.float64).requires_grad_()
    y = c.bind()(x**2)
    weight = torch.ones_like(y).requires_grad_()
    (gradient,) = torch.autograd.grad(y, x, weight, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), weight)
    return gradient.requires_grad, float(gradient.abs().sum()), float(second.sum())


@pytest.mark.parametrize("name", ["scatter_v", "broadcast"])
def test_gradient_off_the_root_is_zeros_that_belong_to_the_graph(worlds, name):
    answers = worlds.run(3, zero_off_the_root, name)
    assert [answer[0] for answer in answers] == [True] * 3
    assert [answer[1] > 0 for answer in answers] == [False, True, False]
    assert all(answer[2] != 0 for answer in answers)


def none_off_the_root(rank, name):
    c = case(name, "off by one", 3)
    x = c.draw(torch.float64)[rank]
    if x is not None:
        x.requires_grad_()
    (c.bind()(x) * (rank + 1)).sum().backward()
    return None if x is None else x.grad


def test_only_the_root_has_an_input(worlds):
    answers = worlds.run(3, none_off_the_root, "broadcast")
    assert torch.equal(answers[1], torch.full((5, 2, 3), 6.0, dtype=torch.float64))
    answers = worlds.run(3, none_off_the_root, "scatter_v")
    assert answers[1][:, 0, 0].tolist() == [1, 1, 2, 2, 3]
    assert answers[0] is answers[2] is None


def gradient_wanted_on_one_rank(rank):
    """Backward communicates, whatever a rank has asked gradients for."""
    x = torch.ones(1, requires_grad=True)
    other = torch.ones(1, requires_grad=True)
    y = varcomm.all_reduce(x * other) * (rank + 1)
    return torch.autograd.grad(y, x if rank == 0 else other)[0].item()


def test_backward_communicates_whichever_input_is_asked_for(worlds):
    assert worlds.run(3, gradient_wanted_on_one_rank) == [6.0] * 3


def asked_for_off_the_root(rank, name):
    """Ask for a parameter's gradient and, as the docstring says, for that of a stand-in."""
    c = case(name, "off by one", 3)  # the root is rank 1
    x = c.draw(torch.float64)[rank]
    x = torch.empty(0) if x is None else x
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    loss = (c.bind()(x.requires_grad_()) * weight).sum()
    of_x, of_weight = torch.autograd.grad(loss, [x, weight])
    return tuple(of_x.shape) == tuple(x.shape), of_weight.item() == loss.item()


@pytest.mark.parametrize("name", ["scatter_v", "broadcast"])
def test_gradients_asked_for_off_the_root(worlds, name):
    assert worlds.run(3, asked_for_off_the_root, name) == [(True, True)] * 3
