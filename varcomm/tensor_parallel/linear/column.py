"""The product of a column-parallel layer: ``y = before(x) @ weight.T + bias``.

`before` makes this rank's use of the input: it is replicated already, or gathered from the parts of
a sequence. In backward the gradients of all uses are summed while that of the weight is computed.
"""

from __future__ import annotations

from typing import Any

import torch

from varcomm.ops.all_gather_v import AllGatherV
from varcomm.ops.autograd import (
    apply_with_token,
    begin,
    in_forward_mode,
    is_recorded,
)
from varcomm.ops.batching import of_each
from varcomm.ops.replicated import ReplicatedUse
from varcomm.tensor_parallel.linear.batching import batched_rows, unbatched_rows
from varcomm.tensor_parallel.linear.main_grad import MainGrad, weight_gradient
from varcomm.tensor_parallel.linear.overlap import (
    multiplied,
    multiplied_while_gathered,
)

__all__ = ["column_product"]

Before = ReplicatedUse | AllGatherV


def column_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    before: Before,
    keep_gathered: bool,
    main_grad: MainGrad | None,
) -> torch.Tensor:
    """Return the product for `x` of shape (rows, in) and `weight` of (out, in), differentiable.

    `keep_gathered` saves what `before` has gathered, rather than gather it again in backward.
    `main_grad` is where the weight's gradient is added, in place of ``weight.grad``.
    """
    recorded = is_recorded(x, None)
    node = _Column if torch.compiler.is_compiling() else _ColumnOfAnyOrder
    result = node.apply(x, weight, bias, before, keep_gathered, main_grad, recorded)  # type: ignore[no-untyped-call]
    return result[0]  # type: ignore[no-any-return]


class _Column(torch.autograd.Function):
    """Returns the product, the token that :mod:`varcomm.ops.autograd` explains, and all rows."""

    @staticmethod
    def forward(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        before: Before,
        keep_gathered: bool,
        main_grad: MainGrad | None,
        recorded: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        token = torch.empty(0, dtype=torch.float32, device=x.device)
        if isinstance(before, AllGatherV):
            y, rows = multiplied_while_gathered(before, x, weight.T, bias, recorded)
            return y, token, rows if keep_gathered else None
        return multiplied(x, weight.T, bias), token, None

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        x, weight, _, ctx.before, _, ctx.main_grad, _ = inputs
        _, token, rows = output
        if rows is not None:
            ctx.mark_non_differentiable(rows)
        # ranks communicate in backward if the input of all of them has a gradient, whoever asks
        ctx.of_x, of_weight = ctx.needs_input_grad[:2]
        # of a frozen weight, no input is kept
        kept = (x, rows) if of_weight else (None, None)
        ctx.save_for_backward(*kept, weight if ctx.of_x else None, token)
        ctx.save_for_forward(x, None, weight, token)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient, of_token, _ = gradients
        x, rows, weight, token = ctx.saved_tensors
        found = (
            _differentiable(ctx, gradient, x, weight, token + of_token)
            if torch.is_grad_enabled() and not torch.compiler.is_compiling()
            else _overlapped(ctx, gradient, x, rows, weight)
        )
        of_bias = gradient.sum(0) if ctx.needs_input_grad[2] else None
        return *found, of_bias, None, None, None, None


class _ColumnOfAnyOrder(_Column):
    """The same with what torch.compile does not take: forward mode, and a word on batches."""

    @staticmethod
    @in_forward_mode
    def jvp(
        ctx: Any, saved: Any, *tangents: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        of_x, of_weight, of_bias, *_ = tangents
        x, _, weight, token = saved
        # together, so that ranks communicate once, and alike whichever tangents there are
        pair = torch.stack([torch.zeros_like(x) if of_x is None else of_x, x], dim=1)
        pair, passed_on = apply_with_token(ctx.before, pair, token)
        tangent = pair[:, 0] @ weight.T
        if of_weight is not None:
            tangent = tangent + pair[:, 1] @ of_weight.T
        return tangent if of_bias is None else tangent + of_bias, passed_on, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, *others: Any) -> tuple[Any, Any]:
        weight, bias, before, *options = others
        rows, operator = batched_rows(info, in_dims, x, before)
        y, token, gathered = _Column.apply(rows, weight, bias, operator, *options)  # type: ignore[no-untyped-call]
        results = unbatched_rows(y, info), of_each(token, info.batch_size)
        if gathered is None:
            return (*results, None), (1, 1, None)
        return (*results, unbatched_rows(gathered, info)), (1, 1, 1)


Gradients = tuple[torch.Tensor | None, torch.Tensor | None]


def _overlapped(
    ctx: Any,
    gradient: torch.Tensor,
    x: torch.Tensor | None,
    rows: torch.Tensor | None,
    weight: torch.Tensor | None,
) -> Gradients:
    """Return the gradients of input and weight, each computed while the other's messages travel."""
    gathering = None
    if x is not None and rows is None:
        if isinstance(ctx.before, AllGatherV):
            gathering = begin(ctx.before, x, False)
        else:
            rows = x
    summing = None
    if weight is not None:
        part = gradient @ weight.conj()
        rows = gathering.wait() if gathering is not None else rows
        summing = begin(ctx.before.adjoint, part, False)
    elif gathering is not None:
        rows = gathering.wait()
    of_weight = None if rows is None else weight_gradient(ctx, gradient, rows)
    return None if summing is None else summing.wait(), of_weight


def _differentiable(
    ctx: Any,
    gradient: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor | None,
    token: torch.Tensor,
) -> Gradients:
    """Return the same, made of differentiable operations."""
    of_x = of_weight = None
    if x is not None:
        rows = apply_with_token(ctx.before, x, token)[0]
        of_weight = weight_gradient(ctx, gradient, rows)
    if weight is not None:
        of_x = apply_with_token(ctx.before.adjoint, gradient @ weight.conj(), token)[0]
    return of_x, of_weight
