"""Rows of a table by their numbers, and the sum that is its adjoint; no communication."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from varcomm.plan.row_sum import RowSum

__all__ = ["Lookup", "looked_up"]


@dataclass(frozen=True, eq=False)
class Lookup:
    """Which rows of a table stand where in the result; a linear map.

    Attributes
    ----------
    index : torch.Tensor
        Rows of the table; int64, shape (n,).
    positions : torch.Tensor or None
        Where in the result each stands, no two at one place; the others are zeros. None is
        ``0...n-1``.
    table_rows, rows : int
        Of the table and of the result.
    constant : torch.Tensor or None
        Which of the n have no derivative; bool, shape (n,).
    """

    index: torch.Tensor
    positions: torch.Tensor | None
    table_rows: int
    rows: int
    constant: torch.Tensor | None = None

    @cached_property
    def slope(self) -> Lookup:
        """The derivative: the same without what is constant."""
        if self.constant is None:
            return self
        kept = torch.nonzero(~self.constant).view(-1)
        positions = kept if self.positions is None else self.positions[kept]
        return Lookup(self.index[kept], positions, self.table_rows, self.rows)

    @cached_property
    def row_sum(self) -> RowSum:
        """How the adjoint sums, planned when it is first needed."""
        return RowSum(self.index, self.table_rows)

    def __call__(self, table: torch.Tensor) -> torch.Tensor:
        """Pick rows: one copy, and none of the table."""
        picked = table.index_select(0, self.index)
        if self.positions is None:
            return picked
        result = table.new_zeros(self.rows, *table.shape[1:])
        return result.index_copy_(0, self.positions, picked)

    def adjoint(self, result: torch.Tensor) -> torch.Tensor:
        """Sum what belongs to one row of the table, the same at every run bit for bit."""
        copies = result if self.positions is None else result.index_select(0, self.positions)
        return self.row_sum(copies)


def looked_up(table: torch.Tensor, lookup: Lookup) -> torch.Tensor:
    """Apply a lookup, so that it can be differentiated any number of times, in both modes.

    torch's own adjoint of a selection adds with atomics on a GPU, in whatever order they come.
    """
    return _LookUp.apply(table, lookup)  # type: ignore[no-any-return, no-untyped-call]


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(table: torch.Tensor, lookup: Lookup) -> torch.Tensor:
        return lookup(table)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.lookup = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _SumUp.apply(gradient, ctx.lookup.slope), None  # type: ignore[no-untyped-call]

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _: None) -> torch.Tensor:
        return looked_up(tangent, ctx.lookup.slope)

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, table: torch.Tensor, lookup: Lookup
    ) -> tuple[torch.Tensor, int]:
        return looked_up(table.movedim(in_dims[0], -1), lookup), table.dim() - 1


class _SumUp(torch.autograd.Function):
    """The adjoint; it is given slopes only, which have nothing constant."""

    @staticmethod
    def forward(result: torch.Tensor, lookup: Lookup) -> torch.Tensor:
        return lookup.adjoint(result)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.lookup = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return looked_up(gradient, ctx.lookup), None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _: None) -> torch.Tensor:
        return _SumUp.apply(tangent, ctx.lookup)  # type: ignore[no-any-return, no-untyped-call]

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, result: torch.Tensor, lookup: Lookup
    ) -> tuple[torch.Tensor, int]:
        batch = result.movedim(in_dims[0], -1)
        return _SumUp.apply(batch, lookup), result.dim() - 1  # type: ignore[no-untyped-call]
