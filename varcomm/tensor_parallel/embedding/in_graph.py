"""Lookups as one operator each, for graphs that are compiled.

How many rows travel depends on the values of ids, and a graph knows shapes only. So all of a lookup
is inside of an operator, from own rows of the table to rows of the result, which are as many as
ids; its adjoint as well. They do what is done outside of graphs, the checks of ids included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from varcomm.ops import packing
from varcomm.ops.digest import digest
from varcomm.ops.library import torch_operator
from varcomm.ops.operator import Operator
from varcomm.sizes import ShardSizes
from varcomm.tensor_parallel.embedding.checks import METHODS, checked_range
from varcomm.tensor_parallel.embedding.lookup import Lookup
from varcomm.tensor_parallel.embedding.methods import Table
from varcomm.transport.engine import Pending
from varcomm.transport.group import Group

__all__ = ["RowsOfIds", "RowsOfParts", "RowsOfTable", "as_padding"]

_NONE = -1


def as_padding(padding: int | None) -> int:
    """Return the id whose row has no derivative as an operator has it."""
    return _NONE if padding is None else padding


@dataclass(frozen=True, eq=False)
class _OfIds(Operator):
    """A lookup; `ids` are flat, int64, the same on all ranks, and have been checked for nothing.

    `sizes` are the rows of the table that each rank has, `padding` is the id whose row has no
    derivative or -1, and `method` one of METHODS by its number.
    """

    group: Group
    ids: torch.Tensor
    sizes: tuple[int, ...]
    padding: int
    method: int

    def _table(self, weight: torch.Tensor) -> Table:
        sizes = ShardSizes(self.sizes)
        checked_range(self.ids, sizes.total, f"vocab_parallel_embedding on {self.group}: ")
        return Table(weight, sizes, None if self.padding == _NONE else self.padding, self.group)

    def _zeros(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return as many rows of zeros as this rank has, without memory."""
        row = gradient.shape[1:]
        return gradient.new_zeros(()).expand(self.sizes[self.group.rank], *row)

    def _own(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(self.sizes[self.group.rank], *x.shape[1:])

    def describe(self, x: torch.Tensor) -> dict[str, Any]:
        call = {"ids": digest(self.ids), "sizes": list(self.sizes), "padding_idx": self.padding}
        return {**call, "method": METHODS[self.method], "shape of a row": packing.rest(x.shape, 0)}


@torch_operator
class RowsOfIds(_OfIds):
    """From own rows of the table to those of all ids, replicated."""

    name = "rows_of_ids"

    @torch.no_grad()
    def start(self, x: torch.Tensor) -> Pending:
        """Look up all, as soon as that is begun."""
        rows = self._table(x).replicated(self.ids, METHODS[self.method])
        return Pending([], lambda: rows)

    def result(self, x: torch.Tensor) -> torch.Tensor:
        """Return a row for each id."""
        return x.new_empty(self.ids.shape[0], *x.shape[1:])

    @property
    def adjoint(self) -> SumOfIds:
        """The sum of what was looked up."""
        return SumOfIds(self.group, self.ids, self.sizes, self.padding, self.method)


@torch_operator
class SumOfIds(_OfIds):
    """Sum what belongs to own rows; no communication, since a replicated gradient is whole."""

    name = "sum_of_ids"

    @torch.no_grad()
    def start(self, x: torch.Tensor) -> Pending:
        """Sum what is of own ids; other ranks sum the rest."""
        total = self._table(self._zeros(x)).of_own_ids(self.ids).slope.adjoint(x)
        return Pending([], lambda: total)

    def result(self, x: torch.Tensor) -> torch.Tensor:
        """Return a row for each of this rank's."""
        return self._own(x)

    @property
    def adjoint(self) -> RowsOfIds:
        """The lookup."""
        return RowsOfIds(self.group, self.ids, self.sizes, self.padding, self.method)


@dataclass(frozen=True, eq=False)
class _OfParts(_OfIds):
    """The same where each rank has a part of the ids, one after the other."""

    parts: tuple[int, ...]

    def describe(self, x: torch.Tensor) -> dict[str, Any]:
        return {**super().describe(x), "sequence_sizes": list(self.parts)}

    @property
    def _arguments(self) -> tuple[Any, ...]:
        return self.group, self.ids, self.sizes, self.padding, self.method, self.parts


@torch_operator
class RowsOfParts(_OfParts):
    """From own rows of the table to those of this rank's part of the ids."""

    name = "rows_of_parts"

    @torch.no_grad()
    def start(self, x: torch.Tensor) -> Pending:
        """Look up all, as soon as that is begun."""
        rows = self._table(x).of_part(self.ids, self.parts, METHODS[self.method])
        return Pending([], lambda: rows)

    def result(self, x: torch.Tensor) -> torch.Tensor:
        """Return a row for each id of this rank's part."""
        return x.new_empty(self.parts[self.group.rank], *x.shape[1:])

    @property
    def adjoint(self) -> SumOfParts:
        """The sum of what was looked up."""
        return SumOfParts(*self._arguments)


@torch_operator
class SumOfParts(_OfParts):
    """Bring gradients of rows to their owners, and sum there."""

    name = "sum_of_parts"

    @torch.no_grad()
    def start(self, x: torch.Tensor) -> Pending:
        """Send each row back once, or by the other method all to all."""
        table = self._table(self._zeros(x))
        total = table.adjoint_of_part(self.ids, self.parts, METHODS[self.method], x)
        return Pending([], lambda: total)

    def result(self, x: torch.Tensor) -> torch.Tensor:
        """Return a row for each of this rank's."""
        return self._own(x)

    @property
    def adjoint(self) -> RowsOfParts:
        """The lookup."""
        return RowsOfParts(*self._arguments)


@dataclass(frozen=True, eq=False)
class _OfTable(Operator):
    """A lookup in a table of which this rank has `rows` rows, and of each some columns."""

    group: Group
    ids: torch.Tensor
    rows: int
    padding: int

    def _lookup(self) -> Lookup:
        where = f"feature_parallel_embedding on {self.group}: "
        ids = checked_range(self.ids, self.rows, where)
        constant = None if self.padding == _NONE else ids == self.padding
        return Lookup(ids, None, self.rows, len(ids), constant)

    def describe(self, x: torch.Tensor) -> dict[str, Any]:
        return {"ids": digest(self.ids), "rows": self.rows, "padding_idx": self.padding}


@torch_operator
class RowsOfTable(_OfTable):
    """Pick rows; no communication."""

    name = "rows_of_table"

    @torch.no_grad()
    def start(self, x: torch.Tensor) -> Pending:
        """Pick them at once."""
        rows = self._lookup()(x)
        return Pending([], lambda: rows)

    def result(self, x: torch.Tensor) -> torch.Tensor:
        """Return a row for each id."""
        return x.new_empty(self.ids.shape[0], *x.shape[1:])

    @property
    def adjoint(self) -> SumOfTable:
        """The sum of what was picked."""
        return SumOfTable(self.group, self.ids, self.rows, self.padding)


@torch_operator
class SumOfTable(_OfTable):
    """Sum what was picked from one row; no communication."""

    name = "sum_of_table"

    @torch.no_grad()
    def start(self, x: torch.Tensor) -> Pending:
        """Sum at once."""
        total = self._lookup().slope.adjoint(x)
        return Pending([], lambda: total)

    def result(self, x: torch.Tensor) -> torch.Tensor:
        """Return a row for each of the table."""
        return x.new_empty(self.rows, *x.shape[1:])

    @property
    def adjoint(self) -> RowsOfTable:
        """The picking."""
        return RowsOfTable(self.group, self.ids, self.rows, self.padding)
