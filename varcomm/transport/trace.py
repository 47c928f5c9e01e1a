"""Traces: counts of messages and bytes per call, as calls, sums and a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from varcomm.transport import engine
from varcomm.transport.group import Group


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
    >>> import varcomm
    >>> varcomm.Call("all_gather_v", sent_to={1: 8}, received_from={1: 16, 2: 4}).received
    20
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
    >>> import varcomm
    >>> varcomm.Trace([varcomm.Call("broadcast", {1: 8, 2: 8}, {})]).total
    Traffic(calls=1, messages_sent=2, messages_received=0, sent=16, received=0)
    """

    calls: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    sent: int = 0
    received: int = 0


@dataclass(eq=False)
class Trace(Sequence[Call]):
    """The calls of a :func:`trace`, in order; prints as a table by operation and by peer.

    Attributes
    ----------
    calls : list of Call
        The calls in the order in which they started; a Trace equals a list of the same calls.

    Examples
    --------
    >>> import varcomm
    >>> varcomm.Trace([varcomm.Call("broadcast", {1: 8}, {})]).by_peer()
    {1: Traffic(calls=1, messages_sent=1, messages_received=0, sent=8, received=0)}
    """

    calls: list[Call] = field(default_factory=list)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trace | list) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __getitem__(self, index: Any) -> Any:
        return self.calls[index]

    def __len__(self) -> int:
        return len(self.calls)

    @property
    def total(self) -> Traffic:
        """All calls together."""
        return self._sums(lambda call, peer: "total").get("total", Traffic())

    def by_operation(self) -> dict[str, Traffic]:
        """Return sums per operation, in the order of their first calls."""
        return self._sums(lambda call, peer: call.name)

    def by_peer(self) -> dict[int, Traffic]:
        """Return sums per peer, by its world rank."""
        sums = self._sums(lambda call, peer: peer)
        return {peer: sums[peer] for peer in sorted(sums.keys() - {None})}

    def _sums(self, key: Callable[[Call, int | None], Any]) -> dict[Any, Traffic]:
        """Return the sums over calls and messages of equal keys; a call itself has no peer."""
        sums: dict[Any, Traffic] = {}
        for call in self.calls:
            peers = {*call.sent_to, *call.received_from}
            for of_call in {key(call, peer) for peer in (None, *peers)}:
                sums.setdefault(of_call, Traffic()).calls += 1
            for peer, count in call.sent_to.items():
                sums[key(call, peer)].messages_sent += 1
                sums[key(call, peer)].sent += count
            for peer, count in call.received_from.items():
                sums[key(call, peer)].messages_received += 1
                sums[key(call, peer)].received += count
        return sums

    def __str__(self) -> str:
        """Return the table."""
        columns = ("calls", "sent", "bytes", "received", "bytes")
        peers = {f"rank {rank}": traffic for rank, traffic in self.by_peer().items()}
        rows: list[tuple[str, ...]] = []
        for word, sums in (
            ("operation", {**self.by_operation(), "total": self.total}),
            ("peer", peers),
        ):
            rows.append((word, *columns))
            for name, t in sums.items():
                numbers = t.calls, t.messages_sent, t.sent, t.messages_received, t.received
                rows.append((name, *(f"{number:,}" for number in numbers)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
            for row in rows
        ]
        lines.insert(-len(peers) - 1, "")
        return "\n".join(lines)


@contextmanager
def trace() -> Iterator[Trace]:
    """Count the messages and bytes of each operation, in forward and backward, on this rank.

    Set-up, :func:`varcomm.debug`, and the 1 KiB with which the root of `broadcast` and `scatter_v`
    describes its tensor are not counted. Inside, torch's profiler shows each operation as a range
    ``varcomm::name``.

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
    >>> print(varcomm.launch(fn, 2)[0])
    operation     calls  sent  bytes  received  bytes
    all_gather_v      1     1      4         1      8
    total             1     1      4         1      8
    <BLANKLINE>
    peer          calls  sent  bytes  received  bytes
    rank 1            1     1      4         1      8
    """
    calls = Trace()

    def record(name: str, group: Group, send: Sequence[int], recv: Sequence[int]) -> None:
        sent, received = (
            {group.ranks[r]: count for r, count in enumerate(counts) if count and r != group.rank}
            for counts in (send, recv)
        )
        calls.calls.append(Call(name, sent, received))

    engine.recorders.append(record)
    try:
        yield calls
    finally:
        engine.recorders.remove(record)
