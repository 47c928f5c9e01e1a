"""Redistribution of a graph: from the rows that each rank has to the ranks that own them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from varcomm.errors import ArgumentError, DisagreementError
from varcomm.graph.building.assemble import OwnedEdges, assemble
from varcomm.graph.building.tables import ends
from varcomm.graph.delta_ids import AscendingIds
from varcomm.graph.partitioned_graph import EdgeType, NodeType, PartitionedGraph
from varcomm.graph.partitioners.assign import assign_sharded
from varcomm.graph.shard import NodeShard
from varcomm.ops.all_to_all_v import all_to_all_v
from varcomm.ops.packing import taken
from varcomm.plan.exchange_plan import ExchangePlan
from varcomm.sizes import ShardSizes
from varcomm.transport.agreement import agree
from varcomm.transport.group import Group

__all__ = ["BroughtEdges", "BroughtNodes", "Shuffle", "at_home", "by_position", "sent_to_owners"]


@dataclass(frozen=True)
class BroughtNodes:
    """The nodes of one type that this rank contributes.

    Rank r describes the nodes ``ranges.range(r)``. `owner` holds the future owners of this rank's
    range (None: this rank), and `ids` the nodes of the rows in `attributes` (None: the range).
    """

    ranges: ShardSizes
    owner: torch.Tensor | None
    ids: torch.Tensor | None
    attributes: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class BroughtEdges:
    """The edges of one type that this rank contributes, by node ids, (2, e).

    `ids` are their positions in the full graph, int64 of shape (e,).
    """

    edge_index: torch.Tensor
    ids: torch.Tensor
    attributes: Mapping[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Shuffle:
    """Destinations of this rank's rows; received rows stand by sender, in the sender's order.

    `order` sorts this rank's rows by destination (None: sorted); `send` and `recv` are rows per
    rank.
    """

    group: Group
    order: torch.Tensor | None
    send: tuple[int, ...]
    recv: tuple[int, ...]

    @classmethod
    def to(cls, destination: torch.Tensor, group: Group) -> Self:
        """Plan from the rank to which each row goes, int64 of shape (rows,); collective."""
        counts = torch.bincount(destination, minlength=group.size)
        in_order = bool((destination.diff() >= 0).all())
        order = None if in_order else torch.sort(destination, stable=True).indices
        recv = cls.one_each(group).carry(counts)
        return cls(group, order, tuple(counts.tolist()), tuple(recv.tolist()))

    @classmethod
    def one_each(cls, group: Group) -> Self:
        """Return the shuffle of one row from each rank to each rank."""
        ones = (1,) * group.size
        return cls(group, None, ones, ones)

    def carry(self, rows: torch.Tensor) -> torch.Tensor:
        """Send rows, (rows, *F), and return the received rows; collective, not differentiable."""
        rows = rows.detach()
        if self.order is not None:
            rows = taken(rows, self.order)
        return all_to_all_v(rows, self.send, self.recv, group=self.group.process_group)


@dataclass(frozen=True, eq=False)
class _Directory:
    """Global numbers of nodes by their ids; each rank stores those of its range.

    `sizes` are nodes per owner; `numbers` of this rank's range (None: equal to the ids); `shuffle`
    goes from ranges to owners (None: these are the same ranks).
    """

    group: Group
    ranges: ShardSizes
    sizes: ShardSizes
    numbers: torch.Tensor | None
    shuffle: Shuffle | None

    @classmethod
    def of(cls, ranges: ShardSizes, owner: torch.Tensor | None, group: Group) -> Self:
        """Build a directory from the owners of this rank's range; collective."""
        if owner is None:
            return cls(group, ranges, ranges, None, None)
        shuffle = Shuffle.to(owner, group)
        sizes = ShardSizes.from_local(sum(shuffle.recv), group.process_group)
        # an owner's nodes arrive range by range, which is the order of the full graph
        counts, first = torch.tensor([shuffle.send, shuffle.recv], device=owner.device)
        first = first.cumsum(0) - first + sizes.offsets[group.rank]
        first = Shuffle.one_each(group).carry(first)
        shift = (first - counts.cumsum(0) + counts).repeat_interleave(counts)
        numbers = torch.arange(len(owner), device=owner.device) + shift
        if shuffle.order is not None:
            numbers = torch.empty_like(numbers).index_copy_(0, shuffle.order, numbers)
        return cls(group, ranges, sizes, numbers, shuffle)

    def owned(self, rows: torch.Tensor) -> torch.Tensor:
        """Exchange rows of this rank's range for rows of its owned nodes; collective."""
        return rows.detach() if self.shuffle is None else self.shuffle.carry(rows)

    def look_up(self, *ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the global numbers of several lists of nodes; collective.

        A rank requests each node once, however often it stands in the lists.
        """
        if self.numbers is None:
            return ids
        different = [torch.unique(some, return_inverse=True) for some in ids]
        asked = torch.unique(torch.cat([some for some, _ in different]))
        # ascending, hence range by range
        plan = ExchangePlan.from_needed(asked, self.ranges, group=self.group.process_group)
        numbers = plan(self.numbers)
        return tuple(numbers[torch.searchsorted(asked, some)][place] for some, place in different)


def sent_to_owners(
    nodes: Mapping[NodeType, BroughtNodes],
    edges: Mapping[EdgeType, BroughtEdges],
    attributes: Mapping[str, Any],
    name: str,
    group: Group,
) -> PartitionedGraph:
    """Send nodes and edges to their owners, and build the graph; collective."""
    devices = [brought.ids.device for brought in edges.values()] or [torch.device("cpu")]
    directories, shards = {}, {}
    for node_type, own in nodes.items():
        directory = directories[node_type] = _Directory.of(own.ranges, own.owner, group)
        mine = own.ranges.range(group.rank)
        ids = directory.owned(torch.arange(mine.start, mine.stop, device=devices[0]))
        rows = {key: directory.owned(value) for key, value in own.attributes.items()}
        shards[node_type] = NodeShard(group, directory.sizes, rows, AscendingIds.of(ids))
    owned = {
        edge_type: _owned_edges(brought, *(directories[end] for end in ends(edge_type)))
        for edge_type, brought in edges.items()
    }
    return assemble(shards, owned, attributes, name, group)


def _owned_edges(brought: BroughtEdges, sources: _Directory, targets: _Directory) -> OwnedEdges:
    """Exchange contributed edges for the edges into this rank's nodes; collective."""
    if sources is targets:
        source, target = targets.look_up(*brought.edge_index)
    else:
        (source,) = sources.look_up(brought.edge_index[0])
        (target,) = targets.look_up(brought.edge_index[1])
    shuffle = Shuffle.to(targets.sizes.owner(target), targets.group)
    columns = {"source": source, "target": target, "ids": brought.ids}
    columns = {key: shuffle.carry(value) for key, value in columns.items()}
    rows = {key: shuffle.carry(value) for key, value in brought.attributes.items()}
    if not bool((columns["ids"].diff() > 0).all()):
        order = columns["ids"].argsort()
        columns = {key: value[order] for key, value in columns.items()}
        rows = {key: taken(value, order) for key, value in rows.items()}
    return OwnedEdges(**columns, attributes=rows)


def at_home(nodes: BroughtNodes, group: Group) -> BroughtNodes:
    """Send rows to the ranks in whose ranges their nodes are; collective."""
    if nodes.ids is None:
        return nodes
    shuffle = Shuffle.to(nodes.ranges.owner(nodes.ids), group)
    ids = shuffle.carry(nodes.ids)
    mine = nodes.ranges.range(group.rank)

    def check() -> None:
        counts = torch.bincount(ids - mine.start, minlength=len(mine))
        if len(wrong := torch.nonzero(counts != 1)):
            node = int(wrong[0])
            raise DisagreementError(
                f"node_ids must name each node once, on all ranks together; node "
                f"{mine.start + node} was named {int(counts[node])} times."
            )

    agree("graph.from_edges", check, group)
    order = ids.argsort()
    rows = {key: taken(shuffle.carry(value), order) for key, value in nodes.attributes.items()}
    return replace(nodes, ids=None, attributes=rows)


def by_position(nodes: BroughtNodes, method: str, group: Group) -> BroughtNodes:
    """Assign nodes by their positions; collective."""

    def check() -> torch.Tensor:
        if "pos" not in nodes.attributes:
            raise ArgumentError(
                f'method="{method}" needs the positions of nodes in node_attrs["pos"].'
            )
        return nodes.attributes["pos"]

    pos = agree("graph.from_edges", check, group)
    owner = assign_sharded(pos, group.size, method, group=group.process_group)
    return replace(nodes, owner=owner)
