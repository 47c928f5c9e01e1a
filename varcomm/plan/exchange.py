"""The operator of a plan, from own rows to received rows, and its adjoint."""

from __future__ import annotations

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
from varcomm.transport.engine import Pending, Works
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
        """The sum of copies in the adjoint, planned when it is first needed."""
        return RowSum(self.send_index, self.num_rows)

    @cached_property
    def sent(self) -> tuple[torch.Tensor, RowSum]:
        """The own rows that are sent, ascending, and the sum of copies for these alone."""
        rows, places = self.send_index.unique(return_inverse=True)
        return rows, RowSum(places, len(rows))

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
        """Return how many rows this rank receives, and how many it owns."""
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

    def _front(self, x: torch.Tensor) -> torch.Tensor:
        return x.movedim(self.dim, 0) if self.dim else x

    def _like(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        front = x.new_empty(rows, *packing.rest(x.shape, self.dim))
        return packing.back(front, self.dim)


@torch_operator
@dataclass(frozen=True)
class Exchange(_Planned):
    """From own rows to received rows."""

    name = "exchange"

    def start(self, x: torch.Tensor) -> Pending:
        """Pick the rows to send, which is the one copy; the received rows are the result."""
        front = self._front(x)
        received = front.new_empty(self.plan.routes.num_received, *front.shape[1:])
        return Pending(self._send(front, received), lambda: packing.back(received, self.dim))

    def _send(self, front: torch.Tensor, received: torch.Tensor) -> Works:
        plan = self.plan.routes
        picked = packing.flat(packing.taken(front, plan.send_index))
        send, recv = plan.elements(prod(front.shape[1:]))
        return packing.exchange(
            self.name, plan.group, picked, send, recv, "neighbours", received.view(-1)
        )[0]

    def result(self, x: torch.Tensor) -> torch.Tensor:
        return self._like(x, self.plan.num_received)


@torch_operator
@dataclass(frozen=True)
class ExchangeAdjoint(_Planned):
    """From received rows to own rows: each goes back and is added to the row it is a copy of."""

    name = "exchange_adjoint"

    def start(self, x: torch.Tensor) -> Pending:
        row_sum, (works, copies) = self.plan.routes.row_sum, self._return(self._front(x))
        return Pending(works, lambda: packing.back(row_sum(copies, self.use_fp32), self.dim))

    def _return(self, front: torch.Tensor) -> tuple[Works, torch.Tensor]:
        plan, row = self.plan.routes, front.shape[1:]
        recv, send = plan.elements(prod(row))
        rows = packing.flat(front)
        works, values = packing.exchange(self.name, plan.group, rows, send, recv, "neighbours")
        return works, values.view(len(plan.send_index), *row)

    def result(self, x: torch.Tensor) -> torch.Tensor:
        return self._like(x, self.plan.num_rows)


@torch_operator
@dataclass(frozen=True)
class ExchangeAppended(Exchange):
    """From own rows to these and, behind them, the received rows."""

    name = "exchange_appended"

    def start(self, x: torch.Tensor) -> Pending:
        """Receive into the end of the result; the own rows are copied meanwhile."""
        plan, front = self.plan.routes, self._front(x)
        out = front.new_empty(plan.num_rows + plan.num_received, *front.shape[1:])
        works = self._send(front, out[plan.num_rows :])
        out[: plan.num_rows].copy_(front)
        return Pending(works, lambda: packing.back(out, self.dim))

    def result(self, x: torch.Tensor) -> torch.Tensor:
        received, own = self.plan.rows()
        return self._like(x, own + received)


@torch_operator
@dataclass(frozen=True)
class ExchangeAppendedAdjoint(ExchangeAdjoint):
    """Add to each own row the copies of it that are received rows elsewhere."""

    name = "exchange_appended_adjoint"

    def start(self, x: torch.Tensor) -> Pending:
        """Send the received rows back; only rows that were sent are written twice."""
        plan, front = self.plan.routes, self._front(x)
        works, copies = self._return(front[plan.num_rows :])
        out = front[: plan.num_rows].clone(memory_format=torch.contiguous_format)

        def finish() -> torch.Tensor:
            rows, row_sum = plan.sent
            return packing.back(out.index_add_(0, rows, row_sum(copies, self.use_fp32)), self.dim)

        return Pending(works, finish)


class _Recorded(Routes):
    """A plan for one call, recorded before its index has values."""

    @property
    def routes(self) -> Routes:
        """Itself; ArgumentError if the index is out of range."""
        with checking("indexed_all_to_all_v", self.group) as where:
            checked_range(self.send_index, self.num_rows, "indices", "own rows", where)
        return self


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


@torch_operator
class IndexedAllToAllVAdjoint(_Indexed, ExchangeAdjoint):
    """:class:`ExchangeAdjoint` by a plan for one call."""

    name = "indexed_all_to_all_v_adjoint"


_PAIRS: list[tuple[type[_Planned], type[_Planned]]] = [
    (Exchange, ExchangeAdjoint),
    (ExchangeAppended, ExchangeAppendedAdjoint),
    (IndexedAllToAllV, IndexedAllToAllVAdjoint),
]
_ADJOINTS = dict(_PAIRS) | {adjoint: kind for kind, adjoint in _PAIRS}
