"""Engines, which move bytes of uneven length between ranks: their interface and their choice.

An engine has no notion of rows, dtypes or gradients. All its tensors are flat, contiguous and of
uint8; all counts are bytes per rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from varcomm.errors import GroupError
from varcomm.transport.group import Group, resolve

# Backends of torch.distributed that have an engine, and its kinds of devices.
_SERVED = {"gloo": ("cpu", "cuda"), "fake": ("cpu", "cuda"), "nccl": ("cuda",)}

NO_LIMIT = timedelta(0)  # the timeout of the group holds


# Communication in flight. ``wait(timeout)`` of each returns when it is done on this rank (on a GPU,
# lets the current stream wait for it), and raises RuntimeError after its timeout or the group's;
# ``is_completed()`` does not wait, and may return False if that is unknown.
Works: TypeAlias = Sequence[Any]
Counts: TypeAlias = Sequence[int]

# The messages of a call, as all ranks describe them: an all-gather; a broadcast; or an exchange
# between most pairs of ranks, between few (as the neighbours of a plan; or copies of one piece to
# each), or of one with all others.
Schedule: TypeAlias = Literal["all_gather", "broadcast", "all", "neighbours", "copies", "one"]


class Move(NamedTuple):
    """The bytes that one call moves: ``send[r]`` of `data` to rank r, and `out` sender by sender.

    Empty messages are not sent. An all-gather sends all of `data`, which may be this rank's place
    in `out`, to every rank; copies go to ranks with a count. A broadcast overwrites `data`, which
    is `out`; its root receives none.
    """

    schedule: Schedule
    group: Group
    out: Tensor
    data: Tensor
    recv: Counts
    send: Counts

    @property
    def root(self) -> int:
        """The root of a broadcast."""
        return next((rank for rank, count in enumerate(self.recv) if count), self.group.rank)


class EngineFailure(RuntimeError):
    """The error of an engine in a call."""


@dataclass
class Pending:
    """Communication in flight, and the function that returns its result after the works."""

    works: Works
    finish: Callable[[], Tensor]
    number: int | None = None  # of the call, if ranks compare calls
    failed: Callable[[EngineFailure], Exception] | None = None  # makes the error of the call
    earlier: Sequence[Pending] = ()  # calls that must begin all rounds before this one waits
    done: bool = True  # all rounds have begun

    def is_done(self) -> bool:
        """Return whether :meth:`wait` need not wait, if the engine knows it."""
        return all(work.is_completed() for work in self.works)

    def complete(self) -> None:
        """Begin and await all further rounds; then :meth:`wait` only returns the result."""

    def wait(self) -> Tensor:
        """Wait until this rank's part is done, and return the result."""
        for each in self.earlier:
            each.complete()
        self.earlier = ()
        try:
            wait_for(self.works)
            self.works = ()  # which keep the sent tensor in memory
            return self.finish()
        except EngineFailure as error:
            raise self.explained(error) from error.__cause__

    def explained(self, error: EngineFailure) -> Exception:
        """Return the error of the call."""
        return self.failed(error) if self.failed else error


def wait_for(works: Works, timeout: timedelta = NO_LIMIT) -> None:
    """Wait for all works, or raise EngineFailure."""
    try:
        for work in works:
            work.wait(timeout)
    except RuntimeError as error:
        raise EngineFailure(str(error)) from error


class Engine(ABC):
    """Uneven collectives on bytes.

    A `simulated` engine answers in place of the other ranks: each repeats the metadata of this
    rank, and its data are zeros.
    """

    simulated: ClassVar[bool] = False

    @abstractmethod
    def start(self, move: Move) -> Works:
        """Start to move bytes: done on this rank after the works; `data` must not change before."""

    def leave(self, group: Group) -> None:  # noqa: B027, an engine may have no way to do it
        """End the waiting of other ranks for this one, after a failure."""


def begin(move: Move) -> Works:
    """Start to move bytes by the engine of the group, or raise EngineFailure."""
    if move.group.size == 1:
        return keep(move.group, move.out, move.data)
    engine = engine_for(move.group, move.data.device)
    if move.schedule == "broadcast" and len(move.data) == 0:
        return ()
    try:
        return engine.start(move)
    except RuntimeError as error:
        raise EngineFailure(str(error)) from error


def keep(group: Group, out: Tensor, data: Tensor) -> Works:
    """Move the data of a single rank to `out`; GroupError if no engine serves their device."""
    engine_for(group, data.device)
    if data.data_ptr() != out.data_ptr():
        out.copy_(data)
    return ()


def broadcast_of(group: Group, data: Tensor, src: int) -> Move:
    """Return the move that overwrites `data` on every rank by that of `src`."""
    count, at_root = len(data), group.rank == src
    recv = [0 if at_root or rank != src else count for rank in range(group.size)]
    return Move("broadcast", group, data, data, recv, [count * at_root] * group.size)


def pieces(data: Tensor, counts: Counts, start: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the piece of each rank that has bytes in `data`, from rank `start` on, cyclically."""
    ends = list(accumulate(counts))
    for rank in (*range(start, len(ends)), *range(start)):
        if counts[rank]:
            yield rank, data[ends[rank] - counts[rank] : ends[rank]]


def engine_for(group: Group, device: torch.device) -> Engine:
    """Return the engine for bytes on `device`, or raise GroupError."""
    engine: Engine | None = group.engines.get(device)
    if engine is None:
        engine = group.engines[device] = _found(group, device)
    return engine


def is_simulated(group: Group) -> bool:
    """Return whether the engine of the group answers for ranks that do not exist."""
    return engine_for(group, group.device()).simulated


def _found(group: Group, device: torch.device) -> Engine:
    """Import and return the engine: a process imports only the engines that its groups use."""
    backends = group.backends()
    backend = backends.get(device.type, "")
    if device.type not in _SERVED.get(backend, ()):
        served = [kind for kind, backend in backends.items() if kind in _SERVED.get(backend, ())]
        raise GroupError(
            f"{group}: the tensor is on {device}, but this group has an engine for "
            f"{' and '.join(served) or 'no device'} only (torch.distributed's backends: "
            f"{dist.get_backend_config(group.process_group)}). Move the tensor, or call "
            "varcomm.init with a backend for its device: gloo or mpi for cpu, nccl for cuda."
        )
    if backend == "nccl":
        from varcomm.transport.nccl import NCCL

        return NCCL()
    if backend == "fake":
        from varcomm.transport.simulated import Simulated

        return Simulated()
    engine: Engine
    if resolve(None).over_mpi:
        from varcomm.transport.mpi import MPIEngine  # mpi4py is an optional package

        engine = MPIEngine()
    else:
        from varcomm.transport.gloo import Gloo

        engine = Gloo()
    if device.type == "cpu":
        return engine
    from varcomm.transport.pinned import Pinned

    return Pinned(engine)


# Functions that record the name and the move of each call. Backward runs in threads of its own, so
# this is not thread-local.
recorders: list[Callable[[str, Move], object]] = []


@contextmanager
def recording(record: Callable[[str, Move], object]) -> Iterator[None]:
    """Pass the name and the move of each call to `record`."""
    recorders.append(record)
    try:
        yield
    finally:
        recorders.remove(record)


_NOTHING: AbstractContextManager[object] = nullcontext()


def span(name: str) -> AbstractContextManager[object]:
    """Return a context that torch's profiler shows as ``varcomm::name`` inside a trace."""
    return torch.profiler.record_function(f"varcomm::{name}") if recorders else _NOTHING
