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
from torch import Tensor

from varcomm.tensor_parallel.chunked_rows import (
    Chunks,
    Gradients,
    Product,
    RowMap,
    Tensors,
    Values,
    in_chunks,
    pulled_back,
)


@dataclass(frozen=True)
class Statistics:
    """The map from logits, or from hidden states and a head, to the statistics of a shard.

    `share` is the smoothing mass per class. `of_hidden`, `biased` and `weighted` tell which shared
    tensors exist: a head, its bias, weights of classes. `chunk_rows` are rows per chunk, if the
    caller chooses.
    """

    share: float
    of_hidden: bool
    biased: bool
    weighted: bool
    chunk_rows: int | None = None

    def __call__(self, rows: Tensors, shared: Tensors) -> Tensors:
        """Return ``(top, log, part)``, chunk by chunk.

        `rows` are logits (*T, K) or hidden states (*T, H), the targets as columns of the shard (any
        column where the mass is 0), and the targets' own mass without smoothing (0 where another
        rank owns the target). `shared` are head, bias and weights, if they exist.
        """
        if torch.compiler.is_compiling():
            found: Tensors = _in_graph(*rows, *self._named(shared), self.share, self.chunk_rows)
            return found
        return in_chunks(self.row_map, self.chunks(rows, shared), rows, shared)

    @property
    def row_map(self) -> RowMap:
        """The map with its derivative."""
        return RowMap(self._computed, results=3, constants=1, adjoint=self._pulled_back)

    def chunks(self, rows: Tensors, shared: Tensors) -> Chunks:
        """Return chunks that fit a CPU's cache, or are enough work for a kernel."""
        values, shape = rows[0], tuple(rows[2].shape)
        if self.chunk_rows is not None:
            return Chunks(shape, self.chunk_rows)
        most, columns = 2**19 if values.device.type == "cpu" else 2**24, values.shape[-1]
        if self.of_hidden:
            # no more than the hidden states
            most, columns = max(values.numel(), most), len(shared[0])
        return Chunks(shape, max(1, most // max(1, columns)))

    def _named(self, shared: Tensors) -> tuple[Tensor | None, ...]:
        """Return head, bias and weights; None for those that do not exist."""
        rest = iter(shared)
        flags = self.of_hidden, self.biased, self.weighted
        return tuple(next(rest) if flag else None for flag in flags)

    def _logits(self, values: Tensor, shared: Tensors) -> Tensor:
        head, bias, _ = self._named(shared)
        return values if head is None else F.linear(values, head, bias)

    def _computed(self, rows: Tensors, shared: Tensors) -> Values:
        values, column, q = rows
        z, weight = self._logits(values, shared), self._named(shared)[2]
        if z.shape[-1] == 0:
            nothing = torch.zeros_like(q)
            return (nothing, torch.full_like(q, -torch.inf), nothing), ()
        top = z.detach().amax(-1).to(q.dtype)
        top = top.masked_fill(top == -torch.inf, 0)
        below = z - top.unsqueeze(-1)
        of_target = below.gather(-1, column.unsqueeze(-1)).squeeze(-1)
        # where q is 0, the column is any, and may be minus infinity
        part = -q * of_target.masked_fill(q == 0, 0)
        if self.share:
            part = part - self.share * (below if weight is None else below * weight).sum(-1)
        return (top, below.exp_().sum(-1).log(), part), ()

    def _pulled_back(self, rows: Tensors, shared: Tensors, g: Gradients) -> Values:
        """Return the gradients of the needed ones among values, head and bias."""
        values, _, q = rows
        head = self._named(shared)[0]
        of_logits = self._of_logits(rows, shared, g)
        if head is None:
            return (of_logits,), ()
        flat = of_logits.reshape(q.numel(), len(head))
        sums: list[Tensor | Product] = []
        if g.needed[3]:
            sums.append(Product(flat.t(), values.reshape(q.numel(), head.shape[1])))
        if self.biased and g.needed[4]:
            sums.append(flat.sum(0))
        return (of_logits @ head,) if g.needed[0] else (), tuple(sums)

    def _of_logits(self, rows: Tensors, shared: Tensors, g: Gradients) -> Tensor:
        values, column, q = rows
        z, weight = self._logits(values, shared), self._named(shared)[2]
        if z.shape[-1] == 0:
            return torch.zeros_like(z)
        top, log, _ = g.results
        of_log, of_part = g.of_results
        # where no logit is above minus infinity, none gets a gradient: exp(z - top) is 0 there
        scale = of_log * torch.exp(-log.masked_fill(log == -torch.inf, 0))
        result = (z - top.unsqueeze(-1)).exp_() * scale.unsqueeze(-1)
        if self.share:
            smooth = (self.share * of_part).unsqueeze(-1)
            if weight is None:
                result.sub_(smooth)
            else:
                result.addcmul_(smooth, weight, value=-1)
        return result.scatter_add_(-1, column.unsqueeze(-1), -(q * of_part).unsqueeze(-1)).to(
            z.dtype
        )


# The same map as an operator of a compiled graph, which would otherwise compute all rows at once.
# Its arguments are three rows, three shared tensors, share and chunk_rows.
_OF = (
    "Tensor values, Tensor column, Tensor q, Tensor? head, Tensor? bias, Tensor? weight, "
    "float share, SymInt? chunk_rows"
)


@torch.library.custom_op(
    "varcomm::class_statistics", mutates_args=(), schema=f"({_OF}) -> (Tensor, Tensor, Tensor)"
)
@torch.no_grad()
def _in_graph(*arguments: Any) -> Tensors:
    of, rows, shared = _prepared(arguments)
    return in_chunks(of.row_map, of.chunks(rows, shared), rows, shared)


@_in_graph.register_fake
def _(values: Tensor, column: Tensor, q: Tensor, *options: Any) -> Tensors:
    return q.new_empty(q.shape), q.new_empty(q.shape), q.new_empty(q.shape)


@torch.library.custom_op(
    "varcomm::class_statistics_adjoint",
    mutates_args=(),
    schema=f"(Tensor[] kept, Tensor[] gradients, bool[] needed, {_OF}) -> Tensor[]",
)
@torch.no_grad()
def _adjoint(
    kept: list[Tensor], gradients: list[Tensor], needed: list[bool], *arguments: Any
) -> list[Tensor]:
    of, rows, shared = _prepared(arguments)
    flags = tuple(flag for flag, x in zip(needed, arguments, strict=False) if x is not None)
    chunks = of.chunks(rows, shared)
    return [*pulled_back(of.row_map, chunks, rows, shared, tuple(kept), tuple(gradients), flags)]


@_adjoint.register_fake
def _(
    kept: list[Tensor], gradients: list[Tensor], needed: list[bool], *arguments: Any
) -> list[Tensor]:
    tensors = zip(arguments, needed, strict=False)
    return [x.new_empty(x.shape) for x, flag in tensors if flag and x is not None]


def _prepared(arguments: tuple[Any, ...]) -> tuple[Statistics, Tensors, Tensors]:
    *tensors, share, chunk_rows = arguments
    head, bias, weight = (x is not None for x in tensors[3:])
    of = Statistics(share, head, bias, weight, chunk_rows)
    return of, tuple(tensors[:3]), tuple(x for x in tensors[3:] if x is not None)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    *tensors, ctx.share, ctx.chunk_rows = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    tensors, kept = ctx.saved_tensors[:6], ctx.saved_tensors[6:]
    needed = [*ctx.needs_input_grad[:6]]
    of_results = [*gradients[1:]]  # the first is a constant
    found = iter(_adjoint([*kept], of_results, needed, *tensors, ctx.share, ctx.chunk_rows))
    return *(next(found) if flag else None for flag in needed), None, None


_in_graph.register_autograd(_differentiate, setup_context=_keep)
