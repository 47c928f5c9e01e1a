"""Edges of several types in one vector, as ``HGTConv`` makes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from varcomm.errors import ArgumentError
from varcomm.graph.index import Kind, Numbering, PartitionedIndex

__all__ = ["joined"]


@dataclass(frozen=True, eq=False)
class _JoinedEdges(Numbering):
    """Edges of several types; see :class:`PartitionedIndex`.

    The nodes of each type stand at an offset among owned rows; halo rows of all types follow, type
    by type. `parts` are the edges of each type with the offset of its sources.
    """

    parts: Sequence[tuple[Any, int]]
    sources_end: int
    targets_end: int

    @property
    def shards(self) -> Sequence[Any]:
        """The edges of each type."""
        return [edges for edges, _ in self.parts]

    def selected_from(self, kind: Kind, x: torch.Tensor, dim: int, empty: bool) -> torch.Tensor:
        """Return the rows of all types, for sources with the halos of all types."""
        if kind == "target":
            return x
        if x.shape[dim] != self.sources_end:
            raise ArgumentError(
                f"edges of several types select from {self.sources_end} owned nodes, but got "
                f"{x.shape[dim]} rows."
            )
        own = [(edges, x.narrow(dim, offset, edges.num_sources)) for edges, offset in self.parts]
        return torch.cat([x, *(edges.plan(rows, dim=dim) for edges, rows in own)], dim=dim)

    def targets(self, x: torch.Tensor, dim: int, src: torch.Tensor) -> torch.Tensor:
        """Return `x`, if it has a row for each owned node."""
        if x.shape[dim] < self.targets_end:
            raise ArgumentError(f"edges lead to {self.targets_end} nodes, but got {x.shape[dim]}.")
        return x


def joined(parts: Sequence[Any]) -> PartitionedIndex:
    """Join edges of several types, to whose sources and targets offsets were added."""
    rows = max(part.offsets[0] + part.of.num_sources for part in parts)
    ids, first = [], rows
    for part in parts:
        edges, offset = part.of, part.offsets[0]
        source, target = part.plain
        of_halo = source - offset >= edges.num_sources
        shift = first - offset - edges.num_sources
        ids.append(torch.stack([torch.where(of_halo, source + shift, source), target]))
        first += edges.num_halo
    end = max(part.offsets[1] + part.of.num_targets for part in parts)
    together = _JoinedEdges([(part.of, part.offsets[0]) for part in parts], rows, end)
    return PartitionedIndex.make(torch.cat(ids, dim=1), together, "edges")
