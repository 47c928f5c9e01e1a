"""``like=`` of ``scatter_v`` and ``broadcast``: the root sends no description of its tensor."""

from dataclasses import replace

import pytest
import torch

import varcomm
from tests.ops.comparing import Failures, error_beyond_bound, twin_gradients
from tests.ops.primitives import PATTERNS, PRIMITIVES, random, rank_in, setting
from tests.worlds import WORLDS, on_ranks
from varcomm import ArgumentError, DisagreementError
from varcomm.testing import dot_test, gradcheck

NAMES = ("scatter_v", "broadcast")
F = torch.zeros
FIRST = {"scatter_v": ([2, 1],), "broadcast": ()}  # arguments after the tensor; rank 0 is the root


def case(name, pattern, ranks, dim=0):
    """A case whose input is the tensor at the root, and makes `like` elsewhere."""
    s = setting(pattern, ranks, dim)
    shape = s.shape(3) if name == "scatter_v" else s.whole  # any number of rows

    def bind(group=None):
        at_root = rank_in(group) == s.root
        rest = {"scatter_v": (s.sizes, s.dim, s.root), "broadcast": (s.root,)}[name]

        def op(x, **how):
            like = x if at_root else x.reshape(-1)[0].expand(shape)
            x = x if at_root else None
            return getattr(varcomm, name)(x, *rest, group=group, like=like, **how)

        return op

    return replace(PRIMITIVES[name](s), bind=bind)


@pytest.mark.parametrize("name", NAMES)
@on_ranks(*WORLDS)
def test_values_and_derivatives(rank, name, ranks):
    failures = Failures()
    for pattern, dim in zip(PATTERNS, (0, 1, -1, 0), strict=True):
        c = case(name, pattern, ranks, dim)
        op = c.bind()
        for dtype in (torch.float64, torch.bfloat16, torch.int32, torch.complex128):
            for how in ({}, {}, {"async_op": True}):
                got = op(c.input(rank, dtype), **how)
                got = got.wait() if how else got
                with failures.named(pattern, dtype, how):
                    assert not error_beyond_bound(c, c.draw(dtype), rank, got)
        with failures.named(pattern, "derivatives"):
            dot_test(op, c.input(rank, torch.float64))
            gradcheck(op, c.input(rank, torch.float64), fast_mode=True)
            inputs = [x if x is None else x.requires_grad_() for x in c.draw(torch.float64)]
            generator = torch.Generator().manual_seed(7)
            weights = [random(y.shape, torch.float64, generator) for y in c.reference(inputs)]
            want = twin_gradients(c, inputs, weights)[rank]
            x = c.input(rank, torch.float64).requires_grad_()
            for how in ({}, {"async_op": True}):
                y = op(x, **how)
                (got,) = torch.autograd.grad(y.wait() if how else y, x, weights[rank])
                torch.testing.assert_close(got, torch.zeros_like(x) if want is None else want)
            value, tangent = torch.func.jvp(op, (x.detach(),), (x.detach(),))
            assert torch.equal(value, tangent)
    return failures


@on_ranks(3)
def test_no_description_is_sent(rank):
    """Without rows there is nothing to send: with `like` not even to the root."""
    if rank == 1:
        assert varcomm.scatter_v(None, [0, 0, 0], like=F(5, 2)).shape == (0, 2)
        assert varcomm.broadcast(None, like=F(0, 2)).shape == (0, 2)
    assert varcomm.all_reduce(torch.tensor(1)).item() == 3


WRONG = {
    "a list": (F(3, 2), [1.0], "like must be a torch.Tensor; got list"),
    "no tensor": (None, F(3, 2), "tensor must be a torch.Tensor; got NoneType"),
    "dtype": (F(3, 2), F(3, 2).double(), "like must match .* dtype is torch.float64"),
    "requires_grad": (F(3, 2, requires_grad=True), F(3, 2), "like must match .* requires_grad"),
    "shape": (F(3, 2), F(3, 1), r"the tensor has shape \(3, 2\).* like"),
    "device": (F(3, 2), F(3, 2, device="meta"), "like must match .* device"),
}


@pytest.mark.parametrize("name", NAMES)
@on_ranks(2)
def test_wrong_or_differing(rank, name):
    op, rest, right = getattr(varcomm, name), FIRST[name], F(3, 2)
    for x, like, message in WRONG.values():
        if rank == 0:
            with pytest.raises(ArgumentError, match=f"^{name} on rank 0 of 2: {message}"):
                op(x, *rest, like=like)
        with pytest.raises(DisagreementError, match=message), varcomm.debug():
            op(x, *rest, like=like) if rank == 0 else op(None, *rest, like=right)
    of_rank_1 = {
        "like": None,
        "dtype": right.int(),
        "requires_grad": F(3, 2, requires_grad=True),
        "shape": F(3, 3),
        "sizes": right,
    }
    for word, like in of_rank_1.items():
        words = [[1, 2]] if word == "sizes" and rank == 1 and rest else rest
        if word == "sizes" and not rest:
            continue
        with pytest.raises(DisagreementError, match=f"disagree on {word}"), varcomm.debug():
            op(right, *words, like=right if rank == 0 else like)
    if rank == 1:
        with pytest.raises(ArgumentError, match=r"like must be a torch\.Tensor; got list"):
            op(None, *rest, like=[1.0])
    assert varcomm.all_reduce(torch.tensor(1)).item() == 2


@on_ranks(3)
def test_compiled(rank):
    like = torch.ones(1, 2, requires_grad=True)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def fn(x, like):
        return varcomm.scatter_v(x, [1, 2, 0], like=like) * 2

    x = torch.arange(6.0).view(3, 2).requires_grad_() if rank == 0 else None
    y = fn(x, like)
    y.sum().backward()
    gradient = (like if x is None else x).grad
    assert gradient.eq(0 if x is None else 2).all()
    assert y.tolist() == [[[0.0, 2.0]], [[4.0, 6.0], [8.0, 10.0]], []][rank]
