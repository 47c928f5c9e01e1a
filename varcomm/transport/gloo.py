"""Uneven bytes on Gloo, for tensors on the CPU.

Gloo refuses uneven all-gather, gather, scatter and list all-to-all. It accepts any sizes in
``all_to_all_single``, in a broadcast per shard, and in sends and receives into views of the output.
From 16 KiB to 16 MiB a broadcast per shard is the fastest all-gather (412 us at 16 KiB with 3 ranks
on 2 cores, against 587 and 482). Sends are the fastest from or to one rank, and an all-to-all is
the fastest for everything else.
"""

# ruff: noqa: D102, Engine documents its methods

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from varcomm.transport.engine import (
    NO_LIMIT,
    Engine,
    Route,
    Spans,
    Start,
    Works,
    as_bytes,
    messages,
    spans,
)
from varcomm.transport.group import Group

# Ranks up to which an all-to-all serves neighbours too: with 2 and 3 its median time was lower in
# 22 of 24 cases of 256 bytes to 1 MiB, in loops and with work between calls.
_FEW_RANKS = 4

# First tag of varcomm's messages, apart from those of users. The length is added: Gloo would take a
# message that is too short, and abort the process for one that is too long.
_TAG = 1 << 30


def _tag(length: int) -> int:
    return _TAG + length % _TAG


class Gloo(Engine):
    """Gloo, through torch.distributed."""

    def prepare(self, route: Route) -> Start:
        schedule, group, recv, send = route
        pg = group.process_group
        if schedule == "broadcast":
            return lambda out, data: [_broadcast(pg, as_bytes(data), route.root)]
        if schedule == "all_gather":
            return partial(_all_gather, pg, group.rank, spans(recv))
        if schedule == "all" or (schedule == "neighbours" and group.size <= _FEW_RANKS):
            counts = list(recv), list(send), dist.AllToAllOptions()
            return lambda out, data: [pg.alltoall_base(as_bytes(out), as_bytes(data), *counts)]
        return partial(_messages, group, *messages(route))

    def leave(self, group: Group) -> None:
        nothing, pg = torch.empty(1, dtype=torch.uint8), group.process_group
        for other in range(group.size):
            if other != group.rank:
                with suppress(RuntimeError):  # where this connection is closed, another is not
                    pg.recv([nothing], other, _TAG).wait(timedelta(milliseconds=1))


def _all_gather(
    pg: dist.ProcessGroup, rank: int, places: Spans, out: Tensor, data: Tensor
) -> Works:
    """Broadcast each shard, all at the same time."""
    out, data = as_bytes(out), as_bytes(data)
    parts = [(src, out[first:end]) for src, first, end in places]
    works = [_broadcast(pg, data if src == rank else part, src) for src, part in parts]
    for src, part in parts:
        if src == rank and part.data_ptr() != data.data_ptr():
            part.copy_(data)
    return works


def _broadcast(pg: dist.ProcessGroup, data: Tensor, src: int) -> dist.Work:
    options = dist.BroadcastOptions()
    options.rootRank = src
    return pg.broadcast([data], options)


def _messages(
    group: Group, arriving: Spans, leaving: Spans, own: Spans, out: Tensor, data: Tensor
) -> Works:
    pg, out, data = group.process_group, as_bytes(out), as_bytes(data)
    works = [pg.recv([out[first:end]], peer, _tag(end - first)) for peer, first, end in arriving]
    works += [pg.send([data[first:end]], peer, _tag(end - first)) for peer, first, end in leaving]
    if own:
        kept, piece = (x[first:end] for x, (_, first, end) in zip((out, data), own, strict=True))
        if kept.data_ptr() != piece.data_ptr():
            kept.copy_(piece)
    return [_Messages(group, works)] if works else ()


class _Messages:
    """Sends and receives in flight; the group keeps those that no caller waits for.

    Gloo fails when a message arrives for a buffer that is gone.
    """

    def __init__(self, group: Group, works: list[dist.Work]) -> None:
        self._group, self._works = group, works

    def wait(self, timeout: timedelta = NO_LIMIT) -> None:
        while self._works:
            self._works[-1].wait(timeout)
            self._works.pop()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def __del__(self) -> None:
        if self._works:
            self._group.unfinished.extend(self._works)
