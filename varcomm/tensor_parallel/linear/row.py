"""The product of a row-parallel layer: ``y = after(x @ weight.T) + bias``.

`after` sums the parts of all ranks, for all of them or for each its part of a sequence. In backward
it gathers the gradients of a sequence, and own rows are multiplied meanwhile.
"""

from __future__ import annotations

from typing import Any

import torch

from varcomm.ops.all_gather_v import AllGatherV, ReduceScatterV
from varcomm.ops.autograd import (
    apply,
    apply_with_token,
    begin,
    in_forward_mode,
    is_recorded,
)
from varcomm.ops.batching import of_each
from varcomm.ops.replicated import ReplicatedSum
from varcomm.tensor_parallel.linear.batching import batched_rows, unbatched_rows
from varcomm.tensor_parallel.linear.main_grad import MainGrad, weight_gradient
from varcomm.tensor_parallel.linear.overlap import multiplied_while_gathered

__all__ = ["row_product"]

After = ReplicatedSum | ReduceScatterV


def row_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    after: After,
    main_grad: MainGrad | None,
) -> torch.Tensor:
    """Return the product for `x` of shape (rows, in) and `weight` of (out, in), differentiable.

    `main_grad` is where the weight's gradient is added, in place of ``weight.grad``.
    """
    recorded = is_recorded(x, None) or is_recorded(weight, None)
    node = _Row if torch.compiler.is_compiling() else _RowOfAnyOrder
    return node.apply(x, weight, bias, after, main_grad, recorded)[0]  # type: ignore[no-any-return, no-untyped-call]


class _Row(torch.autograd.Function):
    """Returns the product, and the token that :mod:`varcomm.ops.autograd` explains."""

    @staticmethod
    def forward(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        after: After,
        main_grad: MainGrad | None,
        recorded: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y = begin(after, x @ weight.T, recorded).wait()
        if bias is not None:
            y += bias  # nobody else has it yet
        return y, torch.empty(0, dtype=torch.float32, device=x.device)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        x, weight, _, ctx.after, ctx.main_grad, _ = inputs
        of_x, of_weight, ctx.of_bias = ctx.needs_input_grad[:3]
        # of a frozen weight, no input is kept
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None, output[1])
        ctx.save_for_forward(x, weight, output[1])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient, of_token = gradients
        x, weight, token = ctx.saved_tensors
        adjoint = ctx.after.adjoint
        of_x = of_bias = None
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # The bias is replicated: what follows uses its gradient alike on all ranks, but that
            # of the product otherwise on each.
            if ctx.of_bias:
                of_bias = _of_bias(ctx.after, gradient)
            gradient, _ = apply_with_token(adjoint, gradient, token + of_token)
            of_x = None if weight is None else gradient @ weight.conj()
        else:
            if not isinstance(adjoint, AllGatherV):  # the gradient is on all ranks already
                of_x = None if weight is None else gradient @ weight.conj()
            elif weight is None:
                gradient = begin(adjoint, gradient, False).wait()
            else:
                factor = weight.conj()
                of_x, gradient = multiplied_while_gathered(adjoint, gradient, factor, None, False)
            of_bias = gradient.sum(0) if ctx.of_bias else None
        of_weight = None if x is None else weight_gradient(ctx, gradient, x)
        return of_x, of_weight, of_bias, None, None, None


class _RowOfAnyOrder(_Row):
    """The same with what torch.compile does not take: forward mode, and a word on batches."""

    @staticmethod
    @in_forward_mode
    def jvp(
        ctx: Any, saved: Any, *tangents: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        of_x, of_weight, of_bias, *_ = tangents
        x, weight, token = saved
        # ranks communicate alike, whichever tangents there are
        tangent = (torch.zeros_like(x) if of_x is None else of_x) @ weight.T
        if of_weight is not None:
            tangent = tangent + x @ of_weight.T
        tangent, passed_on = apply_with_token(ctx.after, tangent, token)
        return tangent if of_bias is None else tangent + of_bias, passed_on

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, *others: Any) -> tuple[Any, Any]:
        weight, bias, after, *options = others
        rows, operator = batched_rows(info, in_dims, x, after)
        y, token = _Row.apply(rows, weight, bias, operator, *options)  # type: ignore[no-untyped-call]
        return (unbatched_rows(y, info), of_each(token, info.batch_size)), (1, 1)


def _of_bias(after: After, gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a replicated bias from that of own rows, or of all; differentiable."""
    own = gradient.sum(0)
    if isinstance(after, ReplicatedSum):
        return own
    return apply(ReplicatedSum(after.group, after.use_fp32), own)
