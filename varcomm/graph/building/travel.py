"""Rows on their way to the rank that is to own them, when a graph is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from varcomm.ops.all_to_all_v import all_to_all_v
from varcomm.ops.packing import taken
from varcomm.transport.group import Group

__all__ = ["Route"]


@dataclass(frozen=True, eq=False)
class Route:
    """Which of this rank's rows go to which rank.

    What arrives stands sender by sender, and in each sender's order.

    Attributes
    ----------
    order : torch.Tensor or None
        Own rows, those for rank 0 first; None if they stand in that order.
    send, recv : tuple of int
        Rows for, and from, each rank.
    """

    group: Group
    order: torch.Tensor | None
    send: tuple[int, ...]
    recv: tuple[int, ...]

    @classmethod
    def to(cls, destination: torch.Tensor, group: Group) -> Self:
        """Make a route from the rank to which each row goes, int64 of shape (rows,); collective."""
        counts = torch.bincount(destination, minlength=group.size)
        in_order = bool((destination.diff() >= 0).all())
        order = None if in_order else torch.sort(destination, stable=True).indices
        recv = cls.one_each(group).carry(counts)
        return cls(group, order, tuple(counts.tolist()), tuple(recv.tolist()))

    @classmethod
    def one_each(cls, group: Group) -> Self:
        """Return the route of one row from each rank to each."""
        ones = (1,) * group.size
        return cls(group, None, ones, ones)

    def carry(self, rows: torch.Tensor) -> torch.Tensor:
        """Send rows, (rows, *F), and return those that arrive; collective, not differentiable."""
        rows = rows.detach()
        if self.order is not None:
            rows = taken(rows, self.order)
        return all_to_all_v(rows, self.send, self.recv, group=self.group.process_group)
