"""Directory of rows: the owner of any id of the full graph, without a full-size map on any rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from varcomm.plan.exchange_plan import ExchangePlan
from varcomm.sizes import ShardSizes
from varcomm.transport.group import Group


@dataclass(frozen=True, eq=False)
class Directory:
    """Global numbers of rows by their ids; each rank stores the numbers of a range of ids.

    Global numbers count the rows of rank 0, then those of rank 1, and so on: `sizes` are rows per
    rank, `ranges` ids per rank, and `numbers` belong to this rank's range (None: its ids).
    """

    group: Group
    sizes: ShardSizes
    ranges: ShardSizes
    numbers: torch.Tensor | None

    @classmethod
    def of(cls, owned_ids: torch.Tensor, sizes: ShardSizes, group: Group) -> Self:
        """Send the number of each owned row to the rank that stores it; collective."""
        ranges = ShardSizes.balanced(sizes.total, group.size)
        counts = torch.bincount(ranges.owner(owned_ids), minlength=group.size)
        position = torch.arange(len(owned_ids), device=owned_ids.device)
        plan = ExchangePlan.from_indices(
            position.split(counts.tolist()), len(position), group=group.process_group
        )
        pairs = torch.stack([owned_ids, position + sizes.offsets[group.rank]], dim=1)
        ids, received = plan(pairs).unbind(1)
        numbers = torch.empty_like(received)
        numbers[ids - ranges.offsets[group.rank]] = received
        return cls(group, sizes, ranges, numbers)

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the numbers of rows; collective. A rank requests each id once."""
        if self.numbers is None:
            return ids
        plan, place = needed_once(ids, self.ranges, self.group)
        return plan(self.numbers)[place]

    def fetching(self, ids: torch.Tensor) -> tuple[ExchangePlan, torch.Tensor]:
        """Return a plan to fetch rows, and the place of each id among them; collective."""
        return needed_once(self.look_up(ids), self.sizes, self.group)


def needed_once(
    numbers: torch.Tensor, sizes: ShardSizes, group: Group
) -> tuple[ExchangePlan, torch.Tensor]:
    """Return a plan to fetch each row once, and the place of each number among them; collective."""
    needed, place = torch.unique(numbers, return_inverse=True)
    return ExchangePlan.from_needed(needed, sizes, group=group.process_group), place
