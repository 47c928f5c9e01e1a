"""Who owns which node: a directory of which each rank keeps a piece."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from varcomm.graph.building.travel import Route
from varcomm.plan.exchange_plan import ExchangePlan
from varcomm.sizes import ShardSizes
from varcomm.transport.group import Group

__all__ = ["Directory"]


@dataclass(frozen=True, eq=False)
class Directory:
    """From the numbers that nodes have in the whole graph to their global numbers.

    Global numbers count the nodes rank after rank, each rank's own in the order of the whole graph:
    then owners are found by arithmetic. Rank r keeps those of the nodes in ``ranges.range(r)``, and
    nobody has more than his range and what he asked for.

    Attributes
    ----------
    ranges : ShardSizes
        For how many nodes each rank keeps the directory.
    sizes : ShardSizes
        Nodes that each rank owns.
    numbers : torch.Tensor or None
        Global numbers of this rank's range; None if they are the numbers in the whole graph.
    route : Route or None
        From ranges to owners; None if these are the same ranks.
    """

    group: Group
    ranges: ShardSizes
    sizes: ShardSizes
    numbers: torch.Tensor | None
    route: Route | None

    @classmethod
    def of(cls, ranges: ShardSizes, owner: torch.Tensor | None, group: Group) -> Self:
        """Make a directory; collective.

        Parameters
        ----------
        ranges : ShardSizes
            Nodes whose owner each rank knows.
        owner : torch.Tensor or None
            The ranks that own the nodes of this rank's range; None on all ranks for itself.
        group : Group
            The ranks.
        """
        if owner is None:
            return cls(group, ranges, ranges, None, None)
        route = Route.to(owner, group)
        sizes = ShardSizes.from_local(sum(route.recv), group.process_group)
        # An owner's nodes come range by range, which is the order of the whole graph.
        first = torch.tensor(route.recv, dtype=torch.int64, device=owner.device)
        first = first.cumsum(0) - first + sizes.offsets[group.rank]
        first = Route.one_each(group).carry(first)
        counts = torch.tensor(route.send, dtype=torch.int64, device=owner.device)
        shift = (first - counts.cumsum(0) + counts).repeat_interleave(counts)
        numbers = torch.arange(len(owner), device=owner.device) + shift
        if route.order is not None:
            numbers = torch.empty_like(numbers).index_copy_(0, route.order, numbers)
        return cls(group, ranges, sizes, numbers, route)

    def owned(self, rows: torch.Tensor) -> torch.Tensor:
        """Send rows of this rank's range to the owners; return those of its own nodes; collective.

        They come in the order of the whole graph.
        """
        return rows.detach() if self.route is None else self.route.carry(rows)

    def look_up(self, *ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the global numbers of nodes, in several lists of them; collective.

        Each rank asks for each node once, however often it stands in its lists.
        """
        if self.numbers is None:
            return ids
        different = [torch.unique(some, return_inverse=True) for some in ids]
        asked = torch.unique(torch.cat([some for some, _ in different]))
        # ascending, hence range by range
        plan = ExchangePlan.from_needed(asked, self.ranges, group=self.group.process_group)
        numbers = plan(self.numbers)
        return tuple(numbers[torch.searchsorted(asked, some)][place] for some, place in different)
