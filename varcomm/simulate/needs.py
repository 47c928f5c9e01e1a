"""Who needs which rows of whom, for all ranks at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch

from varcomm.simulate.counts import Flows

if TYPE_CHECKING:  # which needs PyTorch Geometric
    from varcomm.graph.building.assemble import Numbering

__all__ = ["Needs"]

# Edges at a time: what is computed of them then takes a few hundred MB, however many there are.
_EDGES = 1 << 22


@dataclass(frozen=True, eq=False)
class Needs:
    """The halos that the edges of one type ask for, of all ranks; on the CPU.

    Rows have global numbers here, those of rank 0 first. Each pair of a receiver and a row is there
    once, receiver by receiver, and rows ascend.

    Attributes
    ----------
    edges : torch.Tensor
        Edges into the nodes of each rank; int64, shape (P,).
    cut : torch.Tensor
        Those of them that come from another rank; int64, shape (P,).
    receiver, sender, row : torch.Tensor
        The rank that needs, the rank that owns, and the row; int64, shape (sum of halos,).
    starts : torch.Tensor
        The first row of each rank; int64, shape (P,).
    """

    edges: torch.Tensor
    cut: torch.Tensor
    receiver: torch.Tensor
    sender: torch.Tensor
    row: torch.Tensor
    starts: torch.Tensor

    @classmethod
    def of(cls, edge_index: torch.Tensor, sources: Numbering, targets: Numbering) -> Self:
        """Find them from all edges of the whole graph, int64 of shape (2, E)."""
        ranks, rows = len(sources.sizes), max(1, sources.sizes.total)
        owner, number = sources.owner.to(torch.int32), sources.number
        target_owner = owner if targets is sources else targets.owner.to(torch.int32)
        edges, cut = torch.zeros(2, ranks, dtype=torch.int64)
        found = [torch.zeros(0, dtype=torch.int64, device=edge_index.device)]
        for source, target in zip(*(ends.split(_EDGES) for ends in edge_index), strict=True):
            to = target_owner[target]
            edges += torch.bincount(to, minlength=ranks).cpu()
            crosses = torch.nonzero(owner[source] != to).view(-1)
            cut += torch.bincount(to[crosses], minlength=ranks).cpu()
            found.append(torch.unique(to[crosses].long() * rows + number[source[crosses]]))
        pairs = torch.unique(torch.cat(found)).cpu()
        receiver, row = pairs // rows, pairs % rows
        return cls(
            edges,
            cut,
            receiver,
            torch.as_tensor(sources.sizes.owner(row)),
            row,
            torch.tensor(sources.sizes.offsets[:ranks], dtype=torch.int64),
        )

    @property
    def flows(self) -> Flows:
        """How many rows go from whom to whom."""
        ranks = len(self.edges)
        pair, rows = torch.unique(self.sender * ranks + self.receiver, return_counts=True)
        return Flows(pair // ranks, pair % ranks, rows)

    def asked_of(self, rank: int) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Return the own rows that a rank sends, receiver by receiver, and how many to each."""
        asked = torch.nonzero(self.sender == rank).view(-1)
        counts = torch.bincount(self.receiver[asked], minlength=len(self.edges))
        return self.row[asked] - self.starts[rank], tuple(counts.tolist())

    def asked_by(self, rank: int) -> tuple[int, ...]:
        """Return how many rows a rank receives from each."""
        asks = torch.searchsorted(self.receiver, torch.tensor([rank, rank + 1]))
        first, last = asks.tolist()
        counts = torch.bincount(self.sender[first:last], minlength=len(self.edges))
        return tuple(counts.tolist())
