"""Simulated group: one real rank, no peers, nothing sent.

It serves to plan a run: a rank computes its own messages and memory without the others.
torch.distributed's backend "fake" holds the ranks; the engine here answers for them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from varcomm.errors import GroupError
from varcomm.sizes import at_least, checked_rank
from varcomm.transport.engine import Engine, Peers, Work
from varcomm.transport.group import Group, forget_destroyed

__all__ = ["Schedule", "Simulated", "Transfer", "alone", "transfers"]

Schedule = Literal["all_gather", "broadcast", "all", "neighbours", "one"]


@dataclass(frozen=True)
class Transfer:
    """Data that an engine was asked to move in one call, in bytes per rank of the group."""

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

    def all_gather(
        self, group: Group, out: torch.Tensor, data: torch.Tensor, counts: Sequence[int]
    ) -> Sequence[Work]:
        """Copy this rank's shard to its place; the others are zeros."""
        own, start = counts[group.rank], sum(counts[: group.rank])
        _record("all_gather", group, [own] * group.size, counts)
        out[:start].zero_()
        out[start + own :].zero_()
        out[start : start + own].copy_(data)
        return []

    def exchange(
        self,
        group: Group,
        out: torch.Tensor,
        data: torch.Tensor,
        recv: Sequence[int],
        send: Sequence[int],
        peers: Peers,
    ) -> Sequence[Work]:
        """Keep this rank's own piece; the others are zeros."""
        _record(peers, group, send, recv)
        own = recv[group.rank]
        out.zero_()
        if own:
            to, at = sum(recv[: group.rank]), sum(send[: group.rank])
            out[to : to + own].copy_(data[at : at + own])
        return []

    def broadcast(self, group: Group, data: torch.Tensor, src: int) -> Sequence[Work]:
        """Leave the root's data; on other ranks they become zeros."""
        at_src, size = group.rank == src, len(data)
        _record(
            "broadcast",
            group,
            [size if at_src else 0] * group.size,
            [0 if at_src else size * (rank == src) for rank in range(group.size)],
        )
        if not at_src:
            data.zero_()
        return []


def _record(schedule: Schedule, group: Group, send: Sequence[int], recv: Sequence[int]) -> None:
    if _listening:
        sent, received = _without_own(group, send), _without_own(group, recv)
        transfer = Transfer(schedule, group.rank, group.ranks, sent, received)
        for found in _listening:
            found.append(transfer)


def _without_own(group: Group, counts: Sequence[int]) -> tuple[int, ...]:
    return (*counts[: group.rank], 0, *counts[group.rank + 1 :])


@contextmanager
def alone(size: int, rank: int) -> Iterator[None]:
    """Make this process rank `rank` of a simulated world of `size` ranks.

    Raises ArgumentError if there is no such rank, GroupError if torch.distributed is initialised.
    """
    ranks = at_least(1, size, "size")
    rank = checked_rank(rank, ranks, "rank")
    if dist.is_initialized():
        raise GroupError(
            f"torch.distributed is initialised already, as rank {dist.get_rank()} of "
            f"{dist.get_world_size()}. A simulated world needs a process that is in none: leave "
            "the other one first, or torch.distributed.destroy_process_group()."
        )
    # torch registers the backend when this is imported
    import torch.testing._internal.distributed.fake_pg  # noqa: F401

    dist.init_process_group("fake", store=HashStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_destroyed()
        gc.collect()  # cycles of a model and its hooks hold the group
