"""Several tensors in one exchange: the rows to send are packed side by side, once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from varcomm._torch_private import transforms_active
from varcomm.ops import packing
from varcomm.ops.graph_operator import in_graph
from varcomm.ops.handle import collective
from varcomm.plan.routes import Exchange, ExchangeAdjoint, Routes
from varcomm.transport.engine import Pending


def exchange_packed(
    plan: Any, tensors: Sequence[Tensor], dims: Sequence[int], use_fp32: bool
) -> tuple[Tensor, ...]:
    """Return the received rows of each tensor; those of one dtype travel in one exchange."""
    received: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(x.dtype for x in tensors):
        places = [at for at, x in enumerate(tensors) if x.dtype == dtype]
        columns = [_columns(tensors[at], dims[at]) for at in places]
        rows = _received(plan, columns, use_fp32)
        start = 0
        for at, part in zip(places, columns, strict=True):
            shape = packing.rest(tensors[at].shape, dims[at])
            own = rows.narrow(1, start, part.shape[1]).reshape(rows.shape[0], *shape)
            received[at] = packing.back(own, dims[at])
            start += part.shape[1]
    return tuple([received[at] for at in range(len(tensors))])


def _columns(x: Tensor, dim: int) -> Tensor:
    """Return `x` with its rows along `dim` as a matrix."""
    front = x.movedim(dim, 0) if dim else x
    return front.reshape(front.shape[0], prod(front.shape[1:]))


def _received(plan: Any, columns: Sequence[Tensor], use_fp32: bool) -> Tensor:
    if len(columns) == 1:
        return plan(columns[0], use_fp32=use_fp32)  # type: ignore[no-any-return]
    if in_graph(columns[0]) or transforms_active():
        # compilers write the columns side by side as they compute them
        return plan(torch.cat(list(columns), dim=1), use_fp32=use_fp32)  # type: ignore[no-any-return]
    picked: Tensor = _Pick.apply(plan.routes, use_fp32, *columns)  # type: ignore[no-untyped-call]
    return collective(_picked, plan, picked, (), (use_fp32,), False)


def _picked(plan: Any, _: Tensor, __: object, use_fp32: bool, *___: object) -> _Picked:
    return _Picked(plan.routes, 0, use_fp32)


class _Pick(torch.autograd.Function):
    """Pick the rows to send from each matrix, side by side."""

    @staticmethod
    def forward(ctx: Any, plan: Routes, use_fp32: bool, *columns: Tensor) -> Tensor:
        ctx.plan, ctx.use_fp32, ctx.widths = plan, use_fp32, [x.shape[1] for x in columns]
        return torch.cat([packing.taken(x, plan.send_index) for x in columns], dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        own = _Return.apply(ctx.plan, ctx.use_fp32, ctx.widths, gradient)  # type: ignore[no-untyped-call]
        return None, None, *own

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, *tangents: Tensor | None) -> Tensor:
        known = next(tangent for tangent in tangents if tangent is not None)
        pairs = zip(tangents, ctx.widths, strict=True)
        zeros = (known.new_zeros(len(known), width) if t is None else t for t, width in pairs)
        return _Pick.apply(ctx.plan, ctx.use_fp32, *zeros)  # type: ignore[no-any-return, no-untyped-call]


class _Return(torch.autograd.Function):
    """Sum the copies of each row, and part the columns: the transpose of :class:`_Pick`."""

    @staticmethod
    def forward(
        ctx: Any, plan: Routes, use_fp32: bool, widths: Sequence[int], copies: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.plan, ctx.use_fp32, ctx.widths = plan, use_fp32, widths
        own: tuple[Tensor, ...] = plan.row_sum(copies, use_fp32).split(list(widths), dim=1)
        return own

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        picked = _Pick.apply(ctx.plan, ctx.use_fp32, *gradients)  # type: ignore[no-untyped-call]
        return None, None, None, picked

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, ___: None, tangent: Tensor) -> tuple[Tensor, ...]:
        return _Return.apply(ctx.plan, ctx.use_fp32, ctx.widths, tangent)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True)
class _Picked(Exchange):
    """:class:`Exchange` of rows that have been picked."""

    @property
    def adjoint(self) -> _PickedAdjoint:
        return _PickedAdjoint(self.routes, self.dim, self.use_fp32)

    def prepared(self, x: Tensor) -> Callable[[Tensor], Pending]:
        counts = self.routes.elements(x.shape[1])
        return _between(self, x, self.routes.num_received, *counts)


@dataclass(frozen=True)
class _PickedAdjoint(ExchangeAdjoint):
    """:class:`ExchangeAdjoint` before the sum."""

    @property
    def adjoint(self) -> _Picked:
        return _Picked(self.routes, self.dim, self.use_fp32)

    def prepared(self, x: Tensor) -> Callable[[Tensor], Pending]:
        routes = self.routes
        return _between(self, x, len(routes.send_index), *routes.elements(x.shape[1])[::-1])


def _between(
    operator: Exchange | ExchangeAdjoint, x: Tensor, rows: int, send: list[int], recv: list[int]
) -> Callable[[Tensor], Pending]:
    """Return the function that moves matrices like `x` and receives `rows` rows."""
    group, shape = operator.group, (rows, x.shape[1])
    begin = packing.exchanger(operator.name, group, x, send, recv, "neighbours")

    def start(x: Tensor) -> Pending:
        received = x.new_empty(shape)
        works = begin(received, packing.plain(x))
        return Pending(works, lambda: received)

    return start
