"""Maximum, minimum and product over the nodes of each graph of a batch, across ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch

from varcomm.graph.batches import Batch, accumulated
from varcomm.ops.all_gather_v import all_gather_v
from varcomm.ops.all_to_all_v import all_to_all_v
from varcomm.ops.reduction import pieces
from varcomm.transport.group import Group

__all__ = ["Extreme", "extreme", "extreme_value", "first_maximum", "product"]

Extreme = Literal["amax", "amin"]


def extreme(how: Extreme, x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the extreme of (n, *F) in each graph: (G, *F); 0 for graphs without nodes.

    The gradient goes to all nodes that have the extreme, in equal shares. Sent are G values and,
    as 4 bytes each, how often they occur.
    """
    index, rows = _index(x, batch)
    local = _local_extreme(how, x, index, batch.size)
    equal = _equal(x.detach(), local.detach().index_select(0, rows))
    times = local.new_zeros(local.shape, dtype=torch.int32).index_add(0, rows, equal.int())
    return across_ranks([local, times], lambda v, n: _shared(how, v, n), batch.graph.group)


def extreme_value(how: Extreme, x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the extreme of (n, *F) in each graph as a constant; infinite without nodes."""
    with torch.no_grad():
        local = _local_extreme(how, x, _index(x, batch)[0], batch.size)
        return across_ranks([local], lambda v: getattr(v, how)(0), batch.graph.group)


def first_maximum(x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the maximum of (n, *F) over all nodes: (1, *F).

    The gradient goes to the first node, in the order of the whole graph, that has it: so does that
    of ``torch.max`` along a dimension. Sent are the values and, as 8 bytes each, numbers of nodes.
    """
    nodes = batch.graph.node_sizes.total
    # a last row, for ranks without nodes, that comes after all
    x = torch.cat([x, x.new_full((1, *x.shape[1:]), _beyond("amax", x.dtype))])
    ids = torch.cat([batch.graph.owned_ids, batch.graph.owned_ids.new_tensor([nodes])])
    ids = ids.view(-1, *[1] * (x.dim() - 1)).expand_as(x)
    ids = ids.masked_fill(~_equal(x.detach(), x.detach().amax(0)), nodes)
    first, row = ids.min(0, keepdim=True)

    def combine(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        equal = _equal(values.detach(), values.detach().amax(0))
        first = ids.masked_fill(~equal, nodes).argmin(0, keepdim=True)
        return values.gather(0, first)[0]

    return across_ranks([x.gather(0, row), first], combine, batch.graph.group)


def product(x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the product of (n, *F) over each graph: (G, *F); 1 for graphs without nodes."""
    x = x.to(accumulated(x.dtype))
    ones = x.new_ones(batch.size, *x.shape[1:])
    local = ones.scatter_reduce(0, _index(x, batch)[0], x, "prod")
    return across_ranks([local], lambda values: values.prod(0), batch.graph.group)


def across_ranks(
    parts: Sequence[torch.Tensor], combine: Callable[..., torch.Tensor], group: Group
) -> torch.Tensor:
    """Combine tensors of all ranks elementwise, on every rank.

    Parameters
    ----------
    parts : sequence of torch.Tensor
        Of one shape, the same on all ranks, and of any dtypes.
    combine : callable
        Takes each part as (P, elements) and gives (elements,), whichever elements these are.
    group : Group
        The ranks.

    Returns
    -------
    torch.Tensor
        Of the shape of the parts; the same on every rank, bit for bit.

    Notes
    -----
    Communication, as of :func:`varcomm.all_reduce`: each rank combines a piece and sends it to the
    others, so that a rank receives ``(P - 1) / P`` times the bytes of each part and of the result.
    Where the first part has up to 16 KiB, and on two ranks, each combines all, in a single round:
    ``P - 1`` times the bytes of each part.

    Adjoint: that of `combine` between those of the two collectives; what arrives at the result is
    summed over ranks.
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


def _local_extreme(how: Extreme, x: torch.Tensor, index: torch.Tensor, size: int) -> torch.Tensor:
    beyond = x.new_full((size, *x.shape[1:]), _beyond(how, x.dtype))
    return beyond.scatter_reduce(0, index, x, how, include_self=False)


def _shared(how: Extreme, values: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
    """Return the extreme along the first dimension, to which values are equal so many times."""
    result = getattr(values.detach(), how)(0)
    empty = (times == 0).all(0)
    if values.is_floating_point():
        times = times.masked_fill(~_equal(values.detach(), result), 0)
        share = (times / times.sum(0).clamp(min=1)).to(values.dtype)
        parts = (values.masked_fill(times == 0, 0) * share).sum(0)
        # not rounded, as the parts are; infinities are equal anyway
        rest = torch.where(result.isfinite(), result - parts, 0)
        result = parts + rest.detach()
    return result.masked_fill(empty, 0)


def _equal(values: torch.Tensor, extreme: torch.Tensor) -> torch.Tensor:
    """Tell which values are the extreme: NaN, if there is one, is."""
    return (values == extreme) | (values != values)


def _beyond(how: Extreme, dtype: torch.dtype) -> float | int:
    """Return what no value is beyond: the extreme of nothing."""
    if dtype.is_floating_point:
        return float("-inf") if how == "amax" else float("inf")
    return torch.iinfo(dtype).min if how == "amax" else torch.iinfo(dtype).max


def _index(x: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the graph of each value of `x`, and of each row."""
    rows = batch.index
    if rows is None:
        rows = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    return rows.view(-1, *[1] * (x.dim() - 1)).expand_as(x), rows
