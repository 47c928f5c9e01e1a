"""Statistics of one shard of classes: three numbers per token, from which the loss follows.

The loss of a token is ``sum_c q_c (lse - z_c)``, with `q` the target's distribution over classes,
times their weights, and `lse` the log-sum-exp of all logits `z`. Each rank computes, of its own
columns,

- ``top``, the largest logit, a constant in derivatives: the loss does not depend on it;
- ``log``, the log of the sum of ``exp(z - top)``;
- ``part``, the sum of ``q (top - z)``.

All three are differences within the shard, so large logits that are nearly equal lose nothing. A
shard without a finite logit has 0, minus infinity and its part. Values and gradients are computed
for one chunk of rows at a time; recorded derivatives and transforms compute all rows at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from varcomm.ops.handle import apply
from varcomm.ops.reduction import accumulation_dtype
from varcomm.ops.replicated import ReplicatedUse
from varcomm.tensor_parallel.derivatives import in_transform, recorded_gradients
from varcomm.tensor_parallel.linear import as_rows

Three = tuple[Tensor, Tensor, Tensor]


def class_statistics(
    values: Tensor,
    column: Tensor,
    q: Tensor,
    head: Tensor | None,
    bias: Tensor | None,
    weight: Tensor | None,
    share: float,
    use: ReplicatedUse | None,
) -> Three:
    """Return ``(top, log, part)`` of logits (*T, K), or of hidden states (*T, H) and a head.

    `column` are the targets as columns of the shard (any column where the mass is 0), `q` the
    targets' own mass without smoothing (0 where another rank owns the target). `weight` are the
    weights of this rank's classes, `share` the smoothing mass per class. With `use`, hidden states
    are replicated, and their gradients are summed.
    """
    tensors = values, column, q, head, bias, weight
    found: Three
    if in_transform():
        found = _plain(share, use, *tensors)
    elif torch.compiler.is_compiling():
        found = _in_graph(values if use is None else apply(use, values), *tensors[1:], share)
    else:
        found = _Statistics.apply(*tensors, share, use)  # type: ignore[no-untyped-call]
    return found


def _plain(
    share: float,
    use: ReplicatedUse | None,
    values: Tensor,
    column: Tensor,
    q: Tensor,
    head: Tensor | None,
    bias: Tensor | None,
    weight: Tensor | None,
) -> Three:
    used = values if use is None else apply(use, values)
    return _of_rows(_logits(used, head, bias), column, q, weight, share, owned=False)


@torch.no_grad()
def _statistics(*arguments: Any) -> Three:
    values, column, q, head, bias, weight, share = arguments
    top, log, part = (q.new_empty(q.shape) for _ in range(3))
    for at in _chunks(values, q, head):
        z = _logits(values[at], head, bias)
        rows = _of_rows(z, column[at], q[at], weight, share, owned=head is not None)
        top[at], log[at], part[at] = rows
    return top, log, part


def _logits(values: Tensor, head: Tensor | None, bias: Tensor | None) -> Tensor:
    return values if head is None else F.linear(values, head, bias)


def _of_rows(
    z: Tensor, column: Tensor, q: Tensor, weight: Tensor | None, share: float, owned: bool
) -> Three:
    """Return the statistics of some rows; logits that are `owned` may be overwritten."""
    if z.shape[-1] == 0:
        zero = z.sum(-1).to(q.dtype)  # depends on the logits, as on other ranks
        return zero, zero - torch.inf, zero
    top = z.detach().amax(-1).to(q.dtype)
    top = top.masked_fill(top == -torch.inf, 0)
    below = _shifted(z, top.unsqueeze(-1), owned)
    of_target = below.gather(-1, column.unsqueeze(-1)).squeeze(-1)
    # where q is 0, the column is any, and may be minus infinity
    part = -q * of_target.masked_fill(q == 0, 0)
    if share:
        part = part - share * (below if weight is None else below * weight).sum(-1)
    total = (below.exp() if torch.is_grad_enabled() else below.exp_()).sum(-1)
    none = total == 0  # has a derivative of 0
    return top, total.masked_fill(none, 1).log().masked_fill(none, -torch.inf), part


def _shifted(z: Tensor, top: Tensor, owned: bool, out: Tensor | None = None) -> Tensor:
    """Return ``z - top``, in `out`, or in the memory of `z` if that is possible."""
    return z.sub_(top) if owned and z.dtype == top.dtype else torch.sub(z, top, out=out)


def _chunks(values: Tensor, q: Tensor, head: Tensor | None) -> Iterator[tuple[slice, ...]]:
    """Yield the indices of chunks that fit a CPU's cache, or are enough work for a kernel."""
    most, columns = 2**19 if values.device.type == "cpu" else 2**26, values.shape[-1]
    if head is not None:  # no more logits than hidden states
        most, columns = max(values.numel(), min(most, 2**24)), len(head)
    return _blocks(tuple(q.shape), max(1, most // max(1, columns)))


def _blocks(shape: tuple[int, ...], size: int) -> Iterator[tuple[slice, ...]]:
    """Yield indices of at most `size` elements, views for any strides; one if there are none."""
    if prod(shape) == 0 or not shape:
        yield (slice(None),) * len(shape)
        return
    length, *rest = shape
    step = max(1, size // prod(rest))
    inner = list(_blocks(tuple(rest), size)) if prod(rest) > size else [()]
    for start in range(0, length, step):
        yield from ((slice(start, start + step), *index) for index in inner)


class _Statistics(torch.autograd.Function):
    """The statistics with their derivatives of any order."""

    @staticmethod
    def forward(*arguments: Any) -> Three:
        return _statistics(*arguments[:-1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Three) -> None:
        *others, use = inputs
        _keep(ctx, others, output, use)

    @staticmethod
    def backward(ctx: Any, *of: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx, *of), None


def _keep(ctx: Any, inputs: Any, output: Three, use: ReplicatedUse | None = None) -> None:
    ctx.share, ctx.use = inputs[6], use
    ctx.mark_non_differentiable(output[0])
    ctx.save_for_backward(*inputs[:6], *output[:2])


def _gradients(ctx: Any, *of: Tensor) -> tuple[Tensor | None, ...]:
    saved, needed = ctx.saved_tensors, ctx.needs_input_grad
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        plain = partial(_plain, ctx.share, ctx.use)
        return *recorded_gradients(plain, saved[:6], needed[:6], of), None
    wanted = [needed[0], needed[3], needed[4]]
    given = iter(_adjoint(*saved, *of[1:], wanted, ctx.share))
    of_values, of_head, of_bias = (next(given) if flag else None for flag in wanted)
    if of_values is not None and ctx.use is not None:
        of_values = apply(ctx.use.adjoint, of_values)
    return of_values, None, None, of_head, of_bias, None, None


# Both maps as operators of a compiled graph, which would otherwise compute all rows at once.
_OF = "Tensor values, Tensor column, Tensor q, Tensor? head, Tensor? bias, Tensor? weight"

_in_graph = torch.library.custom_op(
    "varcomm::class_statistics",
    mutates_args=(),
    schema=f"({_OF}, float share) -> (Tensor, Tensor, Tensor)",
)(_statistics)
_in_graph.register_autograd(_gradients, setup_context=_keep)


@_in_graph.register_fake
def _(values: Tensor, column: Tensor, q: Tensor, *options: Any) -> Three:
    return q.new_empty(q.shape), q.new_empty(q.shape), q.new_empty(q.shape)


@torch.library.custom_op(
    "varcomm::class_statistics_adjoint",
    mutates_args=(),
    schema=f"({_OF}, Tensor top, Tensor log, Tensor of_log, Tensor of_part, bool[] wanted, "
    "float share) -> Tensor[]",
)
@torch.no_grad()
def _adjoint(*arguments: Any) -> list[Tensor]:
    """Return the wanted gradients among those of values, head and bias, chunk by chunk."""
    values, column, q, head, bias, weight, *of_rows, wanted, share = arguments
    of_values = torch.empty_like(values)
    totals = [
        torch.zeros_like(x, dtype=accumulation_dtype(x.dtype, True)) if flag else None
        for x, flag in zip((head, bias), wanted[1:], strict=True)
        if x is not None
    ]
    of_head, of_bias = (*totals, None, None)[:2]

    def add(at: tuple[slice, ...]) -> None:  # a function, which frees a chunk before the next
        z = _logits(values[at], head, bias)
        top, log, of_log, of_part = (x[at].unsqueeze(-1) for x in of_rows)
        # where no logit is above minus infinity, none gets a gradient: exp(z - top) is 0 there
        scale = of_log * torch.exp(-log.masked_fill(log == -torch.inf, 0))
        in_place = head is None and z.dtype == top.dtype
        out = of_values[at] if in_place else None
        below = _shifted(z, top, owned=head is not None, out=out)
        powers = below.exp_().mul_(scale)
        if share:
            powers.sub_(share * of_part if weight is None else share * of_part * weight)
        if z.shape[-1]:
            powers.scatter_add_(-1, column[at].unsqueeze(-1), -q[at].unsqueeze(-1) * of_part)
        of_logits = powers.to(z.dtype)
        if wanted[0] and not in_place:
            of_values[at] = of_logits if head is None else of_logits @ head
        flat, rows = as_rows(of_logits), as_rows(values[at])
        if of_head is not None and of_head.dtype == rows.dtype:
            of_head.addmm_(flat.T, rows)  # without a temporary
        elif of_head is not None:
            of_head.add_(flat.T @ rows)
        if of_bias is not None:
            of_bias.add_(flat.sum(0))

    for at in _chunks(values, q, head):
        add(at)
    found = of_values if wanted[0] else None, of_head, of_bias
    return [x.to(values.dtype) for x in found if x is not None]


@_adjoint.register_fake
def _(values: Tensor, column: Tensor, q: Tensor, *options: Any) -> list[Tensor]:
    likes = values, *options[:2]
    return [x.new_empty(x.shape) for x, flag in zip(likes, options[-2], strict=True) if flag]
