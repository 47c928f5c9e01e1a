"""Counts of messages and bytes per call, and ranges in the profiler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import overload

import torch

from varcomm.transport.group import Group

__all__ = ["Call", "Trace", "Traffic", "note", "span", "trace"]


@dataclass(frozen=True)
class Call:
    """Messages of one rank in one step of an operation.

    Attributes
    ----------
    name : str
        The operation. A step in backward has the name of the adjoint.
    sent_to, received_from : dict of int to int
        Bytes per peer, by its world rank; one message each. A collective of the engine may forward
        further bytes on behalf of other ranks.

    Examples
    --------
    >>> import torch, varcomm
    >>> with varcomm.simulate.world(2, rank=0), varcomm.trace() as calls:
    ...     _ = varcomm.all_gather_v(torch.zeros(1, 2), [1, 2])
    >>> calls[0]
    Call(name='all_gather_v', sent_to={1: 8}, received_from={1: 16})
    >>> calls[0].sent, calls[0].received
    (8, 16)
    """

    name: str
    sent_to: dict[int, int]
    received_from: dict[int, int]

    @property
    def sent(self) -> int:
        """Bytes to all peers."""
        return sum(self.sent_to.values())

    @property
    def received(self) -> int:
        """Bytes from all peers."""
        return sum(self.received_from.values())


@dataclass
class Traffic:
    """Sums over calls, on this rank.

    Attributes
    ----------
    calls : int
        Calls; for one peer, the calls with a message.
    messages_sent, messages_received : int
        Messages, one per call and peer.
    sent, received : int
        Bytes.

    Examples
    --------
    >>> import torch, varcomm
    >>> with varcomm.simulate.world(3, rank=0), varcomm.trace() as calls:
    ...     _ = varcomm.all_gather_v(torch.zeros(1, 2), [1, 2, 0])
    >>> calls.total
    Traffic(calls=1, messages_sent=2, messages_received=1, sent=16, received=16)
    """

    calls: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    sent: int = 0
    received: int = 0

    def add(self, sent: Iterable[int], received: Iterable[int]) -> None:
        """Count a call by the bytes of its messages."""
        sent, received = list(sent), list(received)
        self.calls += 1
        self.messages_sent += len(sent)
        self.messages_received += len(received)
        self.sent += sum(sent)
        self.received += sum(received)


@dataclass(eq=False)
class Trace(Sequence[Call]):
    """The calls of a :func:`trace`, in order; prints as a table by operation and by peer.

    A Trace equals a list of the same calls.

    Attributes
    ----------
    calls : list of Call
        The calls in the order in which they started.

    Examples
    --------
    >>> import torch, varcomm
    >>> x = torch.zeros(1, 2, requires_grad=True)
    >>> with varcomm.simulate.world(2, rank=0), varcomm.trace() as calls:
    ...     varcomm.all_gather_v(x, [1, 2]).sum().backward()
    >>> [call.name for call in calls]
    ['all_gather_v', 'reduce_scatter_v']
    >>> calls.total.sent, calls.total.received
    (24, 24)
    """

    calls: list[Call] = field(default_factory=list)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trace | list) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    @overload
    def __getitem__(self, index: int) -> Call: ...
    @overload
    def __getitem__(self, index: slice) -> list[Call]: ...
    def __getitem__(self, index: int | slice) -> Call | list[Call]:
        return self.calls[index]

    def __len__(self) -> int:
        return len(self.calls)

    @property
    def total(self) -> Traffic:
        """All calls together."""
        total = Traffic()
        for call in self.calls:
            total.add(call.sent_to.values(), call.received_from.values())
        return total

    def by_operation(self) -> dict[str, Traffic]:
        """Return sums per operation, in the order of their first calls."""
        sums: dict[str, Traffic] = {}
        for call in self.calls:
            traffic = sums.setdefault(call.name, Traffic())
            traffic.add(call.sent_to.values(), call.received_from.values())
        return sums

    def by_peer(self) -> dict[int, Traffic]:
        """Return sums per peer, by its world rank."""
        sums: dict[int, Traffic] = {}
        for call in self.calls:
            for peer in sorted({*call.sent_to, *call.received_from}):
                sent, received = call.sent_to.get(peer), call.received_from.get(peer)
                sums.setdefault(peer, Traffic()).add(
                    [] if sent is None else [sent], [] if received is None else [received]
                )
        return dict(sorted(sums.items()))

    def __str__(self) -> str:
        """Return the table."""
        peers = {f"rank {rank}": traffic for rank, traffic in self.by_peer().items()}
        rows = [
            ("operation", *_COLUMNS),
            *_numbers({**self.by_operation(), "total": self.total}),
            ("peer", *_COLUMNS),
            *_numbers(peers),
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
            for row in rows
        ]
        lines.insert(len(rows) - 1 - len(peers), "")
        return "\n".join(lines)


_COLUMNS = ("calls", "sent", "bytes", "received", "bytes")


def _numbers(sums: dict[str, Traffic]) -> Iterator[tuple[str, ...]]:
    for name, t in sums.items():
        numbers = (t.calls, t.messages_sent, t.sent, t.messages_received, t.received)
        yield name, *(f"{number:,}" for number in numbers)


# Open traces. Backward runs in threads of its own, so this is not thread-local.
_open: list[Trace] = []


class _Nothing:
    """Context that does nothing, in half the time of ``contextlib.nullcontext``."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        pass


_NOTHING = _Nothing()


@contextmanager
def trace() -> Iterator[Trace]:
    """Count the messages and bytes of each operation, in forward and backward, on this rank.

    Messages by which ranks agree on calls are not counted: set-up, :func:`varcomm.debug`, and the
    1 KiB with which the root of `broadcast` and `scatter_v` describes its tensor. Inside, torch's
    profiler shows each operation as a range ``varcomm::name``.

    Yields
    ------
    Trace
        Filled while the ``with`` block runs.

    Examples
    --------
    >>> import torch, varcomm
    >>> def fn(rank):
    ...     with varcomm.trace() as t:
    ...         varcomm.all_gather_v(torch.zeros(rank + 1), [1, 2])
    ...     return t
    >>> t = varcomm.launch(fn, 2)[0]
    >>> t[0]
    Call(name='all_gather_v', sent_to={1: 4}, received_from={1: 8})
    >>> print(t)
    operation     calls  sent  bytes  received  bytes
    all_gather_v      1     1      4         1      8
    total             1     1      4         1      8
    <BLANKLINE>
    peer          calls  sent  bytes  received  bytes
    rank 1            1     1      4         1      8
    """
    calls = Trace()
    _open.append(calls)
    try:
        yield calls
    finally:
        # by identity: two empty traces are equal
        _open[:] = [other for other in _open if other is not calls]


def note(name: str, group: Group, send: Sequence[int], recv: Sequence[int]) -> None:
    """Record a call in all open traces, by its bytes per rank of the group."""
    if _open:
        call = Call(name, _by_peer(group, send), _by_peer(group, recv))
        for calls in _open:
            calls.calls.append(call)


def _by_peer(group: Group, counts: Sequence[int]) -> dict[int, int]:
    ranks = group.ranks
    return {ranks[peer]: count for peer, count in enumerate(counts) if count and peer != group.rank}


def span(name: str) -> AbstractContextManager[object]:
    """Return a context that torch's profiler shows as ``varcomm::name`` inside :func:`trace`."""
    return torch.profiler.record_function(f"varcomm::{name}") if _open else _NOTHING
