"""Uneven bytes on Gloo, for tensors on the CPU.

Gloo refuses uneven all-gather, gather, scatter and list all-to-all. It accepts any sizes as
``all_to_all_single`` with split sizes, as a broadcast per shard, and as sends and receives into
views of the output. The fastest schedule depends on the operation; in microseconds, with 3 ranks on
2 cores (medians over even and uneven shards):

===========  ======  =================  ==========  ==========
operation    bytes   all_to_all_single  broadcasts  send, recv
===========  ======  =================  ==========  ==========
all-gather   16 KiB  587                412         482
..           16 MiB  8566               5035        5283
all-to-all   16 KiB  564                            437
..           16 MiB  4798                           5022
gather       16 KiB  556                            69
..           16 MiB  2066                           1949
===========  ======  =================  ==========  ==========

So at every size an all-gather is a broadcast per shard, messages from one rank
or to one rank are sends, and everything else is an all-to-all.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from varcomm.transport.engine import NO_LIMIT, Counts, Engine, Peers, Works, pieces
from varcomm.transport.group import Group

# Ranks up to which an all-to-all serves neighbours too: most pairs are neighbours.
_FEW_RANKS = 4

# Tag of varcomm's messages, apart from those of users.
_TAG = 0x7663


class Gloo(Engine):
    """Gloo, through torch.distributed."""

    def all_gather(self, group: Group, out: Tensor, data: Tensor, counts: Counts) -> Works:
        """Broadcast each shard into its place in `out`, all in flight together: no copies."""
        places = dict(pieces(out, counts, 0))
        if (own := places.get(group.rank)) is not None and own.data_ptr() != data.data_ptr():
            own.copy_(data)
        if group.size == 1:
            return []
        return [work for src, place in places.items() for work in self.broadcast(group, place, src)]

    def exchange(
        self, group: Group, out: Tensor, data: Tensor, recv: Counts, send: Counts, peers: Peers
    ) -> Works:
        """Send and receive, where few ranks have anything for others; else by one call for all."""
        pg, rank = group.process_group, group.rank
        if peers == "all" or (peers == "neighbours" and group.size <= _FEW_RANKS):
            return [pg.alltoall_base(out, data, list(recv), list(send), dist.AllToAllOptions())]
        arriving, leaving = dict(pieces(out, recv, rank)), dict(pieces(data, send, rank))
        kept, own = arriving.pop(rank, None), leaving.pop(rank, None)
        works = [pg.recv([piece], peer, _TAG) for peer, piece in arriving.items()]
        works += [pg.send([piece], peer, _TAG) for peer, piece in leaving.items()]
        if kept is not None and own is not None and kept.data_ptr() != own.data_ptr():
            kept.copy_(own)
        return [_Messages(group, works)] if works else []

    def broadcast(self, group: Group, data: Tensor, src: int) -> Works:
        """Through Gloo's own, which is a tree."""
        options = dist.BroadcastOptions()
        options.rootRank = src
        return [group.process_group.broadcast([data], options)]

    def leave(self, group: Group) -> None:
        """Close the connections of the group, as Gloo does where a message comes too late."""
        nothing, pg = torch.empty(1, dtype=torch.uint8), group.process_group
        for other in range(group.size):
            if other != group.rank:
                with suppress(RuntimeError):  # where this connection is closed, another is not
                    pg.recv([nothing], other, _TAG + 1).wait(timedelta(milliseconds=1))


class _Messages:
    """Sends and receives in flight.

    Gloo fails when a message arrives for a buffer that is gone, so the group keeps messages that no
    caller waits for.
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
