"""Self loops, as PyG adds them: at every node, or up to the last one that has an edge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch_geometric import utils

from varcomm.errors import ArgumentError
from varcomm.graph.running.edges import Counts, loops_of
from varcomm.graph.running.place import Place
from varcomm.ops.all_gather_v import all_gather_v
from varcomm.ops.operator import checking

__all__ = [
    "add_remaining_self_loops_at",
    "add_self_loops_at",
    "looped_nodes",
    "remove_self_loops_at",
]


def add_self_loops_at(place: Place) -> Callable[..., Any]:
    """Return PyG's ``add_self_loops`` for edges of a graph at a place."""
    return _without_counting(place, utils.add_self_loops)


def add_remaining_self_loops_at(place: Place) -> Callable[..., Any]:
    """Return PyG's ``add_remaining_self_loops`` for edges of a graph at a place."""
    return _without_counting(place, utils.add_remaining_self_loops)


def remove_self_loops_at(place: Place) -> Callable[..., Any]:
    """Return PyG's ``remove_self_loops``; in compiled code it knows how many there are."""

    def remove_self_loops(
        edge_index: torch.Tensor, edge_attr: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not torch.compiler.is_compiling():
            return utils.remove_self_loops(edge_index, edge_attr)  # type: ignore[no-any-return]
        others, _ = loops_of(place.edges_of(edge_index, ""), edge_index)
        return edge_index[:, others], None if edge_attr is None else edge_attr[others]

    return remove_self_loops


def looped_nodes(place: Place, edge_index: torch.Tensor, num_nodes: int | None) -> torch.Tensor:
    """Return the owned nodes that get a self loop, in local numbers.

    Those are all; or, without a number of nodes, all up to the last one in the whole graph that has
    an edge. Then ranks tell each other which one that is: 8 bytes each.

    Raises
    ------
    ArgumentError
        If `num_nodes` is not how many nodes this rank owns, or is missing where nodes have no
        common numbers.
    """
    with checking("add_self_loops", place.group) as where:
        edges = place.edges_of(edge_index, where)
        owned_nodes = Counts.of(edges).targets
        if num_nodes is not None and num_nodes != owned_nodes:
            raise ArgumentError(
                f"{where}num_nodes is {num_nodes}, but this rank owns {owned_nodes} nodes. "
                "Take num_nodes=graph.num_nodes, or x.size(0)."
            )
        if num_nodes is None and None not in place.edge_sets:
            raise ArgumentError(f"{where}in a graph with types of edges, give num_nodes=x.size(0).")
    nodes = torch.arange(owned_nodes, device=edge_index.device)
    if num_nodes is not None:
        return nodes
    graph = place.graph
    owned = graph.owned_ids
    # of edges turned round, the halo is another one
    halo = graph.halo_ids if edges.plan is graph.plan else edges.plan(owned)
    local = torch.cat([owned, halo])
    ids = local[edge_index]
    last = ids.max().view(1) if ids.numel() else ids.new_full((1,), -1)
    lasts = all_gather_v(last, [1] * place.group.size, group=place.group.process_group)
    return nodes[local[: len(nodes)] <= lasts.max()]


def _without_counting(place: Place, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of PyG which does not take the number of nodes from a part of them."""

    def with_self_loops(
        edge_index: torch.Tensor,
        edge_attr: torch.Tensor | None = None,
        fill_value: Any = None,
        num_nodes: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if num_nodes is not None:
            return original(edge_index, edge_attr, fill_value, num_nodes)  # type: ignore[no-any-return]
        nodes = looped_nodes(place, edge_index, None)
        targets = Counts.of(place.edges_of(edge_index, "")).targets
        edge_index, edge_attr = original(edge_index, edge_attr, fill_value, targets)
        # all targets have a loop now, behind the other edges; those stay that are to have one
        straight = edge_index.shape[1] - targets
        kept = torch.cat([torch.arange(straight, device=nodes.device), straight + nodes])
        return edge_index[:, kept], edge_attr if edge_attr is None else edge_attr[kept]

    return with_self_loops
