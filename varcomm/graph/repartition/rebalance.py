"""``rebalance``: even costs by diffusion between neighbouring ranks, with few nodes moved."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch

from varcomm.errors import ArgumentError
from varcomm.graph.node_shard import as_tensor, described
from varcomm.graph.partitioned_graph import PartitionedGraph
from varcomm.graph.repartition.migrate import migrate
from varcomm.graph.repartition.transfer import transfer
from varcomm.ops.digest import require_equal
from varcomm.ops.packing import counted_from
from varcomm.transport.agreement import agree_and_share, share

Array: TypeAlias = np.ndarray[Any, Any]

_WHAT = "graph.rebalance"

# Rounds stop at this ratio of the largest cost to the mean, or at this number. A rank passes on at
# most the nodes that it has, so transport over several ranks takes several rounds.
_EVEN, _ROUNDS = 1.02, 16

# Above this ratio, some rounds that gain nothing are followed by others, and ranks warn at the end.
_UNEVEN, _PATIENCE = 1.1, 3

# Smaller parts of the mean cost are rounding, which would move nodes of cost 0.
_LEAST_FLOW = 1e-6


def rebalance(graph: PartitionedGraph, weights: torch.Tensor | float) -> PartitionedGraph:
    """Balance the costs of ranks by moving nodes between neighbouring ranks.

    Collective; an error on one rank is raised on all ranks. The flows between neighbouring ranks
    are the smallest, in the sum of squares, that balance the costs [1]_. Each rank sends the nodes
    nearest to the receiving rank. A rank without nodes receives a piece of the rank with the
    largest cost. Deterministic. Each rank holds the costs of all ranks. No rank holds the full
    graph.

    Nodes move only between neighbouring parts. Nodes therefore cross every border between an
    overloaded rank and a distant rank. On 5 ranks of a mesh, up to 1.6 times the excess cost was
    moved.

    Communication: a few numbers per rank, and the communication of
    :meth:`PartitionedGraph.migrate`; each round also moves the structure of the graph, and the last
    round moves the attributes. In each round every rank solves a dense system with one equation per
    rank, so the method suits up to a few thousand ranks.

    In one process: the graph itself.

    Parameters
    ----------
    graph : PartitionedGraph
        A graph with one type of nodes.
    weights : torch.Tensor or float
        Measured cost of each owned node, finite and not negative, of shape (n,). A single number is
        the cost of this rank, such as measured seconds; its nodes share the cost evenly.

    Returns
    -------
    PartitionedGraph
        The migrated graph; `graph` itself if the largest cost is within 2 % of the mean, or if no
        move of nodes reduces it. Nodes move whole, so parts of few nodes can stay uneven: all ranks
        warn if the largest cost is still more than 10 % above the mean.

    Raises
    ------
    ArgumentError
        On every rank, if weights are invalid on one rank, or the graph has several types of nodes.
    DisagreementError
        On every rank, if some ranks pass a number, and others a tensor.

    See Also
    --------
    PartitionedGraph.migrate, transfer, assign

    References
    ----------
    .. [1] Y. F. Hu, R. J. Blake and D. R. Emerson, "An optimal migration algorithm for dynamic load
       balancing", Concurrency: Practice and Experience 10 (1998), 467-483.

    Examples
    --------
    In this example, the nodes of rank 0 cost three times as much as the nodes of rank 1.

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
    kind = {"weights": "a cost of each node" if _is_of_nodes(weights) else "a number"}
    cost, kinds = agree_and_share(
        _WHAT, lambda: _checked_cost(graph, weights), lambda _: kind, graph.group
    )
    require_equal(_WHAT, kinds)
    nodes, edges = graph.nodes, graph.edges
    bare = best = replace(
        graph,
        node_shards={None: replace(nodes, attributes={"cost": cost})},
        edge_shards={None: replace(edges, attributes={})},
        attributes={},
    )
    ratios: list[float] = []
    for _ in range(_ROUNDS):
        loads, dearest, neighbours = _loads(bare)
        mean = loads.mean() or 1.0
        ratios.append(float(loads.max() / mean))
        least = min(ratios)
        if ratios.index(least) == len(ratios) - 1:
            best = bare
        elif least <= _UNEVEN or min(ratios[-_PATIENCE:]) > least:
            break
        if least <= _EVEN:
            break
        flows = _flows(loads, neighbours)[graph.group.rank]
        bare = migrate(bare, _chosen(bare, flows))
    if least > _UNEVEN:
        warnings.warn(
            f"{_WHAT}: the largest cost of a rank is {least:.2f} times the mean, and was "
            f"{ratios[0]:.2f} times. Nodes move whole, and the costliest has {dearest / mean:.2f} "
            "times the mean cost of a rank. Pass the cost of each node, or use fewer ranks.",
            stacklevel=2,
        )
    if best.nodes.ids is nodes.ids:
        return graph
    here = torch.full((best.num_owned,), graph.group.rank, device=cost.device)
    return migrate(graph, transfer(best, graph)(here))


def _is_of_nodes(weights: Any) -> bool:
    return not (isinstance(weights, int | float) or getattr(weights, "shape", None) == ())


def _checked_cost(graph: PartitionedGraph, weights: torch.Tensor | float) -> torch.Tensor:
    """Return the cost of each owned node in fp64."""
    if None not in graph.node_shards:
        raise ArgumentError(
            "rebalance is for graphs with one type of nodes. Call graph.migrate(owner) with owners "
            "by type."
        )
    rows, device = graph.num_owned, graph.nodes.ids.device
    if not _is_of_nodes(weights):
        weights = torch.full((rows,), float(weights) / max(rows, 1), dtype=torch.float64)
    weights = as_tensor(weights)
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


def _loads(graph: PartitionedGraph) -> tuple[Array, float, list[list[int]]]:
    """Return each rank's cost, the cost of the dearest node, and neighbours; collective."""
    cost = graph.nodes.attributes["cost"]
    top = float(cost.max()) if len(cost) else 0.0
    own = float(cost.sum()), top, list(graph.plan.neighbours)
    loads, tops, neighbours = zip(*share(_WHAT, lambda: own, graph.group), strict=True)
    return np.array(loads), max(tops), list(neighbours)


def _flows(loads: Array, neighbours: list[list[int]]) -> Array:
    """Return the cost that each rank passes to each other, (P, P), zero if it receives."""
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
    # all ranks are linked, so the constant makes it regular, and leaves flows as they are
    potential = np.linalg.solve(laplacian + 1 / ranks, loads - loads.mean())
    flows: Array = (potential[:, None] - potential) * links
    flows[flows < _LEAST_FLOW * loads.mean()] = 0
    return flows


def _reached(links: Array, start: int) -> Array:
    reached: Array = np.arange(len(links)) == start
    before = 0
    while reached.sum() > before:
        before = reached.sum()
        reached = reached | links[reached].any(0)
    return reached


def _chosen(graph: PartitionedGraph, flows: Array) -> torch.Tensor:
    """Return new owners: for the largest flow first, nodes by their distance from the receiver.

    Example: a flow of 5, two nodes of cost 2 at the border, and two of cost 3 behind them. The
    middles of their costs in a row are 1, 3, 5.5 and 8.5, so the first two go. The 1 that is
    missing is added to the next flow.
    """
    cost, plan, rank = graph.nodes.attributes["cost"], graph.plan, graph.group.rank
    source, target = graph.edges.local_ids[:, : graph.edges.num_owned]
    next_to, is_isolated = _adjacency(source, target, graph.num_owned)
    owner = torch.full((graph.num_owned,), rank, device=cost.device)
    sent = plan.send_index.split(plan.send_counts)
    received = graph.num_owned + np.cumsum([0, *plan.recv_counts])
    missing = 0.0
    for receiver in np.argsort(-flows, kind="stable")[: int((flows > 0).sum())].tolist():
        goal, passed = float(flows[receiver]) + missing, 0.0
        is_from = (source >= int(received[receiver])) & (source < int(received[receiver + 1]))
        layer, seen = torch.cat([sent[receiver], target[is_from]]), owner != rank
        while passed < goal:
            layer = layer[~seen[layer]].unique()
            if len(layer) == 0:  # no border, or no path on: nodes without edges, or a new start
                layer = (is_isolated & ~seen).nonzero().view(-1)
            if len(layer) == 0:
                layer = (~seen).nonzero().view(-1)[:1]
            seen[layer] = True
            ends = passed + cost[layer].cumsum(0)
            goes = ends - cost[layer] / 2 < goal
            owner[layer[goes]] = receiver
            if len(layer) == 0 or not bool(goes.all()):
                break
            passed = float(ends[-1])
            layer = next_to(layer)
        missing = goal - float(cost[owner == receiver].sum())
    return owner


def _adjacency(
    source: torch.Tensor, target: torch.Tensor, rows: int
) -> tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]:
    """Return a function from nodes to those next to them, and a mask of nodes without any."""
    inner = source < rows
    one, other = source[inner], target[inner]
    near, far = torch.cat([one, other]), torch.cat([other, one])  # paths go both ways
    far, counts = far[near.argsort()], torch.bincount(near, minlength=rows)
    starts = counts.cumsum(0) - counts

    def next_to(nodes: torch.Tensor) -> torch.Tensor:
        return far[counted_from(starts[nodes], counts[nodes])]

    return next_to, counts == 0
