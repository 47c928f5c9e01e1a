"""The data of a plan, and its operator: from own rows to received rows, and the adjoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, ClassVar, Self

import torch

from varcomm.ops import packing
from varcomm.ops.checks import checking
from varcomm.ops.graph_operator import torch_operator
from varcomm.ops.rule import Operator
from varcomm.plan.checks import checked_range
from varcomm.plan.row_sum import Bags, RowSum
from varcomm.transport.engine import Pending
from varcomm.transport.group import Group, OfGroup, named


@dataclass(frozen=True, eq=False)
class Routes(OfGroup):
    """Which rows go to which rank, as data that a recorded graph takes as arguments.

    They are tensors, so that compiled code serves other plans too.
    """

    group: Group
    send_index: torch.Tensor  # own rows to send, those for rank 0 first
    table: torch.Tensor  # on the CPU: rows for each rank, rows from each rank, the plan's identity
    num_received: int
    num_rows: int
    bags: Bags | None = None  # of the sum in the adjoint, if they are made
    in_range: bool = True  # whether the index is known to be in range

    @classmethod
    def of(
        cls,
        group: Group,
        send_index: torch.Tensor,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        num_rows: int,
        identity: int = 0,
        bags: Bags | None = None,
    ) -> Self:
        """Make the routes of counts per rank."""
        table = torch.tensor([*send_counts, *recv_counts, identity], device="cpu")
        return cls(group, send_index, table, sum(recv_counts), num_rows, bags)

    @cached_property
    def numbers(self) -> list[int]:
        """The entries of the table."""
        return self.table.tolist()

    @property
    def send_counts(self) -> list[int]:
        """Rows for each rank."""
        return self.numbers[: self.group.size]

    @property
    def recv_counts(self) -> list[int]:
        """Rows from each rank."""
        return self.numbers[self.group.size : -1]

    @cached_property
    def row_sum(self) -> RowSum:
        """The sum of copies in the adjoint."""
        return RowSum(self.send_index, self.num_rows, self.bags)

    def elements(self, row: int) -> tuple[list[int], list[int]]:
        """Return the elements for, and from, each rank, of rows with `row` elements."""
        return [n * row for n in self.send_counts], [n * row for n in self.recv_counts]


@dataclass(frozen=True)
class _Planned(Operator):
    """The fields of the pair."""

    routes: Routes
    dim: int
    use_fp32: bool

    known_in_range: ClassVar[bool] = True
    holds_tensors: ClassVar[bool] = True
    schema = (
        "str group, int rank, Tensor index, Tensor table, Tensor? places, Tensor? bounds, "
        "SymInt num_received, SymInt num_rows, int dim, bool use_fp32"
    )

    @property
    def group(self) -> Group:  # type: ignore[override]
        return self.routes.group

    def arguments(self) -> tuple[Any, ...]:
        routes = self.routes
        places, bounds = routes.bags or (None, None)
        tensors = routes.send_index, routes.table, places, bounds
        rows = routes.num_received, routes.num_rows
        return self.group.name, self.group.rank, *tensors, *rows, self.dim, self.use_fp32

    @classmethod
    def from_arguments(cls, group: str, rank: int, *fields: Any) -> Self:
        index, table, places, bounds, num_received, num_rows, dim, use_fp32 = fields
        bags = None if places is None else (places, bounds)
        how = num_received, num_rows, bags, cls.known_in_range
        return cls(Routes(named(group, rank), index, table, *how), dim, use_fp32)

    @property
    def adjoint(self) -> _Planned:
        return _ADJOINTS[type(self)](self.routes, self.dim, self.use_fp32)

    def describe(self, x: torch.Tensor) -> dict[str, Any]:
        routes = self.routes
        return {
            "plan": f"{routes.numbers[-1]:08x}",  # others may have the same counts
            "dim": self.dim,
            "send": routes.send_counts,
            "recv": routes.recv_counts,
            "shape of a row": packing.rest(x.shape, self.dim),
            "use_fp32": self.use_fp32,
        }

    def _like(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        front = x.new_empty(rows, *packing.rest(x.shape, self.dim))
        return packing.back(front, self.dim)


@torch_operator
@dataclass(frozen=True)
class Exchange(_Planned):
    """From own rows to received rows."""

    name = "exchange"

    def prepared(self, x: torch.Tensor) -> Callable[[torch.Tensor], Pending]:
        """Pick the rows to send, which is the one copy; the received rows are the result."""
        routes, dim, row = self.routes, self.dim, packing.rest(x.shape, self.dim)
        index, shape = routes.send_index, (routes.num_received, *row)
        send, recv = routes.elements(prod(row))
        begin = packing.exchanger(self.name, routes.group, x, send, recv, "neighbours")

        def start(x: torch.Tensor) -> Pending:
            front = x.movedim(dim, 0) if dim else x
            received = x.new_empty(shape)
            works = begin(received, packing.plain(packing.taken(front, index)))
            return Pending(works, lambda: packing.back(received, dim))

        return start

    def result(self, x: torch.Tensor) -> torch.Tensor:
        return self._like(x, self.routes.num_received)


@torch_operator
@dataclass(frozen=True)
class ExchangeAdjoint(_Planned):
    """From received rows to own rows: each goes back and is added to the row it is a copy of."""

    name = "exchange_adjoint"

    def prepared(self, x: torch.Tensor) -> Callable[[torch.Tensor], Pending]:
        routes, dim, use_fp32 = self.routes, self.dim, self.use_fp32
        row = packing.rest(x.shape, dim)
        shape, (recv, send) = (len(routes.send_index), *row), routes.elements(prod(row))
        begin = packing.exchanger(self.name, routes.group, x, send, recv, "neighbours")

        def start(x: torch.Tensor) -> Pending:
            copies = x.new_empty(shape)
            works = begin(copies, packing.plain(x.movedim(dim, 0) if dim else x))
            return Pending(works, lambda: packing.back(routes.row_sum(copies, use_fp32), dim))

        return start

    def result(self, x: torch.Tensor) -> torch.Tensor:
        return self._like(x, self.routes.num_rows)


@torch_operator
class IndexedAllToAllV(Exchange):
    """:class:`Exchange` by routes for one call; in a graph their index has no values before."""

    name = "indexed_all_to_all_v"
    known_in_range = False

    def prepared(self, x: torch.Tensor) -> Callable[[torch.Tensor], Pending]:
        if not self.routes.in_range:
            with checking(self.name, self.group) as where:
                index, rows = self.routes.send_index, self.routes.num_rows
                checked_range(index, rows, "indices", "own rows", where)
        return super().prepared(x)


@torch_operator
class IndexedAllToAllVAdjoint(ExchangeAdjoint):
    """:class:`ExchangeAdjoint` by routes for one call."""

    name = "indexed_all_to_all_v_adjoint"


_PAIRS: list[tuple[type[_Planned], type[_Planned]]] = [
    (Exchange, ExchangeAdjoint),
    (IndexedAllToAllV, IndexedAllToAllVAdjoint),
]
_ADJOINTS = dict(_PAIRS) | {adjoint: kind for kind, adjoint in _PAIRS}
