"""From the distinct rows that ranks bring to a replicated result that repeats them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from varcomm.ops import packing
from varcomm.ops.library import torch_operator
from varcomm.ops.operator import Operator
from varcomm.tensor_parallel.embedding.lookup import Lookup
from varcomm.transport.engine import Pending
from varcomm.transport.group import Group

__all__ = ["OwnRows", "RowsOfAll"]


@dataclass(frozen=True, eq=False)
class _Repeated(Operator):
    """What the pair shares: how many rows each rank brings, and which of them stands where."""

    group: Group
    counts: tuple[int, ...]
    places: torch.Tensor

    def describe(self, x: torch.Tensor) -> dict[str, Any]:
        rows = {"rows that ranks bring": list(self.counts), "rows": len(self.places)}
        return {**rows, "shape of a row": packing.rest(x.shape, 0)}


@torch_operator
class RowsOfAll(_Repeated):
    """Gather each row once, then repeat it wherever it stands."""

    name = "rows_of_all"

    def start(self, x: torch.Tensor) -> Pending:
        """Send own rows to all as they are; the one copy repeats them on arrival."""
        row = x.shape[1:]
        counts = [rows * prod(row) for rows in self.counts]
        works, values = packing.all_gather(self.name, self.group, packing.flat(x), counts)
        distinct = values.view(sum(self.counts), *row)
        return Pending(works, lambda: distinct.index_select(0, self.places))

    def result(self, x: torch.Tensor) -> torch.Tensor:
        """Return as many rows as there are places."""
        return x.new_empty(self.places.shape[0], *x.shape[1:])

    @property
    def adjoint(self) -> OwnRows:
        """The sum of what was repeated."""
        return OwnRows(self.group, self.counts, self.places)


@torch_operator
class OwnRows(_Repeated):
    """Sum what belongs to own rows; no communication, since a replicated gradient is whole."""

    name = "own_rows"

    def start(self, x: torch.Tensor) -> Pending:
        """Sum the places of own rows only; other ranks sum the others."""
        mine, first = self.counts[self.group.rank], sum(self.counts[: self.group.rank])
        own = (self.places >= first) & (self.places < first + mine)
        positions = torch.nonzero(own).view(-1)
        lookup = Lookup(self.places[positions] - first, positions, mine, len(self.places))
        return Pending([], lambda: lookup.adjoint(x))

    def result(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows."""
        return x.new_empty(self.counts[self.group.rank], *x.shape[1:])

    @property
    def adjoint(self) -> RowsOfAll:
        """The gathering of rows."""
        return RowsOfAll(self.group, self.counts, self.places)
