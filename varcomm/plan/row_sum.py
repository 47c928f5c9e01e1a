"""Sum of rows that belong together, in one order: an owner's sum of gradients."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

_WIDE = 16  # elements per row from which bags are faster, however few copies there are
_DENSE = 2  # copies per row, on average, from which they are faster for any width


Bags = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, eq=False)
class RowSum:
    """The transpose of ``x.index_select(0, index)``, the same at every run bit for bit.

    The copies of a row are added one after the other, in the order of the index: for a plan, that
    of rank 0 first. Two ways return the same bits. One is ``index_add_``, which on the CPU keeps
    the order of the index. The other is torch's sum over the bags of an embedding, which writes
    each row once, sums fp16 and bf16 in fp32 registers and has no atomics on a GPU.

    >>> RowSum(torch.tensor([2, 0, 2]), 3)(torch.tensor([1.0, 2.0, 4.0]))
    tensor([2., 0., 5.])
    """

    index: torch.Tensor
    num_rows: int
    made: Bags | None = None  # the bags, if they are known

    @cached_property
    def bags(self) -> Bags:
        """Places of the copies, row by row, and where in that list each row begins and ends."""
        if self.made is not None:
            return self.made
        fits = max(len(self.index), self.num_rows) < 2**31
        integer = torch.int32 if fits else torch.int64
        places = torch.sort(self.index.to(integer), stable=True).indices.to(integer)
        bounds = torch.zeros(self.num_rows + 1, dtype=integer, device=places.device)
        # bincount would wait for a GPU
        bounds[1:].scatter_add_(0, self.index, bounds.new_ones(()).expand(len(places)))
        return places, bounds.cumsum_(0)

    def __call__(self, values: torch.Tensor, use_fp32: bool = True) -> torch.Tensor:
        """Return the sums of `values`, one row per entry of the index; zeros without an entry.

        Floats narrower than 4 bytes are summed in fp32 if `use_fp32`; by bags on a GPU, always.
        """
        if values.is_complex():
            parts = torch.view_as_real(values.resolve_conj())
            return torch.view_as_complex(self(parts, use_fp32))
        is_matrix, dtype = values.dim() == 2, values.dtype
        rows = values if is_matrix else values.reshape(len(values), prod(values.shape[1:]))
        if dtype.itemsize == 1 and dtype.is_floating_point:  # which torch cannot add
            rows = rows.float()
        if self._has_bags(rows, use_fp32):
            total: torch.Tensor = torch.embedding_bag(
                rows.contiguous(), *self.bags, mode=0, include_last_offset=True
            )[0]
        else:
            # torch sums fp16 and bf16 in fp32 by an index of 64 bits, in their dtype by one of 32
            narrow = rows.dtype.itemsize < 4 and rows.dtype.is_floating_point
            index = self.index.to(torch.int32) if narrow and not use_fp32 else self.index
            total = rows.new_zeros(self.num_rows, rows.shape[1]).index_add_(0, index, rows)
        total = total if is_matrix else total.view(self.num_rows, *values.shape[1:])
        return total if total.dtype == dtype else total.to(dtype)

    def _has_bags(self, rows: torch.Tensor, use_fp32: bool) -> bool:
        if not rows.is_floating_point() or rows.numel() == 0:
            return False
        if rows.device.type != "cpu":
            return True
        # on the CPU bags round half a bit of bf16 up, not to even, and are slow for fp64
        quick = rows.dtype == torch.float32 or (rows.dtype == torch.float16 and use_fp32)
        dense = len(rows) >= _DENSE * self.num_rows
        return quick and (rows.shape[1] >= _WIDE or dense)
