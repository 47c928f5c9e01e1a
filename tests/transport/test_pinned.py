"""An engine behind copies to the CPU; here of tensors that are there already."""

from contextlib import contextmanager

import pytest
import torch

import varcomm
from tests.ops.comparing import Failures, assert_none
from tests.ops.primitives import PATTERNS, PRIMITIVES, case
from varcomm.transport.engine import engine_for
from varcomm.transport.gloo import Gloo
from varcomm.transport.group import resolve
from varcomm.transport.pinned import Pinned

RANKS = 3
CPU = torch.device("cpu")


@contextmanager
def pinned():
    """Let Gloo serve this rank only behind copies."""
    engines = resolve(None).engines
    engines[CPU] = Pinned(Gloo())
    try:
        yield
    finally:
        engines[CPU] = Gloo()


def check(rank, name):
    failures = Failures()
    with pinned():
        assert isinstance(engine_for(resolve(None), CPU), Pinned)
        for pattern in PATTERNS:
            c = case(name, pattern, RANKS, 1)
            inputs = [x if x is None else x.requires_grad_() for x in c.draw(torch.float64)]
            x = c.input(rank, torch.float64).requires_grad_()
            y = c.bind()(x)
            with failures.named(pattern):
                torch.testing.assert_close(y, c.reference(inputs)[rank])
                (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
                assert gradient.shape == x.shape
    return failures


FIRST = {"all_gather_v", "all_to_all_v", "broadcast"}


@pytest.mark.parametrize(
    "name",
    [name if name in FIRST else pytest.param(name, marks=pytest.mark.slow) for name in PRIMITIVES],
)
def test_values(worlds, name):
    assert_none(worlds.run(RANKS, check, name))


def under_way(rank):
    """What is started before it is waited for; a large sum of two rounds; the ask if it is done."""
    with pinned():
        x = torch.arange(10.0 * (rank + 1))
        handles = [varcomm.all_gather_v(x, [10, 20, 30], async_op=True) for _ in range(3)]
        total = varcomm.all_reduce(torch.full((10_000,), float(rank)))
        whole = torch.cat([torch.arange(10.0 * (r + 1)) for r in range(RANKS)])
        out, data = (torch.full((RANKS,), n, dtype=torch.uint8) for n in (9, rank))
        engine = engine_for(resolve(None), data.device)
        (work,) = engine.exchange(resolve(None), out, data, [1] * RANKS, [1] * RANKS, "all")
        before = out.tolist()
        work.wait()
        return (
            all(torch.equal(handle.wait(), whole) for handle in handles),
            total.eq(3).all().item(),
            before,
            out.tolist(),
            work.is_completed(),
        )


def test_nothing_arrives_before_the_wait(worlds):
    assert worlds.run(RANKS, under_way) == [(True, True, [9] * 3, [0, 1, 2], True)] * RANKS
