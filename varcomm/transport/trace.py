"""Traces: counts of messages and bytes per call, as calls, sums and a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from varcomm.transport.engine import Route, recording


@dataclass(frozen=True)
class Call:
    """Messages of one rank in one step of an operation.

    Attributes
    ----------
    name : str
        The operation. A step in backward has the name of the adjoint.
    sent_to : dict of int to int
        Sent bytes by world rank of the peer, in one message each. A collective of the engine may
        also forward bytes of other ranks.
    received_from : dict of int to int
        Received bytes by world rank of the peer, in one message each.

    See Also
    --------
    Trace, trace

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
    """Sums over calls on this rank.

    Attributes
    ----------
    calls : int
        Number of calls; for one peer, the number of calls with a message.
    messages_sent : int
        Sent messages, one per call and peer.
    messages_received : int
        Received messages, one per call and peer.
    sent : int
        Sent bytes.
    received : int
        Received bytes.

    See Also
    --------
    Trace, trace

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


class Trace(list[Call]):
    """The calls of a :func:`trace`, in the order in which they started.

    ``print`` shows a table by operation and by peer.

    Parameters
    ----------
    iterable : iterable of Call
        The calls of the list.

    See Also
    --------
    trace, Traffic, Call

    Examples
    --------
    >>> import varcomm
    >>> varcomm.Trace([varcomm.Call("broadcast", {1: 8}, {})]).by_peer()
    {1: Traffic(calls=1, messages_sent=1, messages_received=0, sent=8, received=0)}
    """

    @property
    def total(self) -> Traffic:
        """All calls together."""
        return _total(self)

    def by_operation(self) -> dict[str, Traffic]:
        """Return sums per operation, in the order of their first calls."""
        names = dict.fromkeys(call.name for call in self)
        return {name: _total([c for c in self if c.name == name]) for name in names}

    def by_peer(self) -> dict[int, Traffic]:
        """Return sums per peer, by its world rank."""
        of_peers: dict[int, list[Call]] = {}
        for call in self:
            for peer in {*call.sent_to, *call.received_from}:
                both = call.sent_to, call.received_from
                own = ({peer: counts[peer]} if peer in counts else {} for counts in both)
                of_peers.setdefault(peer, []).append(Call(call.name, *own))
        return {peer: _total(of_peers[peer]) for peer in sorted(of_peers)}

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


def _total(calls: Sequence[Call]) -> Traffic:
    return Traffic(
        len(calls),
        sum(len(call.sent_to) for call in calls),
        sum(len(call.received_from) for call in calls),
        sum(call.sent for call in calls),
        sum(call.received for call in calls),
    )


@contextmanager
def trace() -> Iterator[Trace]:
    """Count the messages and bytes of each operation, in forward and backward, on this rank.

    Messages of set-up, of :func:`varcomm.debug`, and the 1 KiB with which the root of `broadcast`
    and `scatter_v` describes its tensor are not counted. Inside the block, torch's profiler shows
    each operation as a range ``varcomm::name``.

    Yields
    ------
    Trace
        Filled while the ``with`` block runs.

    See Also
    --------
    Trace, debug

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

    def record(name: str, route: Route, device: torch.device) -> None:
        group = route.group
        sent, received = (
            {group.ranks[r]: count for r, count in enumerate(counts) if count and r != group.rank}
            for counts in (route.send, route.recv)
        )
        calls.append(Call(name, sent, received))

    with recording(record):
        yield calls
