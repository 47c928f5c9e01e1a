"""An engine behind copies to the CPU; here of tensors that are there already."""

import pytest
import torch

import varcomm
from tests.ops.comparing import Failures, assert_none
from tests.ops.primitives import PATTERNS, PRIMITIVES, case
from varcomm.transport.engines import _ENGINES, _found, engine_for
from varcomm.transport.gloo import Gloo
from varcomm.transport.group import resolve
from varcomm.transport.staged import Staged

RANKS = 3


class Staging:
    """Let Gloo serve this rank only behind copies."""

    def __enter__(self):
        self.engine = _ENGINES["gloo", "cpu"]
        _ENGINES["gloo", "cpu"] = Staged(Gloo())
        _found.clear()

    def __exit__(self, *_):
        _ENGINES["gloo", "cpu"] = self.engine
        _found.clear()


def check(rank, name):
    failures = Failures()
    with Staging():
        assert isinstance(engine_for(resolve(None), torch.device("cpu")), Staged)
        for pattern in PATTERNS:
            for dim in (0, 1):
                c = case(name, pattern, RANKS, dim)
                inputs = [x if x is None else x.requires_grad_() for x in c.draw(torch.float64)]
                x = c.input(rank, torch.float64).requires_grad_()
                y = c.bind()(x)
                with failures.named(pattern, dim):
                    torch.testing.assert_close(y, c.reference(inputs)[rank])
                    (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
                    assert gradient.shape == x.shape
    return failures


@pytest.mark.parametrize("name", PRIMITIVES)
def test_values(worlds, name):
    assert_none(worlds.run(RANKS, check, name))


def under_way(rank):
    """What is started before it is waited for; a large sum of two rounds; the ask if it is done."""
    with Staging():
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
