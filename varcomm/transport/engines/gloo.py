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

# A dtype of each width that all of Gloo's calls serve. They only move elements.
_UNITS = {1: torch.uint8, 2: torch.float16, 4: torch.float32, 8: torch.float64}


class Gloo(Engine):
    """Gloo, through torch.distributed."""

    short_by_levels = True

    def prepare(self, route: Route) -> Start:
        schedule, group, recv, send, width = route
        pg, units = group.process_group, _Units(width)
        if schedule == "broadcast":
            options = _from(route.root)
            return lambda out, data: [pg.broadcast([units(data)], options)]
        recv, send = [n // width for n in recv], [n // width for n in send]
        if schedule == "all_gather":
            shards = [(_from(src), src, first, end) for src, first, end in spans(recv)]
            return partial(_all_gather, pg, units, group.rank, shards)
        if schedule == "all" or (schedule == "neighbours" and group.size <= _FEW_RANKS):
            counts = recv, send, dist.AllToAllOptions()
            return lambda out, data: [pg.alltoall_base(units(out), units(data), *counts)]
        places = messages(Route(schedule, group, recv, send))
        return partial(_messages, group, units, *places)

    def leave(self, group: Group) -> None:
        nothing, pg = torch.empty(1, dtype=torch.uint8), group.process_group
        for other in range(group.size):
            if other != group.rank:
                with suppress(RuntimeError):  # where this connection is closed, another is not
                    pg.recv([nothing], other, _TAG).wait(timedelta(milliseconds=1))


class _Units:
    """A view of a contiguous tensor as a flat one, of elements that Gloo serves.

    It costs nothing for a flat tensor of such a dtype.
    """

    def __init__(self, width: int) -> None:
        self.width, self._dtype = width, _UNITS[width]

    def __call__(self, values: Tensor) -> Tensor:
        if values.dtype == self._dtype:
            return values if values.dim() == 1 else values.view(-1)
        flat = as_bytes(values)
        return flat if self.width == 1 else flat.view(self._dtype)


def _part(values: Tensor, first: int, end: int) -> Tensor:
    return values if end - first == values.numel() else values[first:end]


def _all_gather(
    pg: dist.ProcessGroup,
    units: _Units,
    rank: int,
    shards: list[tuple[dist.BroadcastOptions, int, int, int]],
    out: Tensor,
    data: Tensor,
) -> Works:
    """Broadcast each shard, all at the same time."""
    out, data = units(out), units(data)
    works, own, length = [], data, out.numel()
    for options, src, first, end in shards:
        part = out if end - first == length else out[first:end]
        if src == rank:
            own = part
        works.append(pg.broadcast([data if src == rank else part], options))
    if own.data_ptr() != data.data_ptr():
        own.copy_(data)
    return works


def _from(src: int) -> dist.BroadcastOptions:
    """Return the options of a broadcast from a rank."""
    options = dist.BroadcastOptions()
    options.rootRank = src
    return options


def _messages(
    group: Group,
    units: _Units,
    arriving: Spans,
    leaving: Spans,
    own: Spans,
    out: Tensor,
    data: Tensor,
) -> Works:
    pg, tag = group.process_group, partial(_tag, units.width)
    out, data = units(out), units(data)
    works = [pg.recv([_part(out, a, b)], peer, tag(b - a)) for peer, a, b in arriving]
    works += [pg.send([_part(data, a, b)], peer, tag(b - a)) for peer, a, b in leaving]
    if own:
        kept, piece = (_part(x, a, b) for x, (_, a, b) in zip((out, data), own, strict=True))
        if kept.data_ptr() != piece.data_ptr():
            kept.copy_(piece)
    return [_Messages(group, works)] if works else ()


def _tag(width: int, length: int) -> int:
    return _TAG + width * length % _TAG


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
