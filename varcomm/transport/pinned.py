"""Engine for tensors on a GPU over an engine for the CPU, through pinned memory.

It lets several ranks share one GPU, which NCCL refuses, while a program is written.
"""

# ruff: noqa: D102, Engine documents its methods

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor

from varcomm.transport.engine import NO_LIMIT, Engine, Move, Works


@dataclass(frozen=True)
class Pinned(Engine):
    """Copies sent tensors to the CPU, and received ones back to the GPU."""

    engine: Engine

    def start(self, move: Move) -> Works:
        schedule, group, out, data, recv, send = move
        if schedule == "broadcast" and move.root == group.rank:
            sent = _fetched(data)
            return self.engine.start(Move(schedule, group, sent, sent, recv, send))
        arriving = _empty(out)
        sent = arriving if schedule == "broadcast" else _fetched(data)
        works = self.engine.start(Move(schedule, group, arriving, sent, recv, send))
        return [_Arrival(works, arriving, out)]


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
