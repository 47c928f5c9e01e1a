"""One process as one rank of many."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from varcomm.transport.simulated import alone
from varcomm.transport.world import World, init

__all__ = ["world"]


@contextmanager
def world(size: int, rank: int = 0) -> Iterator[World]:
    """Let this process be one of `size` ranks, of which no other is there.

    Inside, everything runs that runs on a rank: collectives, plans, distributed models, sharded
    layers, on torch.distributed's ``FakeProcessGroup``. Nothing is sent. What would arrive is zeros
    of the size and dtype that would arrive, so that results mean nothing, but shapes, memory and
    what :func:`varcomm.trace` counts are those of a real run. Where ranks would compare what they
    are asked to do, every rank is taken to say what this one says, and the root of a broadcast to
    have what this rank gives. What depends on what others need, as
    :meth:`ExchangePlan.from_needed` and :func:`varcomm.graph.partition` do, raises: such is what
    :func:`varcomm.simulate.partition` computes for all ranks.

    Parameters
    ----------
    size : int
        Ranks.
    rank : int
        The one that this process is.

    Yields
    ------
    World
        Who this process is, as :func:`varcomm.init` says it.

    Raises
    ------
    ArgumentError
        If there is no such rank.
    GroupError
        If torch.distributed is initialised already.

    Examples
    --------
    >>> import torch, varcomm as vc
    >>> with vc.simulate.world(4096, rank=7) as world, vc.trace() as trace:
    ...     whole = vc.all_gather_v(torch.ones(2, 3), [2] * world.size)
    >>> whole.shape, trace.total.sent
    (torch.Size([8192, 3]), 98280)
    """
    with alone(size, rank):
        yield init()
