"""Statistics of one shard of classes: three numbers per token, from which the loss follows.

The loss of a token is ``sum_c q_c (lse - z_c)``, with `q` the target's distribution over classes,
times their weights, and `lse` the log-sum-exp of all logits `z`. Each rank computes, of its own
columns,

- ``top``, the largest logit, a constant in derivatives: the loss does not depend on it;
- ``log``, the log of the sum of ``exp(z - top)``;
- ``part``, the sum of ``q (top - z)``.

All three are differences within the shard, so large logits that are nearly equal lose nothing. A
shard without columns, or without a finite logit, has 0, minus infinity and its part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from varcomm.ops.reduction import accumulation_dtype
from varcomm.tensor_parallel.chunked_rows import (
    Chunks,
    Gradients,
    Product,
    RowMap,
    Sums,
    Tensors,
    in_chunks,
    pulled_back,
    results_in_chunks,
)

__all__ = ["Statistics", "chunk_elements", "computed_in"]


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the loss of logits of `dtype` is computed: at least fp32."""
    return accumulation_dtype(dtype, use_fp32=True)


def chunk_elements(device: torch.device) -> int:
    """Return how many logits one chunk has: a CPU's cache, or enough work for a kernel."""
    return 2**19 if device.type == "cpu" else 2**24


@dataclass(frozen=True)
class Statistics:
    """The map from logits, or from hidden states and a head, to the statistics of a shard.

    Attributes
    ----------
    share : float
        Smoothing mass per class.
    of_hidden, biased : bool
        Whether a head computes the logits from hidden states, and whether the head has a bias.
    weighted : bool
        Whether classes have weights.
    chunk_rows : int, optional
        Rows per chunk, if the caller chooses.
    """

    share: float
    of_hidden: bool
    biased: bool
    weighted: bool
    chunk_rows: int | None = None

    def __call__(self, rows: Tensors, shared: Tensors) -> Tensors:
        """Return ``(top, log, part)``, chunk by chunk; `shared` are head, bias and weights."""
        if torch.compiler.is_compiling():
            found: Tensors = _in_graph(*rows, *self.named(shared), self.share, self.chunk_rows)
            return found
        return in_chunks(_row_map(self), self.chunks(rows, shared), rows, shared)

    def named(self, shared: Tensors) -> tuple[torch.Tensor | None, ...]:
        """Return head, bias and weights; None for those that do not exist."""
        rest = iter(shared)
        flags = self.of_hidden, self.biased, self.weighted
        return tuple(next(rest) if flag else None for flag in flags)

    def chunks(self, rows: Tensors, shared: Tensors) -> Chunks:
        """Return the chunks of these rows."""
        values, shape = rows[0], tuple(rows[2].shape)
        if self.chunk_rows is not None:
            return Chunks(shape, self.chunk_rows)
        most, columns = chunk_elements(values.device), values.shape[-1]
        if self.of_hidden:
            # no more than the hidden states
            most, columns = max(values.numel(), most), len(shared[0])
        return Chunks(shape, max(1, most // max(1, columns)))


def statistics(
    z: torch.Tensor, y: torch.Tensor, q: torch.Tensor, weight: torch.Tensor | None, share: float
) -> Tensors:
    """Compute ``(top, log, part)``, each (*T) in the dtype of `q`.

    `z` are this rank's logits (*T, K), `y` the targets as columns of `z` (any column where `q` is
    0), `q` the targets' own mass without smoothing (0 where another rank owns the target), and
    `weight` (K,) the weights of the classes.
    """
    if z.shape[-1] == 0:
        nothing = torch.zeros_like(q)
        return nothing, torch.full_like(q, -torch.inf), nothing
    top = z.detach().amax(-1).to(q.dtype)
    top = top.masked_fill(top == -torch.inf, 0)
    below = z - top.unsqueeze(-1)
    of_target = below.gather(-1, y.unsqueeze(-1)).squeeze(-1)
    # where q is 0, the column is any, and may be minus infinity
    part = -q * of_target.masked_fill(q == 0, 0)
    if share:
        part = part - share * (below if weight is None else below * weight).sum(-1)
    return top, below.exp_().sum(-1).log(), part


def gradient(
    z: torch.Tensor,
    y: torch.Tensor,
    q: torch.Tensor,
    weight: torch.Tensor | None,
    share: float,
    gradients: Gradients,
) -> torch.Tensor:
    """Return the gradient of the logits, in their dtype, from those of `log` and `part`."""
    if z.shape[-1] == 0:
        return torch.zeros_like(z)
    top, log, _ = gradients.results
    of_log, of_part = gradients.of_results
    # where no logit is above minus infinity, none gets a gradient: exp(below) is 0 there
    scale = of_log * torch.exp(-log.masked_fill(log == -torch.inf, 0))
    result = (z - top.unsqueeze(-1)).exp_() * scale.unsqueeze(-1)
    if share:
        smooth = (share * of_part).unsqueeze(-1)
        if weight is None:
            result.sub_(smooth)
        else:
            result.addcmul_(smooth, weight, value=-1)
    return result.scatter_add_(-1, y.unsqueeze(-1), -(q * of_part).unsqueeze(-1)).to(z.dtype)


def _row_map(of: Statistics) -> RowMap:
    """Return the map of ``rows = (values, y, q)`` and of head, bias and weights, if they exist."""

    def logits(values: torch.Tensor, shared: Tensors) -> torch.Tensor:
        head, bias, _ = of.named(shared)
        return values if head is None else F.linear(values, head, bias)

    def forward(rows: Tensors, shared: Tensors) -> tuple[Tensors, Sums]:
        values, y, q = rows
        weight = of.named(shared)[2]
        return statistics(logits(values, shared), y, q, weight, of.share), ()

    def adjoint(rows: Tensors, shared: Tensors, g: Gradients) -> tuple[Tensors, Sums]:
        values, y, q = rows
        head, _, weight = of.named(shared)
        of_logits = gradient(logits(values, shared), y, q, weight, of.share, g)
        if head is None:
            return (of_logits,), ()
        flat = of_logits.reshape(q.numel(), len(head))
        sums: list[torch.Tensor | Product] = []
        if g.needed[len(rows)]:
            sums.append(Product(flat.t(), values.reshape(q.numel(), head.shape[1])))
        if of.biased and g.needed[len(rows) + 1]:
            sums.append(flat.sum(0))
        return (of_logits @ head,) if g.needed[0] else (), tuple(sums)

    return RowMap(forward, results=3, constants=1, adjoint=adjoint)


# The same map as an operator of a compiled graph, which would otherwise compute all rows at once.
_OF = (
    "Tensor values, Tensor column, Tensor q, Tensor? head, Tensor? bias, Tensor? weight, "
    "float share, SymInt? chunk_rows"
)


@torch.library.custom_op(
    "varcomm::class_statistics", mutates_args=(), schema=f"({_OF}) -> (Tensor, Tensor, Tensor)"
)
def _in_graph(
    values: torch.Tensor, column: torch.Tensor, q: torch.Tensor, *options: Any
) -> Tensors:
    of, chunks, shared = _prepared(values, q, *options)
    with torch.no_grad():
        return results_in_chunks(of, chunks, (values, column, q), shared)


@_in_graph.register_fake
def _(values: torch.Tensor, column: torch.Tensor, q: torch.Tensor, *options: Any) -> Tensors:
    return q.new_empty(q.shape), q.new_empty(q.shape), q.new_empty(q.shape)


@torch.library.custom_op(
    "varcomm::class_statistics_adjoint",
    mutates_args=(),
    schema=f"(Tensor[] kept, Tensor[] gradients, bool[] needed, {_OF}) -> Tensor[]",
)
def _adjoint(
    kept: list[torch.Tensor],
    gradients: list[torch.Tensor],
    needed: list[bool],
    values: torch.Tensor,
    column: torch.Tensor,
    q: torch.Tensor,
    *options: Any,
) -> list[torch.Tensor]:
    of, chunks, shared = _prepared(values, q, *options)
    # targets and weights of classes have no gradient
    flags = needed[0], False, False, *needed[1 : 1 + len(shared)]
    flags += (False,) * (3 + len(shared) - len(flags))
    with torch.no_grad():
        rows = values, column, q
        return [*pulled_back(of, chunks, rows, shared, tuple(kept), tuple(gradients), flags)]


@_adjoint.register_fake
def _(
    kept: list[torch.Tensor],
    gradients: list[torch.Tensor],
    needed: list[bool],
    values: torch.Tensor,
    column: torch.Tensor,
    q: torch.Tensor,
    head: torch.Tensor | None,
    bias: torch.Tensor | None,
    *options: Any,
) -> list[torch.Tensor]:
    inputs = [x for x in (values, head, bias) if x is not None]
    return [x.new_empty(x.shape) for x, flag in zip(inputs, needed, strict=True) if flag]


def _prepared(
    values: torch.Tensor,
    q: torch.Tensor,
    head: torch.Tensor | None,
    bias: torch.Tensor | None,
    weight: torch.Tensor | None,
    share: float,
    chunk_rows: int | None,
) -> tuple[RowMap, Chunks, Tensors]:
    of = Statistics(share, head is not None, bias is not None, weight is not None, chunk_rows)
    shared = tuple(x for x in (head, bias, weight) if x is not None)
    return _row_map(of), of.chunks((values, q, q), shared), shared


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    *tensors, ctx.share, ctx.chunk_rows = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    tensors, kept = ctx.saved_tensors[:6], ctx.saved_tensors[6:]
    asked = ctx.needs_input_grad
    places = [place for place in (0, 3, 4) if tensors[place] is not None]
    needed = [asked[place] for place in places]
    of_results = [*gradients[1:]]  # the first is a constant
    found = iter(_adjoint([*kept], of_results, needed, *tensors, ctx.share, ctx.chunk_rows))
    return tuple(next(found) if p in places and asked[p] else None for p in range(len(asked)))


_in_graph.register_autograd(_differentiate, setup_context=_keep)
