"""``rebalance``: even costs by diffusion between neighbouring ranks, with few nodes moved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch

from varcomm.errors import ArgumentError
from varcomm.graph.moving.migrate import migrate
from varcomm.graph.moving.transfer import transfer
from varcomm.graph.partitioned_graph import PartitionedGraph
from varcomm.graph.shard import described
from varcomm.transport.agreement import agree, share

__all__ = ["rebalance"]

Array: TypeAlias = np.ndarray[Any, Any]

_WHAT = "graph.rebalance"

# Rounds stop at this ratio of the largest cost to the mean, or after so many: a rank passes on at
# most the nodes that it has, so far transport takes several.
_EVEN, _ROUNDS = 1.02, 16


def rebalance(graph: PartitionedGraph, weights: torch.Tensor | float) -> PartitionedGraph:
    """Return the graph with even costs per rank, by as few moved nodes as possible.

    Collective; an error on one rank is raised on all ranks. Costs flow between ranks that share a
    border, with the smallest squared flows that even them [1]_; each rank passes on its nodes
    nearest to the receiving rank. A rank without nodes receives a piece of the rank with the
    largest cost. Deterministic. No rank holds the graph, only the costs of all ranks.

    Communication: a few numbers per rank, and that of :meth:`PartitionedGraph.migrate`; each round
    also moves the structure of the graph, once more for the attributes.

    In one process: the graph itself.

    Parameters
    ----------
    graph : PartitionedGraph
        With one type of nodes.
    weights : torch.Tensor or float
        Measured cost of each owned node, finite and not negative, of shape (n,). Or this rank's
        cost, such as measured seconds, which its nodes share evenly.

    Returns
    -------
    PartitionedGraph
        The migrated graph; `graph` itself if the largest cost is within 2 % of the mean.

    Raises
    ------
    ArgumentError
        On every rank, if weights are invalid on one rank, or the graph has several types of nodes.

    References
    ----------
    .. [1] Y. F. Hu, R. J. Blake and D. R. Emerson, "An optimal migration algorithm for dynamic load
       balancing", Concurrency: Practice and Experience 10 (1998), 467-483.

    Examples
    --------
    The nodes of rank 0 cost three times as much as those of rank 1.

    >>> import torch, varcomm
    >>> from torch_geometric.data import Data
    >>> def fn(rank):
    ...     path = torch.stack([torch.arange(7), torch.arange(1, 8)])
    ...     graph = varcomm.graph.partition(Data(edge_index=path, num_nodes=8), method="block")
    ...     weights = torch.full((4,), [3.0, 1.0][rank])
    ...     return varcomm.graph.rebalance(graph, weights).owned_ids.tolist()
    >>> varcomm.launch(fn, 2)
    [[0, 1, 2], [3, 4, 5, 6, 7]]
    """
    cost = agree(_WHAT, lambda: _checked_cost(graph, weights), graph.group)
    nodes, edges = graph.nodes, graph.edges
    bare = best = replace(
        graph,
        node_shards={None: replace(nodes, attributes={"cost": cost})},
        edge_shards={None: replace(edges, attributes={})},
        attributes={},
    )
    least = torch.inf
    for _ in range(_ROUNDS):
        loads, neighbours = _loads(bare)
        if loads.max() >= least:
            break
        best, least = bare, loads.max()
        if least <= _EVEN * loads.mean():
            break
        flows = _flows(loads, neighbours)[graph.group.rank]
        bare = migrate(bare, _chosen(bare, flows))
    if best.nodes.ids is nodes.ids:
        return graph
    here = torch.full((best.num_owned,), graph.group.rank, device=cost.device)
    return migrate(graph, transfer(best, graph)(here))


def _checked_cost(graph: PartitionedGraph, weights: torch.Tensor | float) -> torch.Tensor:
    """Return the cost of each owned node in fp64."""
    if None not in graph.node_shards:
        raise ArgumentError(
            "rebalance is for graphs with one type of nodes. Call graph.migrate(owner) with owners "
            "by type."
        )
    rows, device = graph.num_owned, graph.nodes.ids.gaps.device
    if isinstance(weights, int | float) or getattr(weights, "shape", None) == ():
        weights = torch.full((rows,), float(weights) / max(rows, 1))
    if (
        not isinstance(weights, torch.Tensor)
        or weights.shape != (rows,)
        or weights.dtype == torch.bool
        or weights.is_complex()
    ):
        raise ArgumentError(
            f"weights must be a number, or a tensor with a cost for each of the {rows} owned "
            f"nodes; got {described(weights)}."
        )
    cost = weights.detach().to(device, torch.float64)
    if not bool(((cost >= 0) & cost.isfinite()).all()):
        raise ArgumentError("weights must be finite and not negative.")
    return cost


def _loads(graph: PartitionedGraph) -> tuple[Array, list[list[int]]]:
    """Return the cost and the neighbours of each rank; collective."""
    own = float(graph.nodes.attributes["cost"].sum()), list(graph.plan.neighbours)
    loads, neighbours = zip(*share(_WHAT, lambda: own, graph.group), strict=True)
    return np.array(loads), list(neighbours)


def _flows(loads: Array, neighbours: list[list[int]]) -> Array:
    """Return the cost that each rank passes to each other, (P, P), zero for what it receives."""
    ranks = len(loads)
    links = np.zeros((ranks, ranks))
    for rank, others in enumerate(neighbours):
        links[rank, others] = links[others, rank] = 1
    # parts without a border to the rank with the largest cost, such as empty ranks, get a link
    top = int(loads.argmax())
    while (apart := ~_reached(links, top)).any():
        first = int(np.where(apart, loads, np.inf).argmin())
        links[top, first] = links[first, top] = 1
    laplacian = np.diag(links.sum(1)) - links
    potential = np.linalg.lstsq(laplacian, loads - loads.mean(), rcond=None)[0]
    flows: Array = np.clip(potential[:, None] - potential, 0, None) * links
    return flows


def _reached(links: Array, start: int) -> Array:
    reached: Array = np.arange(len(links)) == start
    before = 0
    while reached.sum() > before:
        before = reached.sum()
        reached = reached | links[reached].any(0)
    return reached


def _chosen(graph: PartitionedGraph, flows: Array) -> torch.Tensor:
    """Return new owners: for the largest flow first, nodes by their distance from the receiver."""
    cost, plan, rank = graph.nodes.attributes["cost"], graph.plan, graph.group.rank
    source, target = graph.edges.local_ids[:, : graph.edges.num_owned]
    owner = torch.full((graph.num_owned,), rank, device=cost.device)
    inner = source < graph.num_owned
    ends = torch.stack([source[inner], target[inner]])
    here, there = torch.cat([ends, ends.flip(0)], dim=1)  # paths go both ways
    order = here.argsort()
    there, counts = there[order], torch.bincount(here, minlength=graph.num_owned)
    starts = counts.cumsum(0) - counts
    sent = plan.send_index.split(plan.send_counts)
    bounds = graph.num_owned + np.cumsum([0, *plan.recv_counts])
    left = 0.0  # by which whole nodes fell short of the goals so far
    for other in np.argsort(-flows, kind="stable")[: int((flows > 0).sum())].tolist():
        goal, total = float(flows[other]) + left, 0.0
        is_from = (source >= int(bounds[other])) & (source < int(bounds[other + 1]))
        layer, seen = torch.cat([sent[other], target[is_from]]), owner != rank
        while total < goal:
            layer = layer[~seen[layer]].unique()
            if len(layer) == 0:  # no border, or another piece of this rank
                layer = (~seen).nonzero().view(-1)[:1]
            seen[layer] = True
            # a node goes if its middle lies before the goal
            ends_at = total + cost[layer].cumsum(0)
            goes = ends_at - cost[layer] / 2 < goal
            owner[layer[goes]] = other
            if len(layer) == 0 or not bool(goes.all()):
                break
            total = float(ends_at[-1])
            repeats = counts[layer]
            nth = torch.arange(int(repeats.sum()), device=cost.device)
            nth = nth - (repeats.cumsum(0) - repeats).repeat_interleave(repeats)
            layer = there[starts[layer].repeat_interleave(repeats) + nth]
        left = goal - float(cost[owner == other].sum())
    return owner
