"""Delta-coded ids: strictly ascending ids in about one byte each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

__all__ = ["AscendingIds"]

# A gap that does not fit into a byte is stored as 255, and its excess in a list of its own.
_MORE = 255


@dataclass(frozen=True, eq=False)
class AscendingIds:
    """Strictly ascending ids: `gaps` to the previous id, from -1 on, and the excess of each 255.

    As int64, the ids of edges would need half the memory of the edges; few calls read them.
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
        """Return the ids on another device."""
        return AscendingIds(self.gaps.to(device), self.rest.to(device))
