"""Self loops, as PyG adds them: at every node, or up to the last node with an edge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch_geometric import utils

from varcomm.errors import ArgumentError
from varcomm.graph.adapt.shard_context import ShardContext
from varcomm.ops.all_gather_v import all_gather_v
from varcomm.ops.operator import checking

__all__ = [
    "add_remaining_self_loops_in",
    "add_self_loops_in",
    "looped_nodes",
    "remove_self_loops_in",
]


def add_self_loops_in(context: ShardContext) -> Callable[..., Any]:
    """Return PyG's ``add_self_loops`` for edges of a graph at a context."""
    return _without_counting(context, utils.add_self_loops)


def add_remaining_self_loops_in(context: ShardContext) -> Callable[..., Any]:
    """Return PyG's ``add_remaining_self_loops`` for edges of a graph at a context."""
    return _without_counting(context, utils.add_remaining_self_loops)


def remove_self_loops_in(context: ShardContext) -> Callable[..., Any]:
    """Return PyG's ``remove_self_loops``, with their known number in compiled code."""

    def remove_self_loops(
        edge_index: torch.Tensor, edge_attr: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not torch.compiler.is_compiling():
            return utils.remove_self_loops(edge_index, edge_attr)  # type: ignore[no-any-return]
        others, _ = context.edges_of(edge_index, "").split_self_loops(edge_index)
        return edge_index[:, others], None if edge_attr is None else edge_attr[others]

    return remove_self_loops


def looped_nodes(
    context: ShardContext, edge_index: torch.Tensor, num_nodes: int | None
) -> torch.Tensor:
    """Return the owned nodes that get a self loop, in local ids.

    All nodes; or, without a number of nodes, all up to the last one in the full graph that has an
    edge, which ranks agree on by 8 bytes each.

    Raises
    ------
    ArgumentError
        If `num_nodes` is not the number of owned nodes, or is missing in a graph of several types.
    """
    with checking("add_self_loops", context.group) as where:
        edges = context.edges_of(edge_index, where)
        owned_nodes = edges.layer_counts()[2]
        if num_nodes is not None and num_nodes != owned_nodes:
            raise ArgumentError(
                f"{where}num_nodes is {num_nodes}, but this rank owns {owned_nodes} nodes. "
                "Use num_nodes=graph.num_nodes, or x.size(0)."
            )
        if num_nodes is None and None not in context.edge_shards:
            raise ArgumentError(f"{where}in a graph with types of edges, give num_nodes=x.size(0).")
    nodes = torch.arange(owned_nodes, device=edge_index.device)
    if num_nodes is not None:
        return nodes
    graph = context.graph
    owned = graph.owned_ids
    # reversed edges have another halo
    halo = graph.halo_ids if edges.plan is graph.plan else edges.plan(owned)
    local = torch.cat([owned, halo])
    ids = local[edge_index]
    last = ids.max().view(1) if ids.numel() else ids.new_full((1,), -1)
    lasts = all_gather_v(last, [1] * context.group.size, group=context.group.process_group)
    return nodes[local[: len(nodes)] <= lasts.max()]


def _without_counting(context: ShardContext, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of PyG that takes no number of nodes from the local edges."""

    def with_self_loops(
        edge_index: torch.Tensor,
        edge_attr: torch.Tensor | None = None,
        fill_value: Any = None,
        num_nodes: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if num_nodes is not None:
            return original(edge_index, edge_attr, fill_value, num_nodes)  # type: ignore[no-any-return]
        nodes = looped_nodes(context, edge_index, None)
        targets = context.edges_of(edge_index, "").layer_counts()[2]
        edge_index, edge_attr = original(edge_index, edge_attr, fill_value, targets)
        # all targets have a loop now, behind the other edges; loops of other nodes are dropped
        straight = edge_index.shape[1] - targets
        kept = torch.cat([torch.arange(straight, device=nodes.device), straight + nodes])
        return edge_index[:, kept], edge_attr if edge_attr is None else edge_attr[kept]

    return with_self_loops
