"""Uneven bytes on MPI, through mpi4py, for the ranks of a Gloo group.

``init("mpi")``, the default for ranks of ``mpiexec`` on CPUs, starts MPI, joins the ranks in a Gloo
world and marks it. Groups, objects and DDP use Gloo; the engine here moves varcomm's bytes.
Messages go from and to the memory of tensors.
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
from functools import partial
from itertools import accumulate
from pathlib import Path
from time import monotonic
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from varcomm.errors import LaunchError, MissingModuleError
from varcomm.transport.debug import debug_timeout, debugging
from varcomm.transport.engine import (
    NO_LIMIT,
    Counts,
    Engine,
    Route,
    Spans,
    Start,
    Works,
    as_bytes,
    messages,
)
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

_TESTS = 100  # of messages, about 0.1 ms

# Bytes up to which Python copies: torch's copy takes 3 us more.
_COPIED_BY_PYTHON = 1 << 18
# From this many ranks MPI's broadcast, and up to this many bytes its all-gather, are trees that are
# faster than messages.
_MANY_RANKS, _FEW_BYTES = 9, 8 * 1024


class MPIEngine(Engine):
    """Non-blocking messages of MPI, over a communicator of the group's ranks."""

    short_by_levels = True

    def prepare(self, route: Route) -> Start:
        schedule, group, recv, send, _ = route
        total, many = sum(recv), group.size >= _MANY_RANKS
        if schedule == "broadcast" and many:
            return partial(_broadcast, route)
        if schedule == "all_gather" and many and total <= _FEW_BYTES:
            return partial(_all_gather, route, list(accumulate(recv, initial=0)))
        if schedule == "broadcast":
            count, at_root = max(*recv, *send), group.rank == route.root
            others = [(rank, 0, count) for rank in range(group.size) if rank != route.root]
            arriving = [] if at_root else [(route.root, 0, count)]
            return partial(_exchange, route, arriving, others if at_root else [], [])
        return partial(_exchange, route, *messages(route))

    def leave(self, group: Group) -> None:
        """Refuse further calls: their messages could meet those of the failed call."""
        group.auxiliary["left"] = True


def _broadcast(route: Route, out: Tensor, data: Tensor) -> Works:
    """Let MPI broadcast, by a tree."""
    memory = _at(data.data_ptr(), data.nbytes)
    request = _communicator(route.group).Ibcast([memory, MPI.BYTE], route.root)
    return [_Messages(route, [request], (out, data))]


def _all_gather(route: Route, places: Counts, out: Tensor, data: Tensor) -> Works:
    """Let MPI gather, by a tree."""
    group, recv = route.group, route.recv
    start, own = places[group.rank], recv[group.rank]
    in_place = data.data_ptr() == out.data_ptr() + start
    sent = MPI.IN_PLACE if in_place else [_at(data.data_ptr(), own), own, MPI.BYTE]
    arriving = [_at(out.data_ptr(), out.nbytes), recv, places[:-1], MPI.BYTE]
    request = _communicator(group).Iallgatherv(sent, arriving)
    return [_Messages(route, [request], (out, data))]


def _exchange(
    route: Route, arriving: Spans, leaving: Spans, own: Spans, out: Tensor, data: Tensor
) -> Works:
    """Start to receive and to send, and copy the bytes that this rank keeps."""
    comm, byte = _communicator(route.group), MPI.BYTE
    to, of = out.data_ptr(), data.data_ptr()
    requests = [
        comm.Irecv([_at(to + first, end - first), byte], peer) for peer, first, end in arriving
    ]
    requests += [
        comm.Isend([_at(of + first, end - first), byte], peer) for peer, first, end in leaving
    ]
    if own:
        (_, there, end), (_, here, _) = own
        if to + there != of + here:
            if end - there <= _COPIED_BY_PYTHON:
                _at(to + there, end - there)[:] = _at(of + here, end - there)
            else:
                kept = as_bytes(data)[here : here + end - there]
                as_bytes(out)[there:end].copy_(kept)
    return [_Messages(route, requests, (out, data), arriving)] if requests else ()


class _Messages:
    """Messages in flight; the group keeps those that no caller waits for until they are done."""

    def __init__(
        self, route: Route, requests: list[Any], buffers: object, arriving: Spans | None = None
    ) -> None:
        self._group, self._name = route.group, route.schedule
        self._requests, self._buffers = requests, buffers
        self._statuses = [MPI.Status() for _ in requests]
        self._arriving = arriving or []  # of the first requests
        self._wrong = ""

    def wait(self, timeout: timedelta = NO_LIMIT) -> None:
        try:
            for _ in range(_TESTS):  # before the 10 us in which the timeout is found
                if self.is_completed():
                    break
                os.sched_yield()
            else:
                seconds = (timeout or self._group.timeout()).total_seconds()
                _poll(f"{self._name} on {self._group}", self.is_completed, seconds)
        except MPI.Exception as error:
            # MPI may still read and write the buffers: kept for good
            self._group.unfinished.append((None, self._buffers))
            self._wrong = MPI.Get_error_string(error.Get_error_class())
        self._requests = []
        if self._wrong:
            raise RuntimeError(
                f"{self._name} on {self._group} failed: {self._wrong}. Mostly ranks expect other "
                "sizes than their peers send (varcomm.debug() names them), or a peer has ended."
            )

    def is_completed(self) -> bool:
        """Return whether all is done; store the error of a message shorter than announced."""
        if not self._requests:
            return True
        if not _test_all(self._requests, self._statuses):
            return False
        for (peer, first, end), status in zip(self._arriving, self._statuses, strict=False):
            if (count := status.Get_count(MPI.BYTE)) != end - first:
                self._wrong = f"rank {peer} has sent {count} bytes, not {end - first}"
        self._requests = []
        return True

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
    """Start MPI, unless it runs; collective. LaunchError unless MPI has the ranks of `place`.

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
