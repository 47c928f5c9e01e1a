"""The operator of a plan, from own rows to received rows, and its adjoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import torch

from varcomm.ops import wire
from varcomm.ops.operator import Operator
from varcomm.plan.row_sum import RowSum
from varcomm.transport.engine import Pending
from varcomm.transport.group import Group

__all__ = ["Exchange", "ExchangeAdjoint", "Routes"]


@dataclass(frozen=True, eq=False)
class Routes:
    """Who sends which rows to whom, as :class:`~varcomm.ExchangePlan` documents it."""

    group: Group = field(repr=False)
    send_index: torch.Tensor = field(repr=False)
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    num_rows: int

    @cached_property
    def row_sum(self) -> RowSum:
        """How the adjoint sums, planned when it is first needed."""
        return RowSum(self.send_index, self.num_rows)


@dataclass(frozen=True)
class _Planned(Operator):
    """What the pair shares."""

    plan: Routes
    dim: int
    use_fp32: bool

    @property
    def group(self) -> Group:  # type: ignore[override]
        return self.plan.group

    def describe(self, x: torch.Tensor) -> dict[str, Any]:
        return {
            "dim": self.dim,
            "send": list(self.plan.send_counts),
            "recv": list(self.plan.recv_counts),
            "shape of a row": wire.rest(x.shape, self.dim),
            "use_fp32": self.use_fp32,
        }


@dataclass(frozen=True)
class Exchange(_Planned):
    """From own rows to received rows."""

    name = "exchange"

    def start(self, x: torch.Tensor) -> Pending:
        """Pick the rows to send, which is the one copy; what comes is the result."""
        front = x.movedim(self.dim, 0) if self.dim else x
        row = front.shape[1:]
        size = prod(row)
        picked = wire.flat(wire.taken(front, self.plan.send_index))
        send = [rows * size for rows in self.plan.send_counts]
        recv = [rows * size for rows in self.plan.recv_counts]
        works, values = wire.exchange(self.name, self.group, picked, send, recv, "neighbours")
        result = values.view(sum(self.plan.recv_counts), *row)
        into = wire.memory_format(x)
        return Pending(works, lambda: wire.back(result, self.dim, into))

    @property
    def adjoint(self) -> ExchangeAdjoint:
        return ExchangeAdjoint(self.plan, self.dim, self.use_fp32)


@dataclass(frozen=True)
class ExchangeAdjoint(_Planned):
    """From received rows to own rows: each goes back and is added to the row it is a copy of."""

    name = "exchange_adjoint"

    def start(self, y: torch.Tensor) -> Pending:
        front = y.movedim(self.dim, 0) if self.dim else y
        row = front.shape[1:]
        size = prod(row)
        send = [rows * size for rows in self.plan.recv_counts]
        recv = [rows * size for rows in self.plan.send_counts]
        works, values = wire.exchange(
            self.name, self.group, wire.flat(front), send, recv, "neighbours"
        )
        copies, into = values.view(len(self.plan.send_index), *row), wire.memory_format(y)

        def finish() -> torch.Tensor:
            return wire.back(self.plan.row_sum(copies, self.use_fp32), self.dim, into)

        return Pending(works, finish)

    @property
    def adjoint(self) -> Exchange:
        return Exchange(self.plan, self.dim, self.use_fp32)
