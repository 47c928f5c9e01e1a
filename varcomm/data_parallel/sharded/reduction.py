"""The gradients of one bucket on their way to the ranks that own their pieces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from varcomm.data_parallel.sharded.split import Split
from varcomm.ops import packing
from varcomm.ops.reduction import accumulated
from varcomm.transport.engine import wait_for
from varcomm.transport.failure import explained
from varcomm.transport.group import Group
from varcomm.transport.trace import span

__all__ = ["Reduction", "Scaling", "predivide_factor"]

_NAME = "reduce_scatter_v"

# Bytes of a count, and of whether there was one.
_COUNT = 16


@dataclass(frozen=True)
class Scaling:
    """How a sum is divided.

    Attributes
    ----------
    in_fp32 : bool
        Divide and sum in fp32 what travels narrow. Else what is sent is divided before, and the
        sum rounded before it is divided by the rest.
    before : float
        What each part is divided by.
    divisor : float or None
        What sums are divided by altogether; None is a count that travels with them.
    """

    in_fp32: bool
    before: float
    divisor: float | None


def predivide_factor(ranks: int) -> float:
    """Return the power of two near ``sqrt(P)`` by which FSDP divides before it sums.

    As large as what is left to divide by: so neither parts get too small nor their sums too large.

    >>> [predivide_factor(ranks) for ranks in (1, 2, 3, 4, 5, 8, 16, 64)]
    [1.0, 2.0, 2.0, 2.0, 4.0, 4.0, 4.0, 8.0]
    """
    factor = 1
    while factor * factor < ranks:
        factor *= 2
    return float(factor)


class Reduction:
    """A sum over ranks, under way, of which each rank gets its piece.

    What travels to a rank is its piece, a 1 or 0 for each parameter in it that says whether this
    rank has used it, and the count, where there is one.

    Parameters
    ----------
    split : Split
        Of the bucket.
    group : Group
        The ranks that sum.
    gradients : mapping
        From index to gradient, dense and all of `dtype`; those without one count as zeros.
    example : torch.Tensor
        Of which dtype and device the gradients are.
    scaling : Scaling
    count : torch.Tensor, optional
        Two int64, which are summed exactly; they travel with one of the buckets, to all ranks.
    """

    def __init__(
        self,
        split: Split,
        group: Group,
        gradients: Mapping[int, torch.Tensor],
        example: torch.Tensor,
        scaling: Scaling,
        count: torch.Tensor | None,
    ) -> None:
        self._scaling, self._ranks = scaling, group.size
        self._own = split.segments[group.rank]
        self._here = {index for index in split.members if index in gradients}
        self._slots = 0 if count is None else -(-_COUNT // example.itemsize)
        rows = [
            size + len(segments) + self._slots
            for size, segments in zip(split.sizes, split.segments, strict=True)
        ]
        self._explained = explained(_NAME, group)
        with span(_NAME), self._explained:
            sent = self._packed(split, gradients, example, count, rows)
            mine = [rows[group.rank]] * group.size
            self._works, self._received = packing.exchange(_NAME, group, sent, rows, mine)
        self._sent: torch.Tensor | None = sent

    def _packed(
        self,
        split: Split,
        gradients: Mapping[int, torch.Tensor],
        example: torch.Tensor,
        count: torch.Tensor | None,
        rows: list[int],
    ) -> torch.Tensor:
        """Return what is sent to all ranks, one after the other."""
        flat = {index: gradients[index].reshape(-1) for index in self._here}
        parts = [example.new_empty(0)]
        for segments in split.segments:
            for segment in segments:
                whole = flat.get(segment.index)
                if whole is None:
                    parts.append(example.new_zeros(len(segment)))
                else:
                    parts.append(whole[segment.start : segment.stop])
            used = example.new_ones(len(segments))
            for place, segment in enumerate(segments):
                if segment.index not in flat:
                    used[place] = 0
            parts += [used, example.new_zeros(self._slots)]
        packed = torch.cat(parts)
        values = [row[:n] for row, n in zip(packed.split(rows), split.sizes, strict=True)]
        if not self._scaling.in_fp32 and self._scaling.before != 1:
            torch._foreach_div_(values, self._scaling.before)
        if count is not None:
            bits = count.to(packed.device).view(torch.uint8)
            for row in packed.split(rows):
                row[len(row) - self._slots :].view(torch.uint8)[:_COUNT].copy_(bits)
        return packed

    def done(self) -> bool:
        """Tell whether everything has arrived."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Wait until everything has arrived, and let go of what was sent."""
        with self._explained:
            wait_for(self._works)
        self._works, self._sent = [], None

    def count(self) -> list[int]:
        """Return the sum of the counts of all ranks; after :meth:`wait`."""
        rows = self._received.view(self._ranks, -1)
        bits = rows[:, rows.shape[1] - self._slots :].contiguous().view(torch.uint8)
        counts: list[int] = bits[:, :_COUNT].contiguous().view(torch.int64).sum(0).tolist()
        return counts

    def total(self, divisor: float) -> torch.Tensor:
        """Return this rank's piece of the sum, divided; after :meth:`wait`."""
        scaling, size = self._scaling, sum(map(len, self._own))
        parts = [row[:size] for row in self._received.view(self._ranks, -1)]
        if scaling.in_fp32:
            total = accumulated(parts, True, 1 / scaling.before)
        else:
            total = accumulated(parts, True).to(self._received.dtype)
        rest = divisor / scaling.before
        return total if rest == 1 else total.div_(rest)

    def used(self) -> list[bool]:
        """Tell for each segment of this rank's piece whether a rank has used the parameter."""
        used = [segment.index in self._here for segment in self._own]
        if all(used):
            return used  # without looking at what may be on a GPU
        size = sum(map(len, self._own))
        flags = self._received.view(self._ranks, -1)[:, size : size + len(self._own)]
        anywhere: list[bool] = flags.ne(0).any(0).tolist()
        return anywhere
