"""Engine for tensors on a GPU over an engine for the CPU, through pinned memory.

It lets several ranks share one GPU, which NCCL refuses, while a program is written.
"""

# ruff: noqa: D102, Engine documents its methods

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor

from varcomm.transport.engine import NO_LIMIT, Engine, Route, Start, Works


@dataclass(frozen=True)
class Pinned(Engine):
    """Copies sent tensors to the CPU, and received ones back to the GPU."""

    engine: Engine

    def prepare(self, route: Route) -> Start:
        inner = self.engine.prepare(route)
        broadcast = route.schedule == "broadcast"

        def start(out: Tensor, data: Tensor) -> Works:
            if broadcast and route.root == route.group.rank:
                sent = _fetched(data)
                return inner(sent, sent)
            arriving = _empty(out)
            works = inner(arriving, arriving if broadcast else _fetched(data))
            return [_Arrival(works, arriving, out)]

        return start


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
    return torch.empty(data.shape, dtype=data.dtype, device="cpu", pin_memory=data.is_cuda)


def _fetched(data: Tensor) -> Tensor:
    """Return a copy on the CPU; the host waits for it, since the engine reads it at once."""
    copy = _empty(data).copy_(data, non_blocking=True)
    if data.is_cuda:
        torch.cuda.current_stream(data.device).synchronize()
    return copy
