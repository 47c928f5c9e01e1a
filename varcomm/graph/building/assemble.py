"""One rank's part of a graph: owned nodes, the edges into them, and the halo."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from varcomm.errors import ArgumentError
from varcomm.graph.building.tables import EdgeTable, NodeTable, ends
from varcomm.graph.delta_ids import AscendingIds
from varcomm.graph.edge_shard import EdgeShard
from varcomm.graph.partitioned_graph import EdgeType, NodeType, PartitionedGraph
from varcomm.graph.shard import NodeShard, described
from varcomm.plan.checks import checked_range
from varcomm.plan.exchange_plan import ExchangePlan
from varcomm.sizes import ShardSizes, holds_integers
from varcomm.transport.agreement import share
from varcomm.transport.group import Group

__all__ = ["Numbering", "OwnedEdges", "assemble", "checked_owner", "localised", "owned_edges"]


@dataclass(frozen=True)
class OwnedEdges:
    """The edges of one type into nodes that a rank owns.

    `source` and `target` are *global numbers*, which count the nodes of a type rank after rank, so
    that the owner of a node follows from its number. `ids` are ascending positions in the full
    graph.
    """

    source: torch.Tensor
    target: torch.Tensor
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
        attributes = {key: value.rows(ids) for key, value in nodes.attributes.items()}
        return NodeShard(group, self.sizes, attributes, AscendingIds.of(ids))


def checked_owner(owner: Any, nodes: int, size: int) -> torch.Tensor:
    """Return the rank of each node as int64, if `owner` is valid for `size` ranks."""
    if isinstance(owner, np.ndarray):
        # of arrays without integers only dtype and shape matter, for the message
        has_ints = owner.dtype.kind in "iu"
        owner = torch.tensor(owner.astype(np.int64) if has_ints else np.zeros(owner.shape))
    if not isinstance(owner, torch.Tensor) or owner.shape != (nodes,) or not holds_integers(owner):
        raise ArgumentError(
            f"method, if not a name, must hold the rank of each of the {nodes} nodes as integers; "
            f"got {described(owner)}."
        )
    owner = owner.to(torch.int64)
    checked_range(owner, size, "method", "ranks")
    return owner


def owned_edges(edges: EdgeTable, rank: int, sources: Numbering, targets: Numbering) -> OwnedEdges:
    """Return the edges into nodes that a rank owns, from all edges of the full graph."""
    # a table of bools fits into the cache, a table of numbers does not
    is_mine = targets.owner == rank
    ids = torch.nonzero(is_mine[edges.edge_index[1]]).view(-1)
    return OwnedEdges(
        sources.number[edges.edge_index[0][ids]],
        targets.number[edges.edge_index[1][ids]],
        ids,
        {key: value.rows(ids) for key, value in edges.attributes.items()},
    )


def assemble(
    nodes: Mapping[NodeType, NodeShard],
    edges: Mapping[EdgeType, OwnedEdges],
    attributes: Mapping[str, Any],
    method: str,
    group: Group,
) -> PartitionedGraph:
    """Build this rank's part of the graph; collective."""
    counts = share("graph.partition", lambda: [len(own.source) for own in edges.values()], group)
    shards = {}
    for (edge_type, own), sizes in zip(edges.items(), zip(*counts, strict=True), strict=True):
        sources, targets = (nodes[end] for end in ends(edge_type))
        edge_index, halo = localised(own.source, own.target, sources.sizes, targets.sizes, group)
        plan = ExchangePlan.from_needed(halo, sources.sizes, group=group.process_group)
        shards[edge_type] = EdgeShard(
            group=group,
            sizes=ShardSizes(sizes),
            attributes=own.attributes,
            ids=AscendingIds.of(own.ids),
            edge_index=edge_index,
            halo_ids=plan(sources.owned_ids),
            plan=plan,
            num_targets=targets.num_owned,
        )
    return PartitionedGraph(dict(nodes), shards, dict(attributes), method)


def localised(
    source: torch.Tensor,
    target: torch.Tensor,
    sources: ShardSizes,
    targets: ShardSizes,
    group: Group,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return edges in local numbers, and the halo's global numbers, ascending and so by owner."""
    mine = sources.range(group.rank)
    edge_index = torch.stack([source, target])
    edge_index[0] -= mine.start
    edge_index[1] -= targets.offsets[group.rank]
    is_halo = torch.nonzero((source < mine.start) | (source >= mine.stop)).view(-1)
    halo, position = torch.unique(source[is_halo], return_inverse=True)
    edge_index[0, is_halo] = position + len(mine)
    return edge_index, halo
