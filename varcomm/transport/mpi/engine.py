"""Uneven bytes on MPI, through mpi4py.

Everything is sent and received, non-blocking, straight from where tensors lie to where they belong.
That draws with MPI's own Allgatherv and Alltoallv for small messages, and takes about half their
time for 1 MB and more (``benchmarks/mpi_schedules.py``; MPICH 5.0.2, 2 and 3 ranks of one host).
In an all-to-all a rank knows no counts but its own, so ranks could not agree on a schedule by them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from itertools import accumulate
from typing import cast

import torch
from mpi4py import MPI

from varcomm.transport.engine import NO_LIMIT, Engine, Peers, Work
from varcomm.transport.group import Group
from varcomm.transport.mpi.buffers import COLLECTIVE, Piece, messages, settle
from varcomm.transport.mpi.process_group import ProcessGroupMPI4Py
from varcomm.transport.mpi.progress import failed, keep, keep_for_good, poll, too_late

__all__ = ["MPIEngine"]

_at = MPI.buffer.fromaddress
_BYTE = MPI.BYTE
_test_all = MPI.Request.Testall

# Ranks and bytes from which and up to which MPI's own all-gather takes over, a tree: what Python
# does for each message, 0.7 us, would sum up. Below, and beyond, it is no faster: on 16 ranks of
# one host it draws up to 8 KB, and at 64 KB takes twice as long.
_MANY_RANKS = 9
_FEW_BYTES = 8 * 1024

# Bytes up to which mpi4py copies; torch's own copy takes 3 us more, and has threads.
_COPIED_AT_ONCE = 1 << 18


class MPIEngine(Engine):
    """MPI's messages, over the communicator of a group of :class:`ProcessGroupMPI4Py`."""

    def all_gather(
        self, group: Group, out: torch.Tensor, data: torch.Tensor, counts: Sequence[int]
    ) -> Sequence[Work]:
        """Send the shard to all others, and receive theirs where they belong: no copies."""
        rank, size = group.rank, group.size
        ends = list(accumulate(counts))
        if size >= _MANY_RANKS and ends[-1] <= _FEW_BYTES:
            return self._tree(group, out, data, counts, ends)
        own, start = data.data_ptr(), out.data_ptr()
        others = (*range(rank + 1, size), *range(rank))
        receive = [(peer, start + ends[peer] - counts[peer], counts[peer]) for peer in others]
        send = [(peer, own, counts[rank]) for peer in others]
        works = _messages(group, "all_gather", out, data, receive, send)
        _keep_own(out, data, ends[rank] - counts[rank], 0, counts[rank])
        return works

    def exchange(
        self,
        group: Group,
        out: torch.Tensor,
        data: torch.Tensor,
        recv: Sequence[int],
        send: Sequence[int],
        peers: Peers,
    ) -> Sequence[Work]:
        """Send and receive among those who have bytes for each other."""
        rank, size = group.rank, group.size
        others = (*range(rank + 1, size), *range(rank))
        start, arriving = data.data_ptr(), out.data_ptr()
        places, pieces = list(accumulate(recv)), list(accumulate(send))
        works = _messages(
            group,
            "exchange",
            out,
            data,
            [(peer, arriving + places[peer] - recv[peer], recv[peer]) for peer in others],
            [(peer, start + pieces[peer] - send[peer], send[peer]) for peer in others],
        )
        _keep_own(out, data, places[rank] - recv[rank], pieces[rank] - send[rank], send[rank])
        return works

    def broadcast(self, group: Group, data: torch.Tensor, src: int) -> Sequence[Work]:
        """Through MPI's own, which is a tree."""
        pg = cast(ProcessGroupMPI4Py, group.process_group)
        settle(data)
        place = [_at(data.data_ptr(), data.numel()), _BYTE]
        return [_Messages(pg, "broadcast", [pg.communicator.Ibcast(place, src)], (data,))]

    def _tree(
        self,
        group: Group,
        out: torch.Tensor,
        data: torch.Tensor,
        counts: Sequence[int],
        ends: Sequence[int],
    ) -> Sequence[Work]:
        pg = cast(ProcessGroupMPI4Py, group.process_group)
        settle(data)
        starts = [end - count for end, count in zip(ends, counts, strict=True)]
        mine = counts[group.rank]
        in_place = data.data_ptr() == out.data_ptr() + starts[group.rank]
        sent = MPI.IN_PLACE if in_place else [_at(data.data_ptr(), mine), mine, _BYTE]
        places = [_at(out.data_ptr(), ends[-1]), counts, starts, _BYTE]
        request = pg.communicator.Iallgatherv(sent, places)
        return [_Messages(pg, "all_gather", [request], (out, data))]


class _Messages:
    """What is under way; where nobody waits for it, it is kept until it is done."""

    __slots__ = ("_group", "_kept", "_name", "_requests")

    def __init__(
        self, group: ProcessGroupMPI4Py, name: str, requests: list[MPI.Request], kept: object
    ) -> None:
        self._group, self._name, self._requests, self._kept = group, name, requests, kept

    def wait(self, timeout: timedelta = NO_LIMIT) -> None:
        requests = self._requests
        try:
            if not _test_all(requests):
                seconds = timeout.total_seconds() or self._group.seconds
                if not poll(lambda: _test_all(requests), seconds):
                    raise too_late(self._name, self._group.where(), seconds)
        except MPI.Exception as error:
            keep_for_good(self._kept, requests)
            self._requests = []
            raise failed(self._name, self._group.where(), error) from error
        self._requests = []

    def is_completed(self) -> bool:
        return _test_all(self._requests)

    def advance(self) -> bool:
        try:
            return self.is_completed()
        except MPI.Exception:  # nobody is left to be told
            keep_for_good(self._kept, self._requests)
            return True

    def __del__(self) -> None:
        if self._requests:
            keep(self)


def _messages(
    group: Group,
    name: str,
    out: torch.Tensor,
    data: torch.Tensor,
    receive: Iterable[Piece],
    send: Iterable[Piece],
) -> list[_Messages]:
    pg = cast(ProcessGroupMPI4Py, group.process_group)
    settle(data)
    requests = messages(pg.communicator, receive, send, COLLECTIVE)
    return [_Messages(pg, name, requests, (out, data))] if requests else []


def _keep_own(out: torch.Tensor, data: torch.Tensor, to: int, start: int, count: int) -> None:
    """Copy what a rank keeps for itself, ``data[start : start + count]``, to its place in `out`."""
    place, own = out.data_ptr() + to, data.data_ptr() + start
    if place == own or not count:
        return
    if count <= _COPIED_AT_ONCE and not data.is_cuda:
        _at(place, count)[:] = _at(own, count)
    else:
        out.narrow(0, to, count).copy_(data.narrow(0, start, count))
