"""Maxima, minima and products over the nodes of each graph of a batch, across ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Literal

import torch
from torch_geometric.utils import scatter

from varcomm.graph.nn.batches import Batch, accumulated
from varcomm.ops.all_gather_v import all_gather_v
from varcomm.ops.all_to_all_v import all_to_all_v
from varcomm.ops.reduction import pieces
from varcomm.transport.group import Group

__all__ = ["Extreme", "extreme", "extreme_value", "first_maximum", "product"]

Extreme = Literal["amax", "amin"]


def extreme(how: Extreme, x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the extreme of (n, *F) in each graph: (G, *F); 0 for graphs without nodes.

    Nodes with the extreme share the gradient evenly. Each rank sends G values and 4-byte counts.
    """
    rows = _rows(x, batch)
    local = _local_extreme(how, x.detach(), rows, batch.size)
    equal = _equal(x.detach(), local.index_select(0, rows))
    times = torch.zeros_like(local, dtype=torch.int32).index_add(0, rows, equal.int())
    if x.is_floating_point():
        share = (1 / times.clamp(min=1).double()).to(x.dtype).index_select(0, rows)
        parts = x.masked_fill(~equal, 0) * share
        local = _exactly(local, torch.zeros_like(local).index_add(0, rows, parts))

    def combine(values: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        values = values.masked_fill(times == 0, _beyond(how, values.dtype))
        result: torch.Tensor = getattr(values.detach(), how)(0)
        if values.is_floating_point():
            times = times.masked_fill(~_equal(values.detach(), result), 0)
            count = times.sum(0) + (result == 0).mul(_counts_start())
            share = (times / count.clamp(min=1).double()).to(values.dtype)
            parts = values.masked_fill(times == 0, 0) * share
            result = _exactly(result, parts.sum(0))
        return result.masked_fill((times == 0).all(0), 0)

    return across_ranks([local, times], combine, batch.rows.group)


def extreme_value(how: Extreme, x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the extreme of (n, *F) in each graph as a constant; infinite without nodes."""
    local = _local_extreme(how, x.detach(), _rows(x, batch), batch.size)
    return across_ranks([local], lambda values: getattr(values, how)(0), batch.rows.group)


def first_maximum(x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the maximum of (n, *F) over all nodes: (1, *F).

    The first node with the maximum, in the order of the full graph, gets the gradient, as in
    ``torch.max`` along a dimension. Each rank sends values and 8-byte ids of nodes.
    """
    nodes, shape = batch.rows.total, (1, *x.shape[1:])
    # torch.cat drops an empty tensor of one dimension from the autograd graph
    x = x.flatten(1) if x.dim() > 1 else x.unsqueeze(1)
    # a last row, after all nodes, for ranks without nodes
    x = torch.cat([x, x.new_full((1, x.shape[1]), _beyond("amax", x.dtype))])
    ids = torch.cat([batch.rows.owned_ids, batch.rows.owned_ids.new_tensor([nodes])])
    ids = ids.unsqueeze(1).expand_as(x).masked_fill(~_equal(x, x.amax(0)), nodes)
    first, row = ids.min(0, keepdim=True)

    def combine(values: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        first = first.masked_fill(~_equal(values, values.amax(0)), nodes)
        return values.gather(0, first.argmin(0, keepdim=True))[0]

    return across_ranks([x.gather(0, row), first], combine, batch.rows.group).view(shape)


def product(x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the product of (n, *F) over each graph: (G, *F); 1 for graphs without nodes."""
    x = x.to(accumulated(x.dtype))
    ones = x.new_ones(batch.size, *x.shape[1:])
    local = ones.scatter_reduce(0, _index(_rows(x, batch), x), x, "prod")
    return across_ranks([local], lambda values: values.prod(0), batch.rows.group)


def across_ranks(
    parts: Sequence[torch.Tensor], combine: Callable[..., torch.Tensor], group: Group
) -> torch.Tensor:
    """Combine tensors of all ranks elementwise, on every rank.

    `parts` are of one shape, the same on all ranks. `combine` maps each part as (P, elements) to
    (elements,), for any elements. The result has the same bits on every rank; its gradients are
    summed over ranks.

    Communication, as of :func:`varcomm.all_reduce`: each rank combines a piece and sends it to the
    others, ``(P - 1) / P`` times the bytes of each part and of the result. If the first part has up
    to 16 KiB, and on two ranks, each rank combines all in one round: ``P - 1`` times the bytes.
    """
    shape, pg = parts[0].shape, group.process_group
    flat = [part.reshape(-1) for part in parts]
    counts = pieces(flat[0], group, one_round=False)
    if counts is None:
        every = [len(flat[0])] * group.size
        all_of = [all_gather_v(part, every, group=pg).view(group.size, -1) for part in flat]
        return combine(*all_of).view(shape)
    mine = [counts[group.rank]] * group.size
    own = [all_to_all_v(part, counts, mine, group=pg).view(group.size, -1) for part in flat]
    return all_gather_v(combine(*own), counts, group=pg).view(shape)


def _local_extreme(how: Extreme, x: torch.Tensor, rows: torch.Tensor, size: int) -> torch.Tensor:
    beyond = x.new_full((size, *x.shape[1:]), _beyond(how, x.dtype))
    return beyond.scatter_reduce(0, _index(rows, x), x, how)


def _exactly(value: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    """Return `value` with the derivatives of `parts`, which equal it except for rounding."""
    return parts + torch.where(value.isfinite(), value - parts, 0).detach()


def _equal(values: torch.Tensor, extreme: torch.Tensor) -> torch.Tensor:
    """Return which values are the extreme; NaN is, if there is one."""
    return (values == extreme) | (values != values)


def _beyond(how: Extreme, dtype: torch.dtype) -> float | int:
    """Return the extreme of no values."""
    if dtype.is_floating_point:
        return float("-inf") if how == "amax" else float("inf")
    return torch.iinfo(dtype).min if how == "amax" else torch.iinfo(dtype).max


@cache
def _counts_start() -> bool:
    """Return whether an extreme of 0 shares its gradient with the 0 that PyG's scatter starts from.

    It does in torch 2.13, and the share of that 0 is lost.
    """
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros(1, requires_grad=True)
        largest = scatter(x, torch.zeros(1, dtype=torch.int64), 0, 1, "max")
        (gradient,) = torch.autograd.grad(largest, x)
        return gradient.item() < 1


def _rows(x: torch.Tensor, batch: Batch) -> torch.Tensor:
    if batch.index is None:
        return torch.zeros(len(x), dtype=torch.int64, device=x.device)
    return batch.index


def _index(rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return rows.view(-1, *[1] * (x.dim() - 1)).expand_as(x)
