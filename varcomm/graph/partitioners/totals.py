"""What is counted over all rows, whether one process holds them or each rank holds some.

An algorithm that learns of other ranks' rows only through these gives the same result on any number
of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from varcomm.ops.all_gather_v import all_gather_v
from varcomm.ops.all_reduce import all_reduce
from varcomm.ops.all_to_all_v import all_to_all_v
from varcomm.sizes import ShardSizes
from varcomm.transport.group import Group

__all__ = ["Alone", "Everyone", "Together"]


class Everyone(Protocol):
    """All who hold rows. Every one of them calls the same, with tensors of one shape and dtype."""

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over all."""

    def before(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over those whose rows come before this one's."""

    def least(self, x: torch.Tensor) -> torch.Tensor:
        """Return the least of all, entry by entry."""


class Alone:
    """One process that holds all rows."""

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x`."""
        return x

    def before(self, x: torch.Tensor) -> torch.Tensor:
        """Return zeros."""
        return torch.zeros_like(x)

    def least(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x`."""
        return x


@dataclass(frozen=True)
class Together:
    """The ranks of a group, whose rows come in rank order.

    Each rank receives about twice the bytes of the tensor, however many ranks there are.
    """

    group: Group

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks."""
        return all_reduce(x, group=self.group.process_group)

    def before(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over lower ranks."""
        ends = self._piece_of_all(x, lambda ranks: ranks.cumsum(0) - ranks)
        sizes, whole_pieces = self._sizes(x)
        back = all_to_all_v(ends.reshape(-1), whole_pieces, sizes, group=self.group.process_group)
        return back.view(x.shape)

    def least(self, x: torch.Tensor) -> torch.Tensor:
        """Return the least over ranks."""
        piece = self._piece_of_all(x, lambda ranks: ranks.amin(0))
        whole = all_gather_v(piece, self._sizes(x)[0], group=self.group.process_group)
        return whole.view(x.shape)

    def _piece_of_all(
        self, x: torch.Tensor, fold: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Fold a piece of `x`, which all ranks send here, while others do so with other pieces."""
        sizes, whole_pieces = self._sizes(x)
        got = all_to_all_v(x.reshape(-1), sizes, whole_pieces, group=self.group.process_group)
        return fold(got.view(self.group.size, -1))

    def _sizes(self, x: torch.Tensor) -> tuple[ShardSizes, list[int]]:
        """Return what pieces are cut into, and this rank's own piece once for each rank."""
        sizes = ShardSizes.balanced(x.numel(), self.group.size)
        return sizes, [sizes[self.group.rank]] * self.group.size
