"""The transfers of a step on all ranks, from those of some."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from varcomm.errors import ArgumentError, DisagreementError
from varcomm.simulate.counts import Flows
from varcomm.simulate.machine import Machine
from varcomm.simulate.parts import Parts
from varcomm.simulate.work import Work
from varcomm.transport.simulated import Transfer

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
    ArgumentError
        If these ranks do not tell which halo a call exchanges.
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
    if transfer.schedule != "neighbours" or len(transfer.ranks) != parts.size:
        return Alike(name, transfer)
    halos = [halo for key in parts.needs for halo in _fitting(parts, key, name, transfers)]
    different = {_sent(parts, halo): halo for halo in reversed(halos)}
    if len(different) > 1:
        numbers = torch.stack([halo.numbers(_lanes(parts, halo))[1] for halo in halos])
        apart = torch.nonzero((numbers != numbers[0]).any(dim=0)).view(-1).tolist()
        raise ArgumentError(
            f"simulate: from ranks {sorted(transfers)} it cannot be told whose halo a call of "
            f"{name} exchanges, or which way. Run a rank that tells as well: {apart[:5]}."
        )
    if halos and halos[0].width == 0 and len(parts.flows[halos[0].edge_type].rows):
        has = int(parts.halo.argmax())
        raise ArgumentError(
            f"simulate: ranks {sorted(transfers)} exchange no rows in {name}, so that the bytes of "
            f"a row are not known. Run a rank that has a halo as well: {has}."
        )
    return halos[0] if halos else Alike(name, transfer)


def _fitting(
    parts: Parts, edge_type: Any, name: str, transfers: Mapping[int, Transfer]
) -> Iterator[Halo]:
    """Yield what the transfers are of a halo, if they are: rows that go out, or that come back."""
    needs = parts.needs[edge_type]
    ends = [(needs.asked_of(rank)[1], needs.asked_by(rank)) for rank in transfers]
    ways = {"exchange": [False], "exchange_adjoint": [True]}.get(name, [False, True])
    for back in ways:
        counts = [count for pair in ends for count in (reversed(pair) if back else pair)]
        given = [sizes for each in transfers.values() for sizes in (each.send, each.recv)]
        if (width := _width(given, counts)) is not None:
            yield Halo(name, edge_type, width, back)


def _width(given: Sequence[Sequence[int]], counts: Sequence[Sequence[int]]) -> int | None:
    """Return the bytes a row, if the bytes are those of these rows; 0 of no rows."""
    rows = sum(map(sum, counts))
    width = sum(map(sum, given)) // rows if rows else 0
    fits = all(
        nbytes == width * count
        for pair in zip(given, counts, strict=True)
        for nbytes, count in zip(*pair, strict=True)
    )
    return width if fits else None


def _lanes(parts: Parts, halo: Halo) -> Lanes:
    return Lanes.of(parts.flows[halo.edge_type], parts.size, 1)


def _sent(parts: Parts, halo: Halo) -> tuple[tuple[int, ...], ...]:
    """Return who sends how many bytes to whom, to tell halos apart."""
    flows = parts.flows[halo.edge_type]
    ends = (flows.receiver, flows.sender) if halo.back else (flows.sender, flows.receiver)
    pair = ends[0] * parts.size + ends[1]
    order = pair.argsort()
    return tuple(pair[order].tolist()), tuple((flows.rows[order] * halo.width).tolist())
