"""Uneven bytes on MPI, through mpi4py, for the ranks of a Gloo group.

``init("mpi")``, the default for ranks of ``mpiexec`` on CPUs, starts MPI, joins the ranks in a Gloo
world and marks it: groups, objects and DDP use Gloo, the engine here moves varcomm's bytes.
Messages go from and to the memory of tensors, at the speed of MPI's own Allgatherv and Alltoallv
for small ones and in half their time from 1 MB on (MPICH 5.0.2).
"""

# ruff: noqa: D102, Engine documents its methods

from __future__ import annotations

import atexit
import faulthandler
import logging
import os
import re
import socket
import sys
import zlib
from collections.abc import Callable
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from time import monotonic
from typing import Any

import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from varcomm.errors import LaunchError, MissingModuleError
from varcomm.transport.debug import debug_timeout, debugging
from varcomm.transport.engine import NO_LIMIT, Counts, Engine, Move, Works
from varcomm.transport.environment import Place
from varcomm.transport.group import Group

try:
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False  # `start` does both
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:  # a RuntimeError if no libmpi can be loaded
    raise MissingModuleError(
        'backend "mpi" needs mpi4py and an MPI library: pip install mpi4py mpich. '
        f"The import of mpi4py.MPI says: {error}"
    ) from error

logger = logging.getLogger("varcomm")

_at = MPI.buffer.fromaddress  # 0.1 us; to describe a tensor by DLPack takes 5 us
_test_all = MPI.Request.Testall

# Bytes up to which Python copies: torch's copy takes 3 us more.
_COPIED_BY_PYTHON = 1 << 18
# From this many ranks and up to this many bytes MPI's all-gather, a tree, is faster than messages.
_MANY_RANKS, _FEW_BYTES = 9, 8 * 1024


class MPIEngine(Engine):
    """Non-blocking messages of MPI, over a communicator of the group's ranks."""

    def start(self, move: Move) -> Works:
        schedule, group, out, data, recv, _ = move
        comm, total = _communicator(group), sum(recv)
        if schedule == "broadcast":
            requests = [comm.Ibcast([_at(data.data_ptr(), data.numel()), MPI.BYTE], move.root)]
        elif schedule == "all_gather" and group.size >= _MANY_RANKS and total <= _FEW_BYTES:
            places, own = _places(recv), recv[group.rank]
            in_place = data.data_ptr() == out.data_ptr() + places[group.rank]
            sent = MPI.IN_PLACE if in_place else [_at(data.data_ptr(), own), own, MPI.BYTE]
            arriving = [_at(out.data_ptr(), total), recv, places, MPI.BYTE]
            requests = [comm.Iallgatherv(sent, arriving)]
        else:
            requests = _exchange(comm, move)
        return [_Messages(group, schedule, requests, (out, data))] if requests else []

    def leave(self, group: Group) -> None:
        """Refuse further calls: their messages could meet those of the failed call."""
        group.auxiliary["left"] = True


def _places(counts: Counts) -> list[int]:
    return [0, *accumulate(counts)][:-1]


def _exchange(comm: MPI.Intracomm, move: Move) -> list[Any]:
    """Start to receive and to send the pieces that have bytes, and copy this rank's own piece."""
    schedule, group, out, data, recv, send = move
    rank, places = group.rank, _places(recv)
    starts = [0] * group.size if schedule in ("all_gather", "copies") else _places(send)
    arriving, leaving = out.data_ptr(), data.data_ptr()
    others = (*range(rank + 1, group.size), *range(rank))
    receiving: tuple[Any, int, Counts, Counts] = comm.Irecv, arriving, places, recv
    requests: list[Any] = []
    for begin, memory, at, counts in (receiving, (comm.Isend, leaving, starts, send)):
        for peer in others:
            if counts[peer]:
                requests.append(begin([_at(memory + at[peer], counts[peer]), MPI.BYTE], peer))
    to, start, own = places[rank], starts[rank], send[rank]
    if own and arriving + to != leaving + start:
        if own <= _COPIED_BY_PYTHON:
            _at(arriving + to, own)[:] = _at(leaving + start, own)
        else:
            out.narrow(0, to, own).copy_(data.narrow(0, start, own))
    return requests


class _Messages:
    """Messages in flight; the group keeps those that no caller waits for until they are done."""

    def __init__(self, group: Group, name: str, requests: list[Any], buffers: object) -> None:
        self._group, self._name, self._requests, self._buffers = group, name, requests, buffers

    def wait(self, timeout: timedelta = NO_LIMIT) -> None:
        try:
            if not _test_all(self._requests):
                seconds = (timeout or self._group.timeout()).total_seconds()
                where = f"{self._name} on {self._group}"
                _poll(where, lambda: _test_all(self._requests), seconds)
        except MPI.Exception as error:
            # MPI may still read and write the buffers: kept for good
            self._group.unfinished.append((None, self._buffers))
            self._requests = []
            reason = MPI.Get_error_string(error.Get_error_class())
            raise RuntimeError(
                f"{self._name} on {self._group} failed: {reason}. Mostly ranks expect other sizes "
                "than their peers send (varcomm.debug() names them), or a peer has ended."
            ) from error
        self._requests = []

    def is_completed(self) -> bool:
        return _test_all(self._requests)

    def __del__(self) -> None:
        if self._requests:
            self._group.unfinished.append((self._requests, self._buffers))


def _poll(where: str, done: Callable[[], bool], seconds: float) -> None:
    """Test until `done`; MPI's own wait has no timeout and ignores Ctrl-C."""
    end = monotonic() + seconds
    while not done():
        if monotonic() > end:
            raise RuntimeError(
                f"{where} timed out after {seconds:g} s. Look for a rank that has failed, calls "
                "something else or expects another size: varcomm.debug() names it."
            )
        os.sched_yield()  # else three ranks on two cores take 1000 times as long


def _communicator(group: Group) -> MPI.Intracomm:
    """Return the communicator of the group's ranks, in their order; collective at first."""
    if "left" in group.auxiliary:
        raise RuntimeError("this rank has left the group after an earlier failure.")
    comm: MPI.Intracomm | None = group.auxiliary.get("communicator")
    if comm is None:
        # MPI would wait for a missing rank for ever, so the ranks meet on Gloo before
        limit = debug_timeout() if debugging() else group.timeout()
        dist.monitored_barrier(group.process_group, limit, wait_all_ranks=True)
        members = MPI.COMM_WORLD.Get_group().Incl(list(group.ranks))
        tags = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767
        comm = MPI.COMM_WORLD.Create_group(members, zlib.crc32(group.name.encode()) % tags)
        members.Free()
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        group.auxiliary["communicator"] = comm
    if group.unfinished:
        group.unfinished[:] = [kept for kept in group.unfinished if not _is_finished(kept[0])]
    return comm


def _is_finished(requests: list[MPI.Request] | None) -> bool:
    try:
        return requests is not None and _test_all(requests)
    except MPI.Exception:
        return False


def start(place: Place, limit: timedelta) -> None:
    """Start MPI, unless it runs; collective. LaunchError unless its ranks are those of `place`.

    If another rank never starts it, the process ends with code 1 after `limit`.
    """
    if not MPI.Is_initialized():
        # MPI waits for the others with the lock of the interpreter; this timer needs no lock
        faulthandler.dump_traceback_later(limit.total_seconds(), exit=True, file=2)
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        faulthandler.cancel_dump_traceback_later()
        atexit.register(_finish, os.getpid(), limit)
        _unlink_shared_memory()
    world = MPI.COMM_WORLD
    if (world.rank, world.size) != (place.rank, place.size):
        raise LaunchError(
            f"this is rank {place.rank} of {place.size} to {place.launcher}, but rank {world.rank} "
            f"of {world.size} to MPI ({MPI.Get_library_version().splitlines()[0]}). Start ranks "
            "with the mpiexec of that library, or set MPI4PY_LIBMPI to the library of yours."
        )
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        raise LaunchError(
            f"rank {place.rank}: MPI was started without support for threads, in which backward "
            "communicates. Let varcomm.init start it, or ask for MPI.THREAD_MULTIPLE."
        )


def _unlink_shared_memory() -> None:
    """Remove the name of MPICH's shared memory once all ranks have it; killed ranks leave it."""
    mapped = Path("/proc/self/maps")
    names = re.findall(r"/dev/shm/mpich_shm_\S+", mapped.read_text()) if mapped.exists() else []
    MPI.COMM_WORLD.Barrier()
    for name in set(names):
        Path(name).unlink(missing_ok=True)


def store_of(limit: timedelta) -> Store:
    """Open a store on the first rank's host, and send its address to the others by MPI."""
    world = MPI.COMM_WORLD
    neighbours = world.Split_type(MPI.COMM_TYPE_SHARED)
    one_host = neighbours.size == world.size
    neighbours.Free()
    host = os.environ.get("MASTER_ADDR") or ("127.0.0.1" if one_host else socket.gethostname())
    store, trouble = None, None
    if world.rank == 0:
        try:
            store = TCPStore(host, 0, world.size, True, limit, wait_for_workers=False)
        except RuntimeError as error:
            trouble = str(error)
    host, port, trouble = world.bcast((host, store and store.port, trouble))
    if trouble is not None:
        raise LaunchError(f"rank 0 cannot open a store for the others at {host!r}: {trouble}")
    return store or TCPStore(host, port, world.size, False, limit, wait_for_workers=False)


def _finish(owner: int, limit: timedelta) -> None:
    """End MPI at exit with all ranks; after an exception the launcher ends the others."""
    forked, failed = os.getpid() != owner, getattr(sys, "last_value", None) is not None
    if forked or failed or MPI.Is_finalized():
        return
    try:
        _poll("the end of MPI", MPI.COMM_WORLD.Ibarrier().Test, limit.total_seconds())
    except RuntimeError as error:
        logger.error("rank %d: %s It leaves MPI without them.", MPI.COMM_WORLD.rank, error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # an exit handler cannot set the exit code otherwise
    MPI.Finalize()
