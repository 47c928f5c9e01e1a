"""Engines, which move bytes of uneven length between ranks: their interface.

An engine has no notion of rows, dtypes or gradients. All its tensors are contiguous; all counts
are bytes per rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from itertools import accumulate
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from varcomm.transport.group import Group

NO_LIMIT = timedelta(0)  # the timeout of the group holds


# Communication in flight. ``wait(timeout)`` of each returns when it is done on this rank (on a GPU,
# lets the current stream wait for it), and raises RuntimeError after its timeout or the group's;
# ``is_completed()`` does not wait, and may return False if that is unknown.
Works: TypeAlias = Sequence[Any]
Counts: TypeAlias = Sequence[int]
Spans: TypeAlias = list[tuple[int, int, int]]  # ranks, and the first and the end of their bytes

# The messages of a call, as all ranks describe them: an all-gather; a broadcast; or an exchange
# between most pairs of ranks, between few (as the neighbours of a plan; or copies of one piece to
# each), or of one with all others.
Schedule: TypeAlias = Literal["all_gather", "broadcast", "all", "neighbours", "copies", "one"]


class Route(NamedTuple):
    """The messages of a call: ``send[r]`` bytes to rank r and ``recv[r]`` bytes from it.

    The received bytes lie sender by sender. Empty messages are not sent. An all-gather sends all of
    its data, which may be this rank's place among the received bytes, to every rank; copies go to
    ranks with a count. A broadcast overwrites its data; its root receives none. Otherwise the data
    are the bytes for rank 0, then those for rank 1, and so on. All counts are multiples of `width`,
    1 to 8 bytes, which divides that of an element.
    """

    schedule: Schedule
    group: Group
    recv: Counts
    send: Counts
    width: int = 1

    def nbytes(self) -> tuple[int, int | None]:
        """Return the bytes of the received and of the sent tensor, None for any."""
        received, sent = sum(self.recv), sum(self.send)
        if self.schedule == "broadcast":
            sent = received = max((*self.recv, *self.send))
        elif self.schedule in ("all_gather", "copies"):
            sent = max(self.send)
        return received, sent if sent or self.schedule != "copies" else None

    @property
    def root(self) -> int:
        """The root of a broadcast."""
        return next((rank for rank, count in enumerate(self.recv) if count), self.group.rank)


# Starts the messages of a route: ``start(out, data)`` receives into `out` and sends `data`, which
# must not change before the returned works are done. A broadcast gets one tensor for both.
Start: TypeAlias = Callable[[Tensor, Tensor], Works]


class EngineFailure(RuntimeError):
    """The error of an engine in a call."""


class Pending:
    """Communication in flight, and the function that returns its result after the works."""

    number: int | None = None  # of the call, if ranks compare calls
    failed: Callable[[EngineFailure], Exception] | None = None  # makes the error of the call
    earlier: Sequence[Pending] = ()  # calls that must begin all rounds before this one waits
    done = True  # all rounds have begun

    def __init__(self, works: Works, finish: Callable[[], Tensor]) -> None:
        self.works, self.finish = works, finish

    def is_done(self) -> bool:
        """Return whether :meth:`wait` need not wait, if the engine reports it."""
        return all(work.is_completed() for work in self.works)

    def complete(self) -> None:
        """Begin and await all further rounds; then :meth:`wait` only returns the result."""

    def wait(self) -> Tensor:
        """Wait until this rank's part is done, and return the result."""
        if self.earlier:
            for each in self.earlier:
                each.complete()
            self.earlier = ()
        try:
            if self.works:
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
    """Uneven collectives on bytes."""

    in_cuda_graphs: ClassVar[bool] = False  # a CUDA graph can repeat its messages
    short_by_levels: ClassVar[bool] = False  # many ranks gather short shards by levels

    @abstractmethod
    def prepare(self, route: Route) -> Start:
        """Return the function that starts the messages of calls with this route."""

    def leave(self, group: Group) -> None:  # noqa: B027, an engine may have no way to do it
        """End the waiting of other ranks for this one, after a failure."""


def broadcast_route(group: Group, count: int, src: int) -> Route:
    """Return the route that overwrites `count` bytes on every rank with the bytes of `src`."""
    at_root = group.rank == src
    recv = [0 if at_root or rank != src else count for rank in range(group.size)]
    return Route("broadcast", group, recv, [count * at_root] * group.size)


def spans(counts: Counts, start: int = 0) -> Spans:
    """Return the bytes of each rank that has any, from rank `start` on, cyclically."""
    ends = list(accumulate(counts))
    ranks = (*range(start, len(ends)), *range(start))
    return [(rank, ends[rank] - counts[rank], ends[rank]) for rank in ranks if counts[rank]]


def messages(route: Route) -> tuple[Spans, Spans, Spans]:
    """Return the bytes from and for other ranks, and two spans of those that this rank keeps."""
    schedule, group, recv, send, _ = route
    rank, arriving, leaving = group.rank, spans(recv, group.rank), spans(send, group.rank)
    if schedule in ("all_gather", "copies"):
        leaving = [(peer, 0, send[peer]) for peer, _, _ in leaving]
    own = [place for place in (*arriving[:1], *leaving[:1]) if place[0] == rank]
    return arriving[len(own) // 2 :], leaving[len(own) // 2 :], own


def as_bytes(values: Tensor) -> Tensor:
    """Return a flat view of contiguous values as bytes."""
    if values.dtype == torch.uint8 and values.dim() == 1:
        return values
    if values.numel() <= 1:  # contiguous at any stride, but seen as bytes only at stride 1
        values = values.as_strided((values.numel(),), (1,))
    return (values if values.dim() == 1 else values.view(-1)).view(torch.uint8)


Record: TypeAlias = Callable[[str, Route, torch.device], object]

# Functions that record the name, the route and the device of each call. Backward runs in threads of
# its own, so this is not thread-local.
recorders: list[Record] = []


@contextmanager
def recording(record: Record) -> Iterator[None]:
    """Pass the name, the route and the device of each call to `record`."""
    recorders.append(record)
    try:
        yield
    finally:
        recorders.remove(record)


_NOTHING: AbstractContextManager[object] = nullcontext()


def is_capturing() -> bool:
    """Return whether a CUDA graph captures the current stream."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def span(name: str) -> AbstractContextManager[object]:
    """Return a context that torch's profiler shows as ``varcomm::name`` inside a trace."""
    return torch.profiler.record_function(f"varcomm::{name}") if recorders else _NOTHING
