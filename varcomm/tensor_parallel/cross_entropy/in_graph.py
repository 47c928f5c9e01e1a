"""What a shard tells of its classes, chunk by chunk, as an operator for graphs, and its adjoint.

A compiler would compute all rows at once, and keep what is as large as the logits. So a graph holds
these operators, which do what is done outside of graphs. They communicate nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from varcomm.tensor_parallel.cross_entropy.row_map import (
    Chunks,
    RowMap,
    Tensors,
    pulled_back,
    results_in_chunks,
)
from varcomm.tensor_parallel.cross_entropy.statistics import Statistics

__all__ = ["statistics_in_graph"]

_OF = (
    "Tensor values, Tensor column, Tensor q, Tensor? head, Tensor? bias, Tensor? weight, "
    "float share, SymInt? chunk_rows"
)


@torch.library.custom_op(
    "varcomm::statistics", mutates_args=(), schema=f"({_OF}) -> (Tensor, Tensor, Tensor)"
)
def _statistics(
    values: torch.Tensor, column: torch.Tensor, q: torch.Tensor, *options: Any
) -> Tensors:
    of, chunks, shared = _prepared(values, q, *options)
    with torch.no_grad():
        return results_in_chunks(of, chunks, (values, column, q), shared)


@_statistics.register_fake
def _(values: torch.Tensor, column: torch.Tensor, q: torch.Tensor, *options: Any) -> Tensors:
    return q.new_empty(q.shape), q.new_empty(q.shape), q.new_empty(q.shape)


@torch.library.custom_op(
    "varcomm::statistics_adjoint",
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
    # of targets and the weights of classes, none is
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
    return of.row_map, of.chunks(values, shared, tuple(q.shape)), shared


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


_statistics.register_autograd(_differentiate, setup_context=_keep)


def statistics_in_graph(of: Statistics, rows: Tensors, shared: Tensors) -> Tensors:
    """Record the statistics of a shard; rows and what they share are as its map takes them."""
    rest = iter(shared)
    flags = of.of_hidden, of.biased, of.weighted
    head, bias, weight = (next(rest) if flag else None for flag in flags)
    found: Tensors = _statistics(*rows, head, bias, weight, of.share, of.chunk_rows)
    return found
