"""Engine for tensors on a GPU over an engine for the CPU, through pinned memory.

It lets several ranks share one GPU, which NCCL refuses, while a program is written.
"""

# ruff: noqa: D102, Engine documents its methods

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor

from varcomm.transport.engine import NO_LIMIT, Counts, Engine, Peers, Works
from varcomm.transport.group import Group


@dataclass(frozen=True)
class Pinned(Engine):
    """Copies sent tensors to the CPU, and received ones back to the GPU."""

    engine: Engine

    def all_gather(self, group: Group, out: Tensor, data: Tensor, counts: Counts) -> Works:
        arriving = _empty(out)
        works = self.engine.all_gather(group, arriving, _fetched(data), counts)
        return [_Arrival(works, arriving, out)]

    def exchange(
        self, group: Group, out: Tensor, data: Tensor, recv: Counts, send: Counts, peers: Peers
    ) -> Works:
        arriving = _empty(out)
        works = self.engine.exchange(group, arriving, _fetched(data), recv, send, peers)
        return [_Arrival(works, arriving, out)]

    def broadcast(self, group: Group, data: Tensor, src: int) -> Works:
        moving = _fetched(data) if group.rank == src else _empty(data)
        works = self.engine.broadcast(group, moving, src)
        return works if group.rank == src else [_Arrival(works, moving, data)]


@dataclass(frozen=True)
class _Arrival:
    """Data in flight to the CPU, and their place on the GPU."""

    works: Works
    arriving: Tensor
    out: Tensor

    def wait(self, timeout: timedelta = NO_LIMIT) -> None:
        for work in self.works:
            work.wait(timeout)
        self.out.copy_(self.arriving, non_blocking=True)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)


def _empty(data: Tensor) -> Tensor:
    return torch.empty(len(data), dtype=data.dtype, device="cpu", pin_memory=data.is_cuda)


def _fetched(data: Tensor) -> Tensor:
    """Return a copy on the CPU; the host waits for it, since the engine reads it at once."""
    copy = _empty(data).copy_(data, non_blocking=True)
    if data.is_cuda:
        torch.cuda.current_stream(data.device).synchronize()
    return copy
