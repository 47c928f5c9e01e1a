"""Sum rows that belong together, in an order fixed once: what an owner does with gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from varcomm.ops.reduction import accumulation_dtype

__all__ = ["RowSum"]


@dataclass(frozen=True, eq=False)
class RowSum:
    """The transpose of ``x.index_select(0, index)``, the same at every run bit for bit.

    Copies of a row are added in pairs, then pairs of pairs: whatever adds in parallel and however
    often a row occurs, there are few rounds, and within a round no two additions meet.

    Attributes
    ----------
    rows : torch.Tensor
        The different rows in the index, ascending.
    first : torch.Tensor
        For each, where its sum stands in the end.
    rounds : tuple of pairs of torch.Tensor
        ``(to, what)``: positions that each get another position added.
    """

    rows: torch.Tensor
    first: torch.Tensor
    rounds: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    @classmethod
    def of(cls, index: torch.Tensor) -> RowSum:
        """Plan the sum for a one-dimensional index."""
        order = torch.sort(index, stable=True)
        rows, counts = torch.unique_consecutive(order.values, return_counts=True)
        starts = counts.cumsum(0) - counts
        # which copy of its row each is: 0, 1, 2, ...
        nth = torch.arange(len(index), device=index.device) - starts.repeat_interleave(counts)
        rounds = []
        step = 1
        while bool((nth >= step).any()):
            what = torch.nonzero(nth % (2 * step) == step).view(-1)
            rounds.append((order.indices[what - step], order.indices[what]))
            step *= 2
        return cls(rows, order.indices[starts], tuple(rounds))

    def __call__(self, values: torch.Tensor, num_rows: int, use_fp32: bool) -> torch.Tensor:
        """Sum the rows of `values`, one for each entry of the index, into `num_rows` rows."""
        sums = values.to(accumulation_dtype(values.dtype, use_fp32), copy=bool(self.rounds))
        total = sums.new_zeros(num_rows, *values.shape[1:])
        for to, what in self.rounds:
            sums.index_add_(0, to, sums.index_select(0, what))
        total.index_copy_(0, self.rows, sums.index_select(0, self.first))
        return total.to(values.dtype)

    def to(self, device: torch.device | str) -> RowSum:
        """Return the same on another device."""
        rounds = tuple((to.to(device), what.to(device)) for to, what in self.rounds)
        return RowSum(self.rows.to(device), self.first.to(device), rounds)
