"""Engines: messages that no rank waits for, messages of users, and copies through the CPU."""

import gc
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

import varcomm
from tests.ops.comparing import Failures
from tests.ops.primitives import PATTERNS, PRIMITIVES, case
from tests.worlds import on_ranks
from varcomm.transport.engine import Route
from varcomm.transport.engines.choose import engine_for
from varcomm.transport.engines.gloo import Gloo
from varcomm.transport.engines.pinned import Pinned
from varcomm.transport.group import resolve

RANKS = 3
CPU = torch.device("cpu")


@pytest.mark.parametrize("elements", [10, 3_000_000])
@on_ranks(RANKS)
def test_messages_that_no_rank_waits_for(rank, elements):
    """Two ranks forget the calls that they have started; the root waits."""
    sizes = [elements, 2 * elements, 0]
    mine = torch.full((sizes[rank],), float(rank))
    whole = torch.cat([torch.full((n,), float(r)) for r, n in enumerate(sizes)])
    for _ in range(3):
        handle = varcomm.gather_v(mine, sizes, dst=1, async_op=True)
        if rank == 1:
            assert torch.equal(handle.wait(), whole)
        del handle
        gc.collect()
        assert torch.equal(varcomm.all_gather_v(mine, sizes), whole)


@on_ranks(RANKS)
def test_messages_between_users_remain_theirs(rank):
    mine, theirs, works = torch.full((4,), float(rank)), torch.zeros(4), []
    if rank < 2:
        works = [dist.irecv(theirs, 1 - rank), dist.isend(mine, 1 - rank)]
    whole = varcomm.gather_v(mine + 10, [4, 4, 4])
    for work in works:
        work.wait()
    if rank < 2:
        assert theirs.eq(1 - rank).all()
    assert rank or whole.view(3, 4)[:, 0].tolist() == [10, 11, 12]


@contextmanager
def pinned():
    """Let Gloo serve this rank only behind copies; its tensors are on the CPU already."""
    group = resolve(None)
    group.engines[CPU] = engine = Pinned(Gloo())
    group.calls.clear()  # prepared for the engine before
    try:
        yield engine
    finally:
        group.engines[CPU] = Gloo()
        group.calls.clear()


FIRST = ("all_gather_v", "all_to_all_v", "broadcast")


@pytest.mark.parametrize("names", [FIRST, pytest.param((*PRIMITIVES,), marks=pytest.mark.slow)])
@on_ranks(RANKS)
def test_copies_through_the_cpu(rank, names):
    failures = Failures()
    with pinned() as engine:
        assert engine_for(resolve(None), CPU) is engine
        for c, pattern in ((case(name, p, RANKS, 1), p) for name in names for p in PATTERNS):
            x = c.input(rank, torch.float64).requires_grad_()
            y = c.bind()(x)
            with failures.named(pattern):
                torch.testing.assert_close(y, c.reference(c.draw(torch.float64))[rank])
                (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
                assert gradient.shape == x.shape
        x = torch.arange(10.0 * (rank + 1))
        handles = [varcomm.all_gather_v(x, [10, 20, 30], async_op=True) for _ in range(3)]
        total = varcomm.all_reduce(torch.full((10_000,), float(rank)))
        whole = torch.cat([torch.arange(10.0 * (r + 1)) for r in range(RANKS)])
        out, data = (torch.full((RANKS,), n, dtype=torch.uint8) for n in (9, rank))
        each = [1] * RANKS
        (work,) = engine.prepare(Route("all", resolve(None), each, each))(out, data)
        with failures.named("in flight"):
            assert out.tolist() == [9] * RANKS, "bytes arrive in wait()"
            work.wait()
            assert (out.tolist(), work.is_completed()) == ([0, 1, 2], True)
            assert all(torch.equal(handle.wait(), whole) for handle in handles)
            assert total.eq(3).all()
    return failures
