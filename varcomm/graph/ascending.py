"""Ascending ids, kept in a byte each: which rows of the whole graph are a rank's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

__all__ = ["AscendingIds"]

# A gap that does not fit into a byte is this one's, and the rest stands in a list of its own.
_MORE = 255


@dataclass(frozen=True, eq=False)
class AscendingIds:
    """Strictly ascending ids by their gaps.

    A rank's edges are in the order of the whole graph, where on average every P-th edge is its own.
    As int64 their numbers would take half as much again as the edges themselves, and they are read
    only when edges are gathered, scattered or saved.

    Attributes
    ----------
    gaps : torch.Tensor
        Differences to the id before, to -1 for the first; uint8, shape (n,).
    rest : torch.Tensor
        What does not fit, for each gap of 255; int64.

    Examples
    --------
    >>> ids = AscendingIds.of(torch.tensor([3, 4, 1000]))
    >>> ids.gaps.tolist(), ids.decoded().tolist(), len(ids)
    ([4, 1, 255], [3, 4, 1000], 3)
    """

    gaps: torch.Tensor
    rest: torch.Tensor

    @classmethod
    def of(cls, ids: torch.Tensor) -> Self:
        """Encode ids, int64 of shape (n,)."""
        gaps = ids.diff(prepend=ids.new_full((1,), -1))
        rest = gaps[gaps >= _MORE] - _MORE
        return cls(gaps.clamp_(max=_MORE).to(torch.uint8), rest)

    def decoded(self) -> torch.Tensor:
        """Return the ids, int64 of shape (n,)."""
        gaps = self.gaps.to(torch.int64)
        gaps[self.gaps == _MORE] += self.rest
        return gaps.cumsum(0).sub_(1)

    def to(self, device: torch.device | str) -> AscendingIds:
        """Return the same on another device."""
        return AscendingIds(self.gaps.to(device), self.rest.to(device))

    def __len__(self) -> int:
        return len(self.gaps)
