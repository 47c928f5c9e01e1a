"""Graphs of a batch vector that a partitioned graph holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from varcomm.errors import ArgumentError
from varcomm.graph.index import How, Kind, Numbering, PartitionedIndex
from varcomm.graph.nn.batches import Batch, largest
from varcomm.graph.nn.extremes import extreme, product
from varcomm.transport.group import Group

__all__ = ["Graphs"]


@dataclass(eq=False)
class Graphs(Numbering):
    """The graphs that the nodes of all ranks belong to; see :class:`PartitionedIndex`."""

    group: Group
    #: the number of graphs, once known
    size: int | None = None

    #: rows that count, of which halo rows may follow; all, if None
    num_owned: int | None = None

    def selected_from(self, kind: Kind, x: torch.Tensor, dim: int, empty: bool) -> torch.Tensor:
        """Return the rows of all graphs, which every rank has."""
        return x

    def reduced(
        self, index: PartitionedIndex, how: How, src: torch.Tensor, size: int
    ) -> torch.Tensor:
        """Reduce the rows of all ranks' nodes, (n, *F) here, to the rows of their graphs."""
        if self.num_owned is not None and not index.whole:
            raise ArgumentError(
                "readouts of some nodes need halos of one hop: partition the graph with hops=1."
            )
        assert index.line is not None
        graphs = Batch(self, index.line[: self.num_owned], size)
        src = src[: self.num_owned]
        if how == "sum":
            return graphs.sum(src).to(src.dtype)
        if how == "prod":
            return product(src, graphs).to(src.dtype)
        return extreme(how, src, graphs)

    def count(self, kind: Kind, index: torch.Tensor, whole: bool) -> int:
        """Return the number of graphs: one more than the largest number on any rank."""
        if whole and self.size is not None:
            return self.size
        end = int(index.max()) + 1 if index.numel() else 0
        count = largest(end, self.group, index.device)
        if whole:
            self.size = count
        return count
