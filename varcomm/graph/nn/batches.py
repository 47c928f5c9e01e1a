"""Graphs of a batch whose nodes are spread over ranks: sums over the nodes of each graph."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import torch

from varcomm.errors import ArgumentError
from varcomm.ops.all_gather_v import all_gather_v
from varcomm.ops.all_reduce import all_reduce
from varcomm.ops.checks import checked_tensor
from varcomm.ops.reduction import accumulation_dtype
from varcomm.sizes import exact_int
from varcomm.transport.group import Group

__all__ = [
    "Batch",
    "accumulated",
    "check_floats",
    "check_ids",
    "largest",
    "result_dtype",
]


@dataclass(frozen=True, eq=False)
class Batch:
    """The graph of each row of a call, owned rows first.

    Attributes
    ----------
    rows : Rows or Graphs
        The nodes, or edges, of all ranks.
    index : torch.Tensor or None
        The graph of each row, int64 of shape (rows,); None if all rows are of one graph.
    size : int
        Number of graphs on all ranks together, G.
    """

    rows: Any
    index: torch.Tensor | None
    size: int

    def owned(self) -> Batch:
        """Return the same for the owned rows alone."""
        if self.index is None:
            return self
        return Batch(self.rows, self.index[: self.rows.num_owned], self.size)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum (rows, *F) over the owned nodes of each graph, on all ranks: (G, *F) on every rank.

        Floats narrower than 4 bytes are summed, sent and returned in fp32. The adjoint sums the
        gradients of all ranks.
        """
        return self.all_reduce(self.local_sum(values))

    def local_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of :meth:`sum`."""
        own = values[: self.rows.num_owned]
        if self.index is None:
            exact = not (own.is_floating_point() or own.is_complex())
            return own.sum(0, keepdim=True, dtype=None if exact else accumulated(own.dtype))
        own = own.to(accumulated(own.dtype))
        zeros = own.new_zeros(self.size, *own.shape[1:])
        return zeros.index_add(0, self.index[: len(own)], own)

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """Sum parts of all ranks."""
        return all_reduce(part, group=self.rows.group.process_group)

    @cached_property
    def counts(self) -> torch.Tensor:
        """Nodes of each graph, int64 of shape (G,); 8 bytes per graph, none for one graph."""
        if self.index is None:
            return self.rows.owned_ids.new_full((1,), self.rows.total)  # type: ignore[no-any-return]
        own = self.index[: self.rows.num_owned]
        return self.all_reduce(torch.bincount(own, minlength=self.size))

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Average over the nodes of each graph, as :meth:`sum`; 0 for graphs without nodes."""
        total = self.sum(values)
        return total / self.counts.clamp(min=1).view(-1, *[1] * (total.dim() - 1))

    def at_nodes(self, values: torch.Tensor) -> torch.Tensor:
        """Return the value of its graph for each row: from (G, *F) to (rows, *F) or (1, *F)."""
        return values if self.index is None else values.index_select(0, self.index)


def largest(number: int, group: Group, device: torch.device) -> int:
    """Return the largest of all ranks' numbers; 8 bytes per rank."""
    own = torch.tensor([number], device=device)
    return int(all_gather_v(own, [1] * group.size, group=group.process_group).max())


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which statistics of values of `dtype` are computed."""
    return accumulation_dtype(dtype, use_fp32=True)


def result_dtype(*values: torch.Tensor | None) -> torch.dtype:
    """Return the dtype of the product of all of these."""
    dtypes = [value.dtype for value in values if value is not None]
    return reduce(torch.promote_types, dtypes)


def check_floats(x: torch.Tensor, dims: tuple[int, ...], where: str) -> None:
    """Raise ArgumentError unless `x` is of floats, and of one of `dims` dimensions if any."""
    checked_tensor(x, where, "x")
    if not x.is_floating_point() or (dims and x.dim() not in dims):
        shapes = {2: "(rows, C)", 3: "(rows, C, L)"}
        of = f" and shape {' or '.join(shapes[dim] for dim in dims)}" if dims else ""
        raise ArgumentError(
            f"{where}x must be of floats{of}; got {x.dtype} of shape {tuple(x.shape)}."
        )


def check_ids(
    index: torch.Tensor, size: int | None, x: torch.Tensor, where: str, name: str = "batch"
) -> int:
    """Return one more than the largest number in `index`, if it fits to `x` and `size`."""
    checked_tensor(index, where, name)
    if index.dtype != torch.int64 or index.shape != x.shape[:1]:
        raise ArgumentError(
            f"{where}{name} must be of torch.int64, with a number for each of the {len(x)} rows "
            f"that are given; got {index.dtype} of shape {tuple(index.shape)}."
        )
    if size is not None and (exact_int(size) is None or size < 0):
        raise ArgumentError(
            f"{where}the number of graphs must be an int of at least 0; got {size!r}."
        )
    low, high = (int(end) for end in index.aminmax()) if len(index) else (0, -1)
    if low < 0 or (size is not None and high >= size):
        below = "" if size is None else f" and below {size}"
        raise ArgumentError(
            f"{where}numbers in {name} must be at least 0{below}; got {low} to {high}."
        )
    return high + 1
