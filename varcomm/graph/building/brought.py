"""What ranks bring of a graph, on its way to the ranks that are to own it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from varcomm.errors import ArgumentError, DisagreementError
from varcomm.graph.ascending import AscendingIds
from varcomm.graph.building.assemble import OwnedEdges, assemble
from varcomm.graph.building.directory import Directory
from varcomm.graph.building.tables import ends
from varcomm.graph.building.travel import Route
from varcomm.graph.partitioned_graph import EdgeType, NodeType, PartitionedGraph
from varcomm.graph.partitioners.assign_sharded import assign_sharded
from varcomm.graph.shard import NodeShard
from varcomm.ops.packing import taken
from varcomm.sizes import ShardSizes
from varcomm.transport.agreement import agree
from varcomm.transport.group import Group

__all__ = ["BroughtEdges", "BroughtNodes", "at_home", "by_position", "sent_to_owners"]


@dataclass(frozen=True)
class BroughtNodes:
    """What this rank brings of the nodes of one type.

    Attributes
    ----------
    ranges : ShardSizes
        Nodes that each rank speaks for: rank 0 for the first ``ranges[0]``, and so on.
    owner : torch.Tensor or None
        The ranks that are to own them; None for the rank itself.
    ids : torch.Tensor or None
        Which nodes the rows of `attributes` are of; None for those that it speaks for.
    attributes : mapping of str
        Rows.
    """

    ranges: ShardSizes
    owner: torch.Tensor | None
    ids: torch.Tensor | None
    attributes: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class BroughtEdges:
    """What this rank brings of the edges of one type, by the numbers of nodes in the whole graph.

    Attributes
    ----------
    edge_index : torch.Tensor
        int64, shape (2, e).
    attributes : mapping of str
        Rows.
    ids : torch.Tensor or None
        Positions of these edges in the whole graph; None if they follow each other.
    first : int
        The position of the first, if they follow each other.
    """

    edge_index: torch.Tensor
    attributes: Mapping[str, torch.Tensor]
    ids: torch.Tensor | None = None
    first: int = 0


def sent_to_owners(
    nodes: Mapping[NodeType, BroughtNodes],
    edges: Mapping[EdgeType, BroughtEdges],
    attributes: Mapping[str, Any],
    name: str,
    group: Group,
) -> PartitionedGraph:
    """Send everything where it belongs; collective."""
    directories, shards = {}, {}
    for node_type, own in nodes.items():
        directory = Directory.of(own.ranges, own.owner, group)
        directories[node_type] = directory
        mine = own.ranges.range(group.rank)
        device = next(iter(edges.values())).edge_index.device if edges else torch.device("cpu")
        ids = directory.owned(torch.arange(mine.start, mine.stop, device=device))
        rows = {key: directory.owned(value) for key, value in own.attributes.items()}
        shards[node_type] = NodeShard(group, directory.sizes, rows, AscendingIds.of(ids))
    owned = {
        edge_type: _owned_edges(brought, *(directories[end] for end in ends(edge_type)))
        for edge_type, brought in edges.items()
    }
    return assemble(shards, owned, attributes, name, group)


def _owned_edges(brought: BroughtEdges, sources: Directory, targets: Directory) -> OwnedEdges:
    """Exchange the edges that this rank has read for those into its own nodes; collective."""
    if sources is targets:
        source, target = targets.look_up(*brought.edge_index)
    else:
        (source,) = sources.look_up(brought.edge_index[0])
        (target,) = targets.look_up(brought.edge_index[1])
    route = Route.to(targets.sizes.owner(target), targets.group)
    source, target = route.carry(source), route.carry(target)
    rows = {key: route.carry(value) for key, value in brought.attributes.items()}
    if brought.ids is None:
        # They come sender by sender, and in each sender's order: so these ascend.
        last = brought.first + brought.edge_index.shape[1]
        ids = route.carry(torch.arange(brought.first, last, device=source.device))
        return OwnedEdges(source, target, ids, rows)
    ids, order = route.carry(brought.ids).sort()
    rows = {key: taken(value, order) for key, value in rows.items()}
    return OwnedEdges(source[order], target[order], ids, rows)


def at_home(nodes: BroughtNodes, group: Group) -> BroughtNodes:
    """Send rows to the ranks that speak for their nodes; collective."""
    if nodes.ids is None:
        return nodes
    route = Route.to(nodes.ranges.owner(nodes.ids), group)
    ids = route.carry(nodes.ids)
    order = ids.argsort()
    mine = nodes.ranges.range(group.rank)

    def check() -> None:
        known = torch.bincount(ids - mine.start, minlength=len(mine))
        if len(wrong := torch.nonzero(known != 1)):
            node = int(wrong[0])
            raise DisagreementError(
                f"node_ids must name each node once, on all ranks together; node "
                f"{mine.start + node} was named {int(known[node])} times."
            )

    agree("graph.from_edges", check, group)
    rows = {key: taken(route.carry(value), order) for key, value in nodes.attributes.items()}
    return BroughtNodes(nodes.ranges, nodes.owner, None, rows)


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
    return BroughtNodes(nodes.ranges, owner.to(pos.device), None, nodes.attributes)
