"""A world in which this process is alone: others are taken for granted, and nothing is sent.

For planning: what a rank of many would send, receive and keep is known to it without the others.
torch.distributed's backend "fake" holds the ranks; the engine here says what arrives.
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

from varcomm.errors import ArgumentError, GroupError
from varcomm.sizes import checked_rank, exact_int
from varcomm.transport.engine import Engine, Peers, Work
from varcomm.transport.engines import serve
from varcomm.transport.group import Group

__all__ = ["Fake", "Schedule", "Transfer", "alone", "transfers"]

Schedule = Literal["all_gather", "broadcast", "all", "neighbours", "one"]


@dataclass(frozen=True)
class Transfer:
    """What an engine was asked to move in one call, in bytes a rank of the group.

    Attributes
    ----------
    schedule : str
        ``"all_gather"``, ``"broadcast"``, or of an exchange who has something for whom, as
        :data:`varcomm.transport.engine.Peers` says it.
    rank : int
        This rank, within the group.
    ranks : tuple of int
        The ranks of the world that are in the group.
    send, recv : tuple of int
        Bytes to, and from, each rank of the group; what a rank keeps for itself is 0.
    """

    schedule: Schedule
    rank: int
    ranks: tuple[int, ...]
    send: tuple[int, ...]
    recv: tuple[int, ...]


# Lists that are being filled. Backward runs in threads of its own, so this is not thread-local.
_listening: list[list[Transfer]] = []


@contextmanager
def transfers() -> Iterator[list[Transfer]]:
    """Collect what engines of fake worlds are asked to move."""
    found: list[Transfer] = []
    _listening.append(found)
    try:
        yield found
    finally:
        _listening[:] = [listener for listener in _listening if listener is not found]


class Fake(Engine):
    """Nothing is sent, and what would arrive from others is zeros.

    What a rank keeps for itself is where it belongs.
    """

    peers_answer = False

    def all_gather(
        self, group: Group, out: torch.Tensor, data: torch.Tensor, counts: Sequence[int]
    ) -> Sequence[Work]:
        """Put this rank's shard into its place, and zeros into the others."""
        own, start = counts[group.rank], sum(counts[: group.rank])
        _told("all_gather", group, [own] * group.size, counts)
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
        """Keep this rank's own piece; zeros arrive from the others."""
        _told(peers, group, send, recv)
        own = recv[group.rank]
        out.zero_()
        if own:
            to, at = sum(recv[: group.rank]), sum(send[: group.rank])
            out[to : to + own].copy_(data[at : at + own])
        return []

    def broadcast(self, group: Group, data: torch.Tensor, src: int) -> Sequence[Work]:
        """Leave the root's data as they are; elsewhere zeros arrive."""
        at_src, size = group.rank == src, len(data)
        _told(
            "broadcast",
            group,
            [size if at_src else 0] * group.size,
            [0 if at_src else size * (rank == src) for rank in range(group.size)],
        )
        if not at_src:
            data.zero_()
        return []


def _told(schedule: Schedule, group: Group, send: Sequence[int], recv: Sequence[int]) -> None:
    if _listening:
        sent, received = _to_others(group, send), _to_others(group, recv)
        transfer = Transfer(schedule, group.rank, group.ranks, sent, received)
        for found in _listening:
            found.append(transfer)


def _to_others(group: Group, counts: Sequence[int]) -> tuple[int, ...]:
    return (*counts[: group.rank], 0, *counts[group.rank + 1 :])


@contextmanager
def alone(size: int, rank: int) -> Iterator[None]:
    """Let this process be rank `rank` of `size` that are not there.

    Raises
    ------
    ArgumentError
        If there is no such rank.
    GroupError
        If torch.distributed is initialised already.
    """
    ranks = exact_int(size)
    if ranks is None or ranks < 1:
        raise ArgumentError(f"size must be a positive integer; got {size!r}.")
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
        gc.collect()  # cycles, as of a model and its hooks, hold the group too


for _device in ("cpu", "cuda"):
    serve("fake", _device, Fake())
