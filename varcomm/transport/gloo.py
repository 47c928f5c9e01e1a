"""Uneven bytes on Gloo, for tensors on the CPU.

Gloo refuses uneven all-gather, gather, scatter and list all-to-all. It accepts any sizes in
``all_to_all_single``, in a broadcast per shard, and in sends and receives into views of the output.
From 16 KiB to 16 MiB a broadcast per shard is the fastest all-gather (412 us at 16 KiB with 3 ranks
on 2 cores, against 587 and 482), sends are the fastest from or to one rank, and an all-to-all is
the fastest for everything else.
"""

# ruff: noqa: D102, Engine documents its methods

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from varcomm.transport.engine import NO_LIMIT, Engine, Move, Works, pieces
from varcomm.transport.group import Group

# Ranks up to which an all-to-all serves neighbours too: with 2 and 3 its median time was lower in
# 22 of 24 cases of 256 bytes to 1 MiB, in loops and with work between calls.
_FEW_RANKS = 4

# Tag of varcomm's messages, apart from those of users.
_TAG = 0x7663


class Gloo(Engine):
    """Gloo, through torch.distributed."""

    def start(self, move: Move) -> Works:
        schedule, group, out, data, recv, send = move
        pg, rank = group.process_group, group.rank
        if schedule == "broadcast":
            return [_broadcast(pg, data, move.root)]
        if schedule == "all_gather":
            places = dict(pieces(out, recv, 0))
            if (own := places.get(rank)) is not None and own.data_ptr() != data.data_ptr():
                own.copy_(data)
            return [_broadcast(pg, place, src) for src, place in places.items()]
        if schedule == "all" or (schedule == "neighbours" and group.size <= _FEW_RANKS):
            return [pg.alltoall_base(out, data, list(recv), list(send), dist.AllToAllOptions())]
        arriving = dict(pieces(out, recv, rank))
        if schedule == "copies":
            leaving = {peer: data for peer, count in enumerate(send) if count}
        else:
            leaving = dict(pieces(data, send, rank))
        kept, own = arriving.pop(rank, None), leaving.pop(rank, None)
        works = [pg.recv([piece], peer, _TAG) for peer, piece in arriving.items()]
        works += [pg.send([piece], peer, _TAG) for peer, piece in leaving.items()]
        if kept is not None and own is not None and kept.data_ptr() != own.data_ptr():
            kept.copy_(own)
        return [_Messages(group, works)] if works else []

    def leave(self, group: Group) -> None:
        nothing, pg = torch.empty(1, dtype=torch.uint8), group.process_group
        for other in range(group.size):
            if other != group.rank:
                with suppress(RuntimeError):  # where this connection is closed, another is not
                    pg.recv([nothing], other, _TAG + 1).wait(timedelta(milliseconds=1))


def _broadcast(pg: dist.ProcessGroup, data: Tensor, src: int) -> dist.Work:
    options = dist.BroadcastOptions()
    options.rootRank = src
    return pg.broadcast([data], options)


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
