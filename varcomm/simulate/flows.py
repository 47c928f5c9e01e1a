"""The transfers of a step on all ranks, from those of some."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from varcomm.errors import DisagreementError
from varcomm.simulate.counts import Flows
from varcomm.simulate.machine import Machine
from varcomm.simulate.parts import Parts
from varcomm.simulate.work import Work
from varcomm.transport.fake import Transfer

__all__ = ["Alike", "Halo", "Lanes", "recognised"]


@dataclass(frozen=True)
class Halo:
    """An exchange of halos, or its adjoint: bytes in proportion to rows.

    Attributes
    ----------
    name : str
        The operation.
    edge_type : tuple of str or None
        Whose halo.
    width : int
        Bytes a row.
    back : bool
        Whether rows go back to their owners.
    """

    name: str
    edge_type: Any
    width: int
    back: bool

    def numbers(self, lanes: Lanes) -> tuple[torch.Tensor, torch.Tensor]:
        """Return messages and bytes that each rank sends, float64, (P,)."""
        way = "received" if self.back else "sent"
        rows = getattr(lanes, f"rows_{way}").sum(dim=0)
        return getattr(lanes, f"messages_{way}").sum(dim=0), rows * self.width

    def seconds(self, lanes: Lanes, machine: Machine) -> torch.Tensor:
        """Return the seconds on each rank, (P,)."""
        messages = torch.maximum(lanes.messages_sent, lanes.messages_received)
        nbytes = torch.maximum(lanes.rows_sent, lanes.rows_received) * self.width
        return machine.exchange((messages[0], nbytes[0]), (messages[1], nbytes[1]))


@dataclass(frozen=True)
class Alike:
    """A transfer that is the same on all ranks, to a few bytes, as a sum over all of them."""

    name: str
    transfer: Transfer


@dataclass(frozen=True)
class Lanes:
    """What each rank sends and receives in an exchange of one halo, within its node and beyond.

    Attributes
    ----------
    messages_sent, messages_received, rows_sent, rows_received : torch.Tensor
        float64, shape (2, P): within the node, and to other nodes.
    """

    messages_sent: torch.Tensor
    messages_received: torch.Tensor
    rows_sent: torch.Tensor
    rows_received: torch.Tensor

    @classmethod
    def of(cls, flows: Flows, size: int, ranks_per_node: int) -> Lanes:
        """Sort the messages of a halo by where they go."""
        sender, receiver, rows = flows.sender, flows.receiver, flows.rows.double()
        lane = (sender // ranks_per_node != receiver // ranks_per_node).long()

        def summed(rank: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return torch.bincount(lane * size + rank, weights, minlength=2 * size).view(2, size)

        ones = torch.ones_like(rows)
        return cls(
            summed(sender, ones),
            summed(receiver, ones),
            summed(sender, rows),
            summed(receiver, rows),
        )


def recognised(parts: Parts, works: Mapping[int, Work]) -> tuple[Halo | Alike, ...]:
    """Return what the transfers of some ranks of a partition are on all.

    Raises
    ------
    DisagreementError
        If ranks make other calls than others do.
    """
    names = {rank: [name for name, _ in work.transfers] for rank, work in works.items()}
    first = next(iter(names))
    for rank, named in names.items():
        if named != names[first]:
            raise DisagreementError(
                f"simulate.step: rank {rank} makes the calls {named}, and rank {first} "
                f"{names[first]}. All ranks must make the same ones, in the same order."
            )
    return tuple(
        _one(parts, name, {rank: work.transfers[place][1] for rank, work in works.items()})
        for place, name in enumerate(names[first])
    )


def _one(parts: Parts, name: str, transfers: Mapping[int, Transfer]) -> Halo | Alike:
    most = max(transfers, key=lambda rank: sum(transfers[rank].send) + sum(transfers[rank].recv))
    transfer = transfers[most]
    if transfer.schedule == "neighbours" and len(transfer.ranks) == parts.size:
        for edge_type, needs in parts.needs.items():
            _, asked = needs.asked_of(most)
            got = needs.asked_by(most)
            for back, (send, recv) in enumerate(((asked, got), (got, asked))):
                if (width := _width(transfer, send, recv)) is not None:
                    return Halo(name, edge_type, width, bool(back))
    return Alike(name, transfer)


def _width(transfer: Transfer, send: tuple[int, ...], recv: tuple[int, ...]) -> int | None:
    """Return the bytes a row, if the bytes are those of these rows."""
    rows = sum(send) + sum(recv)
    if rows == 0:
        return 0 if not any(transfer.send) and not any(transfer.recv) else None
    width = (sum(transfer.send) + sum(transfer.recv)) // rows
    fits = all(
        nbytes == width * count
        for given, counts in ((transfer.send, send), (transfer.recv, recv))
        for nbytes, count in zip(given, counts, strict=True)
    )
    return width if fits else None
