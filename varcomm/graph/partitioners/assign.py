"""Which rank owns which node, decided by one process that has the whole graph."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import overload

import numpy as np
import torch
from torch_geometric.data import Data, HeteroData

from varcomm.errors import ArgumentError
from varcomm.graph.partitioners.assign_checks import check_node_weight
from varcomm.graph.partitioners.coordinates import by_bisection, by_hilbert
from varcomm.graph.partitioners.multilevel import Adjacency, by_kahip, by_metis
from varcomm.graph.partitioners.shares import by_order
from varcomm.graph.partitioners.totals import Alone
from varcomm.graph.partitioners.whole_graph import edges_of, node_counts, positions_of, weights_of
from varcomm.sizes import exact_int

__all__ = ["METHODS", "assign", "method_used"]

METHODS = ("metis", "kahip", "rcb", "hilbert", "block", "random")

# What a HeteroData takes by type, a Data takes as it is.
NodeWeight = torch.Tensor | Mapping[str, torch.Tensor] | None
EdgeWeight = torch.Tensor | Mapping[tuple[str, str, str], torch.Tensor] | None


@overload
def assign(
    data: Data,
    parts: int,
    method: str | None = None,
    *,
    node_weight: torch.Tensor | None = None,
    edge_weight: torch.Tensor | None = None,
) -> torch.Tensor: ...
@overload
def assign(
    data: HeteroData,
    parts: int,
    method: str | None = None,
    *,
    node_weight: Mapping[str, torch.Tensor] | None = None,
    edge_weight: Mapping[tuple[str, str, str], torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]: ...
def assign(
    data: Data | HeteroData,
    parts: int,
    method: str | None = None,
    *,
    node_weight: NodeWeight = None,
    edge_weight: EdgeWeight = None,
) -> torch.Tensor | dict[str, torch.Tensor]:
    """Decide which of `parts` ranks owns each node.

    Parameters
    ----------
    data : torch_geometric.data.Data or torch_geometric.data.HeteroData
        The whole graph: ``edge_index`` of shape (2, E) for ``"metis"`` and ``"kahip"``, and ``pos``
        of shape (N, D) for ``"rcb"`` and ``"hilbert"``; of every type, if it has several.
    parts : int
        How many ranks.
    method : {"metis", "kahip", "rcb", "hilbert", "block", "random"}, optional
        - ``"metis"``: few edges between ranks, and parts that differ by a few percent [1]_. Needs
          pymetis. Blocks, where there are not more nodes than ranks.
        - ``"kahip"``: mostly fewer edges still, parts up to 3 % heavier than the mean, and more
          time [2]_. Needs kahip. Blocks, where there are not more nodes than ranks.
        - ``"rcb"``: recursive coordinate bisection, always across the widest extent [3]_; parts
          differ by one node.
        - ``"hilbert"``: pieces of a Hilbert curve through the positions [4]_; parts differ by one
          node. In 2-D the curve distinguishes ``2 ** 31`` steps a side, in 3-D ``2 ** 21``.
        - ``"block"``: nodes in the order given; parts differ by one node.
        - ``"random"``: each node by chance, always the same; the worst case for communication.

        None takes the first of METIS, bisection and blocks for which there is what it needs.
    node_weight : torch.Tensor, optional
        What each node costs: non-negative integers of shape (N,). Parts then are of equal weight,
        not number; those of ``"hilbert"`` and ``"block"`` differ from the mean by less than the
        heaviest node and one, those of ``"rcb"`` by less than twice that. Not for ``"random"``. Of
        a HeteroData, a dict with the weights of every node type.
    edge_weight : torch.Tensor, optional
        What each edge between ranks costs: non-negative integers of shape (E,), for ``"metis"`` and
        ``"kahip"``. Weights of all edges between two nodes are added. Of a HeteroData, a dict with
        the weights of every edge type.

    Returns
    -------
    torch.Tensor or dict of torch.Tensor
        The rank of each node, int64 of shape (N,), on the CPU. The same for the same arguments. Of
        a HeteroData, those of each node type. ``"block"`` splits each type by itself; all others
        split the nodes of all types together, and balance their sum.

    Raises
    ------
    ArgumentError
        If `method` is unknown, `parts` is no positive integer, what the method needs is missing or
        not finite, or weights do not fit.
    MissingPackageError
        If pymetis or kahip is needed and not installed.

    Notes
    -----
    Communication: none.

    METIS and KaHIP see an undirected graph without self loops, and without weights they see edges
    between the same nodes as one. They take one thread, like the others, which look at the nodes a
    few times each: 6 million take about a second.

    References
    ----------
    .. [1] G. Karypis and V. Kumar, "A fast and high quality multilevel scheme for partitioning
       irregular graphs", SIAM Journal on Scientific Computing 20 (1998), 359-392.
    .. [2] P. Sanders and C. Schulz, "Think locally, act globally: highly balanced graph
       partitioning", Experimental Algorithms (SEA 2013), LNCS 7933, 164-175.
    .. [3] M. J. Berger and S. H. Bokhari, "A partitioning strategy for nonuniform problems on
       multiprocessors", IEEE Transactions on Computers C-36 (1987), 570-580.
    .. [4] J. Skilling, "Programming the Hilbert curve", AIP Conference Proceedings 707 (2004),
       381-387.

    Examples
    --------
    >>> import torch
    >>> from torch_geometric.data import Data
    >>> ring = Data(edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), num_nodes=4)
    >>> assign(ring, 2, "block")
    tensor([0, 0, 1, 1])
    >>> assign(ring, 2, "block", node_weight=torch.tensor([3, 1, 1, 1]))
    tensor([0, 1, 1, 1])
    """
    if not isinstance(data, Data | HeteroData):
        raise ArgumentError(f"data must be a Data or a HeteroData; got {type(data).__name__}.")
    if method is not None and method not in METHODS:
        raise ArgumentError(f"method must be one of {', '.join(METHODS)}, or None; got {method!r}.")
    if exact_int(parts) is None or parts < 1:
        raise ArgumentError(f"parts must be a positive integer; got {parts!r}.")
    parts = int(parts)
    counts = node_counts(data)
    asked = _asked(data, method)
    weight = weights_of(node_weight, "node_weight", counts, "nodes")
    if weight is not None:
        if asked == "random":
            raise ArgumentError('method="random" takes no node_weight. Choose another method.')
        if len(weight):
            check_node_weight(float(weight.double().sum()), parts, "node_weight")
    if edge_weight is not None and asked not in ("metis", "kahip"):
        raise ArgumentError(f'method="{asked}" takes no edge_weight; "metis" and "kahip" do.')
    owner = _owners(data, parts, asked, weight, edge_weight)
    if isinstance(data, HeteroData):
        return dict(zip(counts, owner.split(list(counts.values())), strict=True))
    return owner


def method_used(data: Data | HeteroData, parts: int, method: str | None) -> str:
    """Return how nodes will be assigned: the first method for which there is what it needs.

    METIS and KaHIP cut nothing into one part, and refuse more parts than nodes: then it is blocks.
    """
    method = _asked(data, method)
    many = 1 < parts < sum(node_counts(data).values())
    return "block" if method in ("metis", "kahip") and not many else method


def _asked(data: Data | HeteroData, method: str | None) -> str:
    if method is not None:
        return method
    has_edges = any(store.get("edge_index") is not None for store in data.edge_stores)
    if has_edges and importlib.util.find_spec("pymetis") is not None:
        return "metis"
    return "rcb" if all(store.get("pos") is not None for store in data.node_stores) else "block"


def _owners(
    data: Data | HeteroData,
    parts: int,
    method: str,
    weight: torch.Tensor | None,
    edge_weight: EdgeWeight,
) -> torch.Tensor:
    """Return the rank of each node, those of one type after those of the other."""
    counts = list(node_counts(data).values())
    if method in ("rcb", "hilbert"):
        by_coordinates = by_bisection if method == "rcb" else by_hilbert
        return by_coordinates(positions_of(data, method), parts, Alone(), weight)
    if method == "random":
        return torch.from_numpy(np.random.default_rng(0).integers(parts, size=sum(counts)))
    if method in ("metis", "kahip"):
        # checked even if there is nothing to cut
        source, target, edge_costs = edges_of(data, method, edge_weight)
        if method_used(data, parts, method) == method:
            by_edges = by_metis if method == "metis" else by_kahip
            graph = Adjacency.from_edges(source, target, sum(counts), edge_costs)
            owner = by_edges(graph, parts, None if weight is None else weight.numpy())
            return torch.from_numpy(owner)
    weights = [None] * len(counts) if weight is None else weight.split(counts)
    each = [by_order(count, weights, parts) for count, weights in zip(counts, weights, strict=True)]
    return torch.cat(each)
