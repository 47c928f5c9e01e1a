"""What one rank owns of a graph that is here as a whole; without communication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from varcomm.graph.ascending import AscendingIds
from varcomm.graph.building.assemble import OwnedEdges
from varcomm.graph.building.tables import EdgeTable, NodeTable
from varcomm.graph.shard import NodeShard
from varcomm.sizes import ShardSizes
from varcomm.transport.group import Group

__all__ = ["Numbering", "owned_edges"]


@dataclass(frozen=True, eq=False)
class Numbering:
    """The nodes of one type, counted anew rank after rank: then owners are found by arithmetic.

    Attributes
    ----------
    owner : torch.Tensor
        The rank of each node; int64, shape (N,).
    sizes : ShardSizes
        Nodes that each rank owns.
    order : torch.Tensor
        The nodes in their new order, and so those of a rank in that of the whole graph; (N,).
    number : torch.Tensor
        The new number of each node; (N,).
    """

    owner: torch.Tensor
    sizes: ShardSizes
    order: torch.Tensor
    number: torch.Tensor

    @classmethod
    def of(cls, owner: torch.Tensor, ranks: int) -> Self:
        """Count the nodes that have these owners.

        >>> Numbering.of(torch.tensor([1, 0, 1]), 2).number
        tensor([1, 0, 2])
        """
        sizes = ShardSizes(torch.bincount(owner, minlength=ranks).tolist())
        order = torch.sort(owner, stable=True).indices
        number = torch.empty_like(order)
        number[order] = torch.arange(len(order), device=order.device)
        return cls(owner, sizes, order, number)

    def shard(self, nodes: NodeTable, group: Group) -> NodeShard:
        """Return what this rank owns of the nodes."""
        mine = self.sizes.range(group.rank)
        ids = self.order[mine.start : mine.stop]
        attributes = {key: value.rows(ids) for key, value in nodes.attributes.items()}
        return NodeShard(group, self.sizes, attributes, AscendingIds.of(ids))


def owned_edges(edges: EdgeTable, rank: int, sources: Numbering, targets: Numbering) -> OwnedEdges:
    """Return the edges into nodes that a rank owns."""
    # a table of bools stays in the cache, where one of numbers would not
    is_mine = targets.owner == rank
    ids = torch.nonzero(is_mine[edges.edge_index[1]]).view(-1)
    return OwnedEdges(
        sources.number[edges.edge_index[0][ids]],
        targets.number[edges.edge_index[1][ids]],
        ids,
        {key: value.rows(ids) for key, value in edges.attributes.items()},
    )
