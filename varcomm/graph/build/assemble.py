"""One rank's part of a graph, assembled from rows that stand on their owners or are sent there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from varcomm.errors import ArgumentError
from varcomm.graph.build.groups import GroupIds, ids_of_groups, with_groups
from varcomm.graph.build.move import Move
from varcomm.graph.build.pyg_data import EdgeTable, NodeTable, ends
from varcomm.graph.directory import Directory
from varcomm.graph.edge_shard import EdgeShard
from varcomm.graph.index.partitioned_index import plain
from varcomm.graph.node_shard import NodeShard, as_tensor, described
from varcomm.graph.partitioned_graph import EdgeType, NodeType, PartitionedGraph
from varcomm.ops.packing import taken
from varcomm.plan.checks import checked_range
from varcomm.plan.exchange_plan import ExchangePlan
from varcomm.sizes import ShardSizes, holds_integers
from varcomm.transport.agreement import agree_and_share, share
from varcomm.transport.group import Group


@dataclass(frozen=True)
class Edges:
    """Edges of one type on a rank.

    `edge_index`, (2, e), holds node ids or *global numbers*, which count the nodes of a type rank
    after rank: the owner of a node follows from its number. `ids` are positions in the full graph,
    ascending on the owner.
    """

    edge_index: torch.Tensor
    ids: torch.Tensor
    attributes: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Numbering:
    """Global numbers of the nodes of one type, on a process that has the full graph.

    `owner` is the rank of each node, `number` its global number, (N,); `order` the inverse of
    `number`; `sizes` are nodes per rank.
    """

    owner: torch.Tensor
    sizes: ShardSizes
    order: torch.Tensor
    number: torch.Tensor

    @classmethod
    def of(cls, owner: torch.Tensor, ranks: int) -> Self:
        """Count the nodes of each owner, rank after rank."""
        sizes = ShardSizes(torch.bincount(owner, minlength=ranks).tolist())
        order = torch.sort(owner, stable=True).indices
        number = torch.empty_like(order)
        number[order] = torch.arange(len(order), device=order.device)
        return cls(owner, sizes, order, number)

    def shard(self, nodes: NodeTable, group: Group) -> NodeShard:
        """Return the nodes that this rank owns."""
        mine = self.sizes.range(group.rank)
        ids = self.order[mine.start : mine.stop]
        attributes = {key: taken(value, ids) for key, value in nodes.attributes.items()}
        return NodeShard(group, self.sizes, attributes, ids)


def checked_owner(owner: Any, nodes: int, size: int, name: str = "method") -> torch.Tensor:
    """Return the rank of each node as int64, if `owner` is valid for `size` ranks."""
    owner = as_tensor(owner)
    if not isinstance(owner, torch.Tensor) or owner.shape != (nodes,) or not holds_integers(owner):
        raise ArgumentError(
            f"{name}, if not a name, must be a list, an array or a tensor with the rank of each of "
            f"the {nodes} nodes, an integer; got {described(owner)}."
        )
    ranks: torch.Tensor = plain(owner.to(torch.int64))
    checked_range(ranks, size, name, "ranks")
    return ranks


def owned_edges(edges: EdgeTable, rank: int, sources: Numbering, targets: Numbering) -> Edges:
    """Return the edges into nodes that a rank owns, from all edges of the full graph."""
    # a table of bools fits into the cache, a table of numbers does not
    is_mine = targets.owner == rank
    ids = torch.nonzero(is_mine[edges.edge_index[1]]).view(-1)
    source, target = edges.edge_index
    numbers = torch.stack([sources.number[source[ids]], targets.number[target[ids]]])
    return Edges(numbers, ids, {key: taken(v, ids) for key, v in edges.attributes.items()})


def assemble(
    nodes: Mapping[NodeType, NodeShard],
    edges: Mapping[EdgeType, Edges],
    attributes: Mapping[str, Any],
    method: str,
    group: Group,
    groups: Sequence[str],
) -> PartitionedGraph:
    """Build this rank's part of the graph from owned edges by global numbers; collective.

    `groups` are the names of attributes of nodes that hold ids of groups.
    """

    def check() -> list[GroupIds]:
        return ids_of_groups({key: own.attributes for key, own in nodes.items()}, groups)

    def outline(found: list[GroupIds]) -> tuple[list[int], list[int]]:
        return [len(own.ids) for own in edges.values()], [each.size for each in found]

    found, outlines = agree_and_share("graph.partition", check, outline, group)
    counts, of_groups = zip(*outlines, strict=True)
    nodes = with_groups(nodes, found, [*map(max, zip(*of_groups, strict=True))])
    shards = {}
    for (edge_type, own), sizes in zip(edges.items(), zip(*counts, strict=True), strict=True):
        sources, targets = (nodes[end] for end in ends(edge_type))
        edge_index, halo = localised(own.edge_index, sources.sizes, targets.sizes, group)
        plan = ExchangePlan.from_needed(halo, sources.sizes, group=group.process_group)
        shards[edge_type] = EdgeShard(
            group=group,
            sizes=ShardSizes(sizes),
            attributes=own.attributes,
            ids=own.ids,
            local_ids=edge_index,
            halo_ids=plan(sources.owned_ids),
            plan=plan,
            num_targets=targets.num_owned,
        )
    return PartitionedGraph(nodes, shards, dict(attributes), method)


def localised(
    numbers: torch.Tensor, sources: ShardSizes, targets: ShardSizes, group: Group
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return edges in local numbers, and the halo's global numbers, ascending and so by owner."""
    mine, source = sources.range(group.rank), numbers[0]
    edge_index = numbers - numbers.new_tensor([[mine.start], [targets.offsets[group.rank]]])
    is_halo = torch.nonzero((source < mine.start) | (source >= mine.stop)).view(-1)
    halo, position = torch.unique(source[is_halo], return_inverse=True)
    edge_index[0, is_halo] = position + len(mine)
    return edge_index, halo


@dataclass(frozen=True)
class BroughtNodes:
    """The nodes of one type that this rank contributes: ``ranges.range(rank)`` in some order.

    `owner` holds their future owners (None: this rank), and `ids` their ids in the full graph
    (None: the range).
    """

    ranges: ShardSizes
    attributes: Mapping[str, torch.Tensor]
    owner: torch.Tensor | None = None
    ids: torch.Tensor | None = None


def _placed(own: BroughtNodes, group: Group, device: torch.device) -> tuple[Directory, NodeShard]:
    """Send nodes to their owners; return global numbers by contributed nodes, and owned nodes."""
    mine, sizes, numbers = own.ranges.range(group.rank), own.ranges, None
    ids = torch.arange(mine.start, mine.stop, device=device) if own.ids is None else own.ids
    rows = {key: value.detach() for key, value in own.attributes.items()}
    if own.owner is not None:
        move = Move.to(own.owner, ids, group)
        ids, rows = move.ids, move.rows(rows)
        sizes = ShardSizes.from_local(len(ids), group.process_group)
        numbers = move.numbers(sizes.offsets[group.rank])
    elif own.ids is not None:
        in_order = bool((ids.diff() > 0).all())
        if not all(share("graph.partition", lambda: in_order, group)):
            ids, order = ids.sort()
            numbers = order.argsort() + sizes.offsets[group.rank]
            rows = {key: taken(value, order) for key, value in rows.items()}
    return Directory(group, sizes, own.ranges, numbers), NodeShard(group, sizes, rows, ids)


def sent_to_owners(
    nodes: Mapping[NodeType, BroughtNodes],
    edges: Mapping[EdgeType, Edges],
    attributes: Mapping[str, Any],
    name: str,
    group: Group,
    groups: Sequence[str],
) -> PartitionedGraph:
    """Send nodes and edges to their owners, and build the graph; collective.

    Ends of edges count the contributed nodes rank by rank.
    """
    devices = [brought.ids.device for brought in edges.values()] or [torch.device("cpu")]
    placed = {key: _placed(own, group, devices[0]) for key, own in nodes.items()}
    owned = {
        key: _owned_edges(brought, *(placed[end][0] for end in ends(key)))
        for key, brought in edges.items()
    }
    shards = {key: shard for key, (_, shard) in placed.items()}
    return assemble(shards, owned, attributes, name, group, groups)


def _owned_edges(brought: Edges, sources: Directory, targets: Directory) -> Edges:
    """Exchange contributed edges for the edges into this rank's nodes; collective."""
    edge_index, ids, rows = brought.edge_index, brought.ids, brought.attributes
    if not bool((ids.diff() > 0).all()):
        ids, order = ids.sort()
        edge_index = edge_index[:, order]
        rows = {key: taken(value, order) for key, value in rows.items()}
    if sources is targets:
        edge_index = sources.look_up(edge_index)
    else:
        edge_index = torch.stack([sources.look_up(edge_index[0]), targets.look_up(edge_index[1])])
    move = Move.to(targets.sizes.owner(edge_index[1]), ids, targets.group)
    return moved_edges(move, edge_index, rows)


def moved_edges(
    move: Move, edge_index: torch.Tensor, attributes: Mapping[str, torch.Tensor]
) -> Edges:
    """Return the edges by global numbers that this rank has after a move; collective."""
    source, target = (move.row(end) for end in edge_index)
    return Edges(torch.stack([source, target]), move.ids, move.rows(attributes))
