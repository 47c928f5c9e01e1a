"""From the edges that a rank owns, in global numbers, to its part of the graph in local ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from varcomm.graph.ascending import AscendingIds
from varcomm.graph.building.tables import ends
from varcomm.graph.edge_shard import EdgeShard
from varcomm.graph.partitioned_graph import EdgeType, NodeType, PartitionedGraph
from varcomm.graph.shard import NodeShard
from varcomm.plan.exchange_plan import ExchangePlan
from varcomm.sizes import ShardSizes
from varcomm.transport.agreement import share
from varcomm.transport.group import Group

__all__ = ["OwnedEdges", "assemble", "localised"]


@dataclass(frozen=True)
class OwnedEdges:
    """The edges of one type into nodes that a rank owns.

    Nodes have *global numbers* here: all nodes of a type counted rank after rank, so that owners
    are found by arithmetic. Their numbers in the whole graph are another thing, `ids`.

    Attributes
    ----------
    source, target : torch.Tensor
        Global numbers, int64 of shape (E,).
    ids : torch.Tensor
        Positions of the edges in the whole graph, ascending.
    attributes : mapping of str
        Their attributes.
    """

    source: torch.Tensor
    target: torch.Tensor
    ids: torch.Tensor
    attributes: Mapping[str, Any]


def assemble(
    nodes: Mapping[NodeType, NodeShard],
    edges: Mapping[EdgeType, OwnedEdges],
    attributes: Mapping[str, Any],
    method: str,
    group: Group,
) -> PartitionedGraph:
    """Make a rank's part of the graph; collective."""
    counts = share("graph.partition", lambda: [len(own.source) for own in edges.values()], group)
    shards = {}
    for number, (edge_type, own) in enumerate(edges.items()):
        sources, targets = (nodes[end] for end in ends(edge_type))
        edge_index, halo = localised(own.source, own.target, sources.sizes, targets.sizes, group)
        plan = ExchangePlan.from_needed(halo, sources.sizes, group=group.process_group)
        shards[edge_type] = EdgeShard(
            group=group,
            sizes=ShardSizes(count[number] for count in counts),
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
    """Return edges in local numbers, and the halo's global numbers, ascending.

    Ascending numbers are owner by owner, and in each owner's order.
    """
    mine = sources.range(group.rank)
    edge_index = torch.stack([source, target])
    edge_index[0] -= mine.start
    edge_index[1] -= targets.offsets[group.rank]
    is_halo = torch.nonzero((source < mine.start) | (source >= mine.stop)).view(-1)
    halo, position = torch.unique(source[is_halo], return_inverse=True)
    edge_index[0, is_halo] = position + len(mine)
    return edge_index, halo
