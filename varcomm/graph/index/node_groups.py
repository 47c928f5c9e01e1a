"""Groups of nodes that are spread over ranks, such as the graphs of a batch, and reductions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from varcomm.errors import ArgumentError
from varcomm.graph.index.partitioned_index import How, Kind, Numbering, PartitionedIndex
from varcomm.graph.replicated_values import of_all_ranks
from varcomm.ops.all_gather_v import all_gather_v
from varcomm.ops.all_reduce import all_reduce
from varcomm.ops.all_to_all_v import all_to_all_v
from varcomm.ops.reduction import accumulation_dtype, pieces
from varcomm.transport.group import Group

Extreme = Literal["amax", "amin"]

#: whether an extreme of 0 shares its gradient with the 0 that PyG's scatter starts from, and loses
#: that share: it does in torch 2.13
STARTS_FROM_ZERO = True


@dataclass(eq=False)
class NodeGroups(Numbering):
    """Groups of the nodes of all ranks by their ids; see :class:`PartitionedIndex`."""

    group: Group
    #: one more than the largest id on any rank
    size: int

    #: rows that count, of which halo rows may follow; all, if None
    num_owned: int | None = None

    def of_size(self, size: int) -> NodeGroups:
        """Return other groups of the same nodes."""
        return NodeGroups(self.group, size, self.num_owned)

    def selected_from(self, kind: Kind, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the rows of all groups, which every rank has."""
        return x

    def reduced(
        self, index: PartitionedIndex, how: How, src: torch.Tensor, start: torch.Tensor
    ) -> torch.Tensor:
        """Reduce the rows of all ranks' nodes, (n, *F) here, to the rows of their groups."""
        size = len(start)
        if size < self.size and index.whole:
            raise ArgumentError(f"ids of groups reach {self.size - 1}, and dim_size is {size}.")
        if self.num_owned is not None and not index.whole:
            raise ArgumentError(
                "reductions of some rows need halos of one hop: partition the graph with hops=1."
            )
        assert index.line is not None
        rows, src = index.line[: self.num_owned], src[: self.num_owned]
        if how in ("amax", "amin"):
            return extreme(how, src, rows, size, self.group)
        wide = src.to(accumulated(src.dtype))
        if how == "sum":
            part = wide.new_zeros(size, *src.shape[1:]).index_add(0, rows, wide)
            total = all_reduce(part, group=self.group.process_group)
            return of_all_ranks(total, self.group).to(src.dtype)
        ones = wide.new_ones(size, *src.shape[1:])
        local = ones.scatter_reduce(0, _index(rows, wide), wide, "prod")
        return _across_ranks([local], lambda values: values.prod(0), self.group).to(src.dtype)

    def count(self, kind: Kind, index: torch.Tensor, whole: bool) -> int:
        """Return the number of groups that the ids of any rank refer to."""
        return self.size if whole else number_of(index, self.group)


def number_of(ids: torch.Tensor, group: Group) -> int:
    """Return :func:`end_of` as an int; the host waits for a GPU."""
    return int(end_of(ids, group))


def end_of(ids: torch.Tensor, group: Group) -> torch.Tensor:
    """Return one more than the largest id on any rank; 8 bytes per rank."""
    own = ids.max().view(1) + 1 if ids.numel() else ids.new_zeros(1)
    return all_gather_v(own, [1] * group.size, group=group.process_group).max()


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which statistics of values of `dtype` are computed."""
    return accumulation_dtype(dtype, use_fp32=True)


def extreme(
    how: Extreme,
    x: torch.Tensor,
    rows: torch.Tensor,
    size: int,
    group: Group,
    from_zero: bool = STARTS_FROM_ZERO,
) -> torch.Tensor:
    """Return the extreme of (n, *F) in each of `size` groups, (G, *F), where `rows` are of them.

    Nodes with the extreme share its gradient evenly. The extreme of no nodes is 0.
    """

    def combine(values: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        into_one = torch.zeros(group.size, dtype=torch.int64, device=values.device)
        top, times = extreme_of_parts(how, values, times, into_one, 1, from_zero)
        return top.masked_fill(times == 0, 0)[0]

    ones = torch.ones_like(x, dtype=torch.int32)
    return _across_ranks([*extreme_of_parts(how, x, ones, rows, size)], combine, group)


def extreme_of_parts(
    how: Extreme,
    x: torch.Tensor,
    times: torch.Tensor,
    rows: torch.Tensor,
    size: int,
    from_zero: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the extreme of (n, *F) at each of `size` rows, and how many originals have it.

    `times` are the originals of each element, int32 of (n, *F); they share the gradient evenly.
    """
    x = x.masked_fill(times == 0, _beyond(how, x.dtype))
    start = x.new_full((size, *x.shape[1:]), _beyond(how, x.dtype))
    top = start.scatter_reduce(0, _index(rows, x), x.detach(), how)
    equal = (x.detach() == top.index_select(0, rows)) | x.isnan()
    times = times.masked_fill(~equal, 0)
    count = torch.zeros_like(top, dtype=times.dtype).index_add(0, rows, times)
    if x.is_floating_point():
        share = 1 / (count + (top == 0).mul(from_zero)).clamp(min=1).double()
        parts = x.masked_fill(times == 0, 0) * (times * share.index_select(0, rows)).to(x.dtype)
        # equal to `top`, except for rounding and infinities
        total = torch.zeros_like(top).index_add(0, rows, parts)
        top = total + torch.where(top.isfinite(), top - total, 0).detach()
    return top, count


def _across_ranks(
    parts: Sequence[torch.Tensor], combine: Callable[..., torch.Tensor], group: Group
) -> torch.Tensor:
    """Combine tensors of all ranks elementwise, on every rank.

    `combine` maps each part as (P, elements) to (elements,), for any elements. These are of a
    piece, which is sent to the others, or few on every rank, as in :func:`varcomm.all_reduce`.
    """
    shape, pg = parts[0].shape, group.process_group
    flat = [part.reshape(-1) for part in parts]
    counts = pieces(flat[0], group, one_round=False)
    if counts is None:
        every = [len(flat[0])] * group.size
        all_of = [all_gather_v(part, every, group=pg).view(group.size, -1) for part in flat]
        return of_all_ranks(combine(*all_of).view(shape), group)
    mine = [counts[group.rank]] * group.size
    own = [all_to_all_v(part, counts, mine, group=pg).view(group.size, -1) for part in flat]
    return of_all_ranks(all_gather_v(combine(*own), counts, group=pg).view(shape), group)


def _beyond(how: Extreme, dtype: torch.dtype) -> float | int:
    """Return the extreme of no values."""
    if dtype.is_floating_point:
        return float("-inf") if how == "amax" else float("inf")
    return torch.iinfo(dtype).min if how == "amax" else torch.iinfo(dtype).max


def _index(rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return rows.view(-1, *[1] * (x.dim() - 1)).expand_as(x)
