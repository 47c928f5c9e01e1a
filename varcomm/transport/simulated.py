"""Simulated group: one real rank, no peers, nothing sent.

torch.distributed's backend "fake" holds the ranks; the engine here answers for them.
"""

# ruff: noqa: D102, Engine documents its methods

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist
from torch import Tensor

from varcomm.errors import GroupError, at_least, checked_rank
from varcomm.transport.engine import Counts, Engine, Peers, Works
from varcomm.transport.group import Group, forget_destroyed

Schedule = Literal["all_gather", "broadcast", "all", "neighbours", "one"]


@dataclass(frozen=True)
class Transfer:
    """Bytes per rank of the group that an engine was asked to move in one call."""

    schedule: Schedule  # for an exchange, its :data:`varcomm.transport.engine.Peers`
    rank: int  # this rank, within the group
    ranks: tuple[int, ...]  # world ranks of the group
    send: tuple[int, ...]  # 0 for this rank, as in `recv`
    recv: tuple[int, ...]


# Lists that are being filled. Backward runs in threads of its own, so this is not thread-local.
_listening: list[list[Transfer]] = []


@contextmanager
def transfers() -> Iterator[list[Transfer]]:
    """Collect the transfers of simulated groups."""
    found: list[Transfer] = []
    _listening.append(found)
    try:
        yield found
    finally:
        _listening[:] = [listener for listener in _listening if listener is not found]


class Simulated(Engine):
    """Fills the parts of other ranks with zeros, and keeps this rank's own."""

    simulated = True

    def all_gather(self, group: Group, out: Tensor, data: Tensor, counts: Counts) -> Works:
        return _kept("all_gather", group, out, data, counts, [len(data)] * group.size, 0)

    def exchange(
        self, group: Group, out: Tensor, data: Tensor, recv: Counts, send: Counts, peers: Peers
    ) -> Works:
        return _kept(peers, group, out, data, recv, send, sum(send[: group.rank]))

    def broadcast(self, group: Group, data: Tensor, src: int) -> Works:
        at_src = group.rank == src
        send = [len(data) * at_src] * group.size
        recv = [len(data) * (rank == src) for rank in range(group.size)]
        return _kept("broadcast", group, data, data, recv, send, 0)


def _kept(
    kind: Schedule, group: Group, out: Tensor, data: Tensor, recv: Counts, send: Counts, start: int
) -> Works:
    """Record the transfer, and fill `out` with this rank's own bytes and zeros."""

    def without_own(counts: Counts) -> tuple[int, ...]:
        return (*counts[: group.rank], 0, *counts[group.rank + 1 :])

    for found in _listening:
        counts = without_own(send), without_own(recv)
        found.append(Transfer(kind, group.rank, group.ranks, *counts))
    own, place = recv[group.rank], sum(recv[: group.rank])
    out[:place].zero_()
    out[place + own :].zero_()
    if own and out.data_ptr() != data.data_ptr():
        out[place : place + own].copy_(data[start : start + own])
    return []


@contextmanager
def alone(size: int, rank: int) -> Iterator[None]:
    """Make this process rank `rank` of a simulated world of `size` ranks."""
    ranks = at_least(1, size, "size")
    rank = checked_rank(rank, ranks, "rank")
    if dist.is_initialized():
        raise GroupError(
            f"torch.distributed is initialised already, as rank {dist.get_rank()} of "
            f"{dist.get_world_size()}. Call torch.distributed.destroy_process_group() first."
        )
    dist.init_process_group("fake", rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_destroyed()
        gc.collect()  # cycles of a model and its hooks hold the group
