"""Ghosts: copies of other ranks' nodes within reach of the box of this rank's nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from varcomm.ops.all_to_all_v import all_to_all_v
from varcomm.ops.packing import counted_from, taken
from varcomm.plan.exchange_plan import ExchangePlan
from varcomm.transport.group import Group

_BINS = 256  # per period, in which the widest empty part of a rank's nodes is found

Bounds = tuple[list[float], list[float]]


@dataclass(frozen=True, eq=False)
class Frame:
    """Coordinates in which a ball of radius r reaches r along each axis, in any cell.

    Coordinate k is the distance to the plane of all cell vectors but k, so a shift by vector k
    changes coordinate k alone. It changes by ``period[k]``, infinite if the axis is not periodic.
    Without a cell, coordinates are positions. All is fp64 and without gradient.
    """

    normals: torch.Tensor
    period: torch.Tensor
    cell: torch.Tensor | None

    @classmethod
    def of(cls, cell: torch.Tensor | None, pbc: Sequence[bool], device: torch.device) -> Self:
        """Make the frame of a regular cell, (D, D) in fp64."""
        period = torch.full((len(pbc),), torch.inf, dtype=torch.float64, device=device)
        if cell is None:
            return cls(torch.eye(len(pbc), dtype=torch.float64, device=device), period, None)
        inverse = torch.linalg.inv(cell)
        height = 1 / inverse.norm(dim=0)
        periodic = torch.tensor(pbc, device=device)
        return cls(inverse * height, torch.where(periodic, height, period), cell)

    def coordinates(self, pos: torch.Tensor) -> torch.Tensor:
        """Return the coordinates of positions, (n, D)."""
        return pos if self.cell is None else pos @ self.normals

    def periodic(self) -> list[tuple[int, float]]:
        """Return the axes that are periodic, with their periods."""
        return [(k, h) for k, h in enumerate(self.period.tolist()) if h < torch.inf]

    def moved(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        """Return positions that are shifted by whole cell vectors."""
        return x if self.cell is None else x + shift.to(x.dtype) @ self.cell

    def home(self, coordinates: torch.Tensor) -> torch.Tensor:
        """Return shifts, int64 of shape (n, D), that bring nodes together.

        Along a periodic axis nodes move into the period that begins behind their widest gap, so
        that the box of nodes on both sides of a border stays small.
        """
        shift = torch.zeros_like(coordinates, dtype=torch.int64)
        for k, h in self.periodic() if len(coordinates) else ():
            parts = coordinates[:, k] / h
            place = (parts.remainder(1) * _BINS).long().clamp_(max=_BINS - 1)
            taken_bins = torch.bincount(place, minlength=_BINS).nonzero().view(-1)
            gaps = taken_bins.diff(append=taken_bins[:1] + _BINS)
            widest = int(gaps.argmax())
            first = 0.0
            if gaps[widest] > gaps[-1]:
                first = int(taken_bins[(widest + 1) % len(taken_bins)]) / _BINS
            shift[:, k] = -(parts - first).floor().long()
        return shift


@dataclass(frozen=True, eq=False)
class Boxes:
    """The boxes of all ranks' nodes, (P, D), and how far each rank's edges reach, (P,)."""

    frame: Frame
    low: torch.Tensor
    high: torch.Tensor
    reach: torch.Tensor

    @classmethod
    def of(cls, frame: Frame, bounds: Sequence[Bounds], reach: Sequence[float]) -> Self:
        """Make boxes from the bounds of each rank."""
        low, high, reaches = (
            torch.tensor(each, dtype=torch.float64, device=frame.period.device)
            for each in (*zip(*bounds, strict=True), reach)
        )
        return cls(frame, low, high, reaches[:, None])

    def within_reach(self, coordinates: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the nodes that have an image within the reach of a rank's box."""
        low, high = self.low[rank] - self.reach[rank], self.high[rank] + self.reach[rank]
        behind = torch.remainder(coordinates - low, self.frame.period)
        return (behind <= high - low).all(1).nonzero().view(-1)

    def neighbours(self, rank: int) -> tuple[list[int], list[int]]:
        """Return flags per rank: whether it may need ghosts of `rank`, and may have such for it."""
        box = self.low[rank], self.high[rank]
        wide = self.low - self.reach, self.high + self.reach
        flags = (
            self._meet(*box, *wide),
            self._meet(self.low, self.high, wide[0][rank], wide[1][rank]),
        )
        for each in flags:
            each[rank] = False
        return flags[0].long().tolist(), flags[1].long().tolist()

    def _meet(self, *bounds: torch.Tensor) -> torch.Tensor:
        """Return whether boxes have a point in common; an empty box, with NaN, has none."""
        low, high, other_low, other_high = bounds
        period = self.frame.period
        into = torch.remainder(low - other_low, period) <= other_high - other_low
        over = torch.remainder(other_low - low, period) <= high - low
        return (into | over).all(1)

    def images(self, coordinates: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all images within reach of a rank's box: their rows, and shifts (m, D)."""
        rows = torch.arange(len(coordinates), device=coordinates.device)
        shift = coordinates.new_zeros(len(rows), coordinates.shape[1], dtype=torch.int64)
        for k, h in self.frame.periodic():
            low, high = self.low[rank, k] - self.reach[rank], self.high[rank, k] + self.reach[rank]
            here = coordinates[rows, k]
            first = ((low - here) / h).ceil().long()
            count = (((high - here) / h).floor().long() - first + 1).clamp_(min=0)
            rows, shift = rows.repeat_interleave(count), shift.repeat_interleave(count, dim=0)
            shift[:, k] = counted_from(first, count)
        return rows, shift


@dataclass(frozen=True, eq=False)
class Ghosts:
    """Nodes within reach of other ranks' boxes, sent and received, before edges are known.

    `sent` are own rows by receiver, `send` and `recv` rows per rank; `pos` and `ids` are of the
    received nodes, sender by sender.
    """

    group: Group
    sent: torch.Tensor
    send: list[int]
    recv: list[int]
    pos: torch.Tensor
    ids: torch.Tensor

    @classmethod
    def fetched(
        cls,
        boxes: Boxes,
        coordinates: torch.Tensor,
        pos: torch.Tensor,
        ids: torch.Tensor,
        group: Group,
    ) -> Self:
        """Exchange nodes; collective. Only ranks whose boxes are within reach have messages."""
        to, source = boxes.neighbours(group.rank)
        rows = [boxes.within_reach(coordinates, rank) for rank, needs in enumerate(to) if needs]
        counts = torch.tensor([len(each) for each in rows], dtype=torch.int64, device=pos.device)
        pg = group.process_group
        counted = all_to_all_v(counts, to, source, group=pg)
        send, recv = _per_rank(counts, to), _per_rank(counted, source)
        sent = torch.cat([ids.new_empty(0), *rows])
        both = taken(pos.detach().contiguous(), sent), ids[sent].unsqueeze(1)
        message = torch.cat([each.view(torch.uint8) for each in both], dim=1)
        received = all_to_all_v(message, send, recv, group=pg)
        width = pos.shape[1] * pos.element_size()
        # copies, since memory of another dtype must begin at a multiple of its size
        found, names = (
            each.clone(memory_format=torch.contiguous_format)
            for each in received.tensor_split([width], dim=1)
        )
        return cls(group, sent, send, recv, found.view(pos.dtype), names.view(torch.int64).view(-1))

    def plan(self, used: torch.Tensor, rows: int, identity: int) -> ExchangePlan:
        """Return the plan that fetches the used ones of the received nodes; collective.

        `used` is a mask of the received nodes, `rows` the number of own nodes.
        """
        pg = self.group.process_group
        asked = all_to_all_v(used, self.recv, self.send, group=pg)
        send, recv = _counts(asked, self.send), _counts(used, self.recv)
        return ExchangePlan(self.group, self.sent[asked], send, recv, rows, identity)


def _per_rank(counts: torch.Tensor, has: Sequence[int]) -> list[int]:
    found = iter(counts.tolist())
    return [next(found) if each else 0 for each in has]


def _counts(mask: torch.Tensor, rows: Sequence[int]) -> tuple[int, ...]:
    ends = torch.tensor([0, *rows], device=mask.device).cumsum(0)
    sums = torch.cat([ends[:1], mask.cumsum(0)])[ends]
    return tuple(sums.diff().tolist())
