"""The operator of a plan, from own rows to received rows, and its adjoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from math import prod
from secrets import randbits
from typing import Any, Self
from weakref import WeakValueDictionary

import torch

from varcomm.errors import ArgumentError
from varcomm.ops import packing
from varcomm.ops.compilation import count_in, extent_of
from varcomm.ops.operator import Operator, checking, torch_operator
from varcomm.plan.checks import checked_range
from varcomm.plan.row_sum import RowSum
from varcomm.transport.engine import Pending
from varcomm.transport.group import Group, named


@dataclass(frozen=True, eq=False)
class Routes:
    """Which rows go to which rank, as :class:`~varcomm.ExchangePlan` documents it."""

    group: Group = field(repr=False)
    send_index: torch.Tensor = field(repr=False)
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    num_rows: int
    identity: int = field(default=0, repr=False)

    @cached_property
    def num_received(self) -> int:
        """Rows that this rank receives."""
        return sum(self.recv_counts)

    @cached_property
    def row_sum(self) -> RowSum:
        """The sum of copies in the adjoint."""
        return RowSum(self.send_index, self.num_rows)

    @cached_property
    def extent(self) -> torch.Tensor:
        """The numbers of received and own rows, for compiled code."""
        return extent_of(self.num_received, self.num_rows, device=self.send_index.device)

    @property
    def number(self) -> torch.Tensor:
        return numbered(self)

    @property
    def routes(self) -> Routes:
        return self

    def rows(self) -> tuple[int, int]:
        """Return the numbers of rows that this rank receives and owns."""
        if torch.compiler.is_compiling():
            return count_in(self.extent, 0), count_in(self.extent, 1)
        return self.num_received, self.num_rows

    def elements(self, row: int) -> tuple[list[int], list[int]]:
        """Return the elements for, and from, each rank, of rows with `row` elements."""
        kept: dict[int, tuple[list[int], list[int]]] = vars(self).setdefault("_elements", {})
        if row not in kept:
            send, recv = self.send_counts, self.recv_counts
            kept[row] = [rows * row for rows in send], [rows * row for rows in recv]
        return kept[row]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # copies of graphs communicate by it too


@dataclass(frozen=True, eq=False)
class Numbered:
    """The part of a plan that a graph holds, so that compiled code serves other plans too."""

    group: Group
    number: torch.Tensor
    num_received: int
    num_rows: int

    def rows(self) -> tuple[int, int]:
        return self.num_received, self.num_rows

    @property
    def routes(self) -> Routes:
        """The plan; ArgumentError if no graph or caller has kept it."""
        found = _plans.get(int(self.number))
        if found is None:
            raise ArgumentError(
                f"exchange on {self.group}: the plan of a traced or compiled graph exists no "
                "longer, or is of another process. Keep it as long as the graph."
            )
        return found


# Plans that are alive, by number; numbers of another process are others.
_plans: WeakValueDictionary[int, Routes] = WeakValueDictionary()
_numbers = count(randbits(62))


def numbered(routes: Routes) -> torch.Tensor:
    """Return a number for the plan: a tensor, which keeps the plan alive.

    torch.compile makes constants of ints.
    """
    place = next(_numbers)
    number, _plans[place] = torch.tensor(place), routes
    number.routes = routes  # type: ignore[attr-defined]
    return number


@dataclass(frozen=True)
class _Planned(Operator):
    """The fields of the pair."""

    plan: Any  # Routes, or Numbered
    dim: int
    use_fp32: bool

    schema = (
        "str group, int rank, Tensor plan, SymInt num_received, SymInt num_rows, int dim, "
        "bool use_fp32"
    )

    @property
    def group(self) -> Group:  # type: ignore[override]
        return self.plan.group  # type: ignore[no-any-return]

    def arguments(self) -> tuple[Any, ...]:
        known = self.plan.number, *self.plan.rows()
        return self.group.name, self.group.rank, *known, self.dim, self.use_fp32

    @classmethod
    def from_arguments(cls, group: str, rank: int, *fields: Any) -> Self:
        *known, dim, use_fp32 = fields
        return cls(Numbered(named(group, rank), *known), dim, use_fp32)

    @property
    def adjoint(self) -> _Planned:
        return _ADJOINTS[type(self)](self.plan, self.dim, self.use_fp32)

    def describe(self, x: torch.Tensor) -> dict[str, Any]:
        plan = self.plan.routes
        return {
            "plan": f"{plan.identity:08x}",  # others may have the same counts
            "dim": self.dim,
            "send": list(plan.send_counts),
            "recv": list(plan.recv_counts),
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
        plan, dim, row = self.plan.routes, self.dim, packing.rest(x.shape, self.dim)
        index, shape = plan.send_index, (plan.num_received, *row)
        send, recv = plan.elements(prod(row))
        begin = packing.exchanger(self.name, plan.group, x, send, recv, "neighbours")

        def start(x: torch.Tensor) -> Pending:
            front = x.movedim(dim, 0) if dim else x
            received = x.new_empty(shape)
            works = begin(received, packing.plain(packing.taken(front, index)))
            return Pending(works, lambda: packing.back(received, dim))

        return start

    def result(self, x: torch.Tensor) -> torch.Tensor:
        return self._like(x, self.plan.num_received)


@torch_operator
@dataclass(frozen=True)
class ExchangeAdjoint(_Planned):
    """From received rows to own rows: each goes back and is added to the row it is a copy of."""

    name = "exchange_adjoint"

    def prepared(self, x: torch.Tensor) -> Callable[[torch.Tensor], Pending]:
        plan, dim, use_fp32 = self.plan.routes, self.dim, self.use_fp32
        row = packing.rest(x.shape, dim)
        shape, (recv, send) = (len(plan.send_index), *row), plan.elements(prod(row))
        begin = packing.exchanger(self.name, plan.group, x, send, recv, "neighbours")

        def start(x: torch.Tensor) -> Pending:
            copies = x.new_empty(shape)
            works = begin(copies, packing.plain(x.movedim(dim, 0) if dim else x))
            return Pending(works, lambda: packing.back(plan.row_sum(copies, use_fp32), dim))

        return start

    def result(self, x: torch.Tensor) -> torch.Tensor:
        return self._like(x, self.plan.num_rows)


class _Recorded(Routes):
    """A plan for one call, recorded before its index has values."""

    def check(self) -> None:
        """Raise ArgumentError if the index is out of range."""
        with checking("indexed_all_to_all_v", self.group) as where:
            checked_range(self.send_index, self.num_rows, "indices", "own rows", where)


class _Indexed(_Planned):
    """The pair if a graph holds the index, because no plan has been made."""

    schema = (
        "str group, int rank, Tensor index, SymInt[] send_counts, SymInt[] recv_counts, "
        "SymInt num_rows, int dim, bool use_fp32"
    )

    def arguments(self) -> tuple[Any, ...]:
        plan = self.plan
        counts = list(plan.send_counts), list(plan.recv_counts)
        routes = plan.send_index, *counts, plan.num_rows
        return self.group.name, self.group.rank, *routes, self.dim, self.use_fp32

    @classmethod
    def from_arguments(cls, group: str, rank: int, *fields: Any) -> Self:
        index, send, recv, num_rows, dim, use_fp32 = fields
        plan = _Recorded(named(group, rank), index, tuple(send), tuple(recv), num_rows)
        return cls(plan, dim, use_fp32)


@torch_operator
class IndexedAllToAllV(_Indexed, Exchange):
    """:class:`Exchange` by a plan for one call."""

    name = "indexed_all_to_all_v"

    def prepared(self, x: torch.Tensor) -> Callable[[torch.Tensor], Pending]:
        if isinstance(self.plan, _Recorded):
            self.plan.check()
        return super().prepared(x)


@torch_operator
class IndexedAllToAllVAdjoint(_Indexed, ExchangeAdjoint):
    """:class:`ExchangeAdjoint` by a plan for one call."""

    name = "indexed_all_to_all_v_adjoint"


_PAIRS: list[tuple[type[_Planned], type[_Planned]]] = [
    (Exchange, ExchangeAdjoint),
    (IndexedAllToAllV, IndexedAllToAllVAdjoint),
]
_ADJOINTS = dict(_PAIRS) | {adjoint: kind for kind, adjoint in _PAIRS}
