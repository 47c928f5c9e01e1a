"""Simulated group: one real rank, no peers, nothing sent.

torch.distributed's backend "fake" holds the ranks; the engine here answers for them.
"""

# ruff: noqa: D102, Engine documents its methods

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from varcomm.errors import GroupError, at_least, checked_rank
from varcomm.transport.engine import Engine, Route, Schedule, Start, Works, as_bytes, recording
from varcomm.transport.group import forget_destroyed, resolve

NODE = 8  # ranks on a simulated node


@dataclass(frozen=True)
class Transfer:
    """Bytes per rank of the group that an engine was asked to move in one call."""

    schedule: Schedule
    rank: int  # this rank, within the group
    ranks: tuple[int, ...]  # world ranks of the group
    send: tuple[int, ...]  # 0 for this rank, as in `recv`
    recv: tuple[int, ...]


@contextmanager
def transfers() -> Iterator[list[tuple[str, Transfer]]]:
    """Collect the transfers of simulated groups, each with the name of its operation."""
    found: list[tuple[str, Transfer]] = []

    def record(name: str, route: Route, device: torch.device) -> None:
        group = route.group
        if group.size > 1 and group.simulated:
            counts = ((*c[: group.rank], 0, *c[group.rank + 1 :]) for c in (route.send, route.recv))
            found.append((name, Transfer(route.schedule, group.rank, group.ranks, *counts)))

    with recording(record):
        yield found


class Simulated(Engine):
    """Fills the parts of other ranks with zeros, and keeps this rank's own."""

    def prepare(self, route: Route) -> Start:
        schedule, group, recv, send, _ = route
        own, place = recv[group.rank], sum(recv[: group.rank])
        first = 0 if schedule in ("all_gather", "copies") else sum(send[: group.rank])

        def start(out: Tensor, data: Tensor) -> Works:
            if schedule == "broadcast" and route.root == group.rank:
                return ()
            out, data = as_bytes(out), as_bytes(data)
            out[:place].zero_()
            out[place + own :].zero_()
            if own and out.data_ptr() != data.data_ptr():
                out[place : place + own].copy_(data[first : first + own])
            return ()

        return start


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
    resolve(None).node_size = NODE
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_destroyed()
        gc.collect()  # cycles of a model and its hooks hold the group
