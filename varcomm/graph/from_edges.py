"""``from_edges``: a partitioned graph from pieces that ranks have read, which none ever joins."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from varcomm.errors import ArgumentError, DisagreementError
from varcomm.graph.brought import (
    BroughtEdges,
    BroughtNodes,
    at_home,
    by_position,
    sent_to_owners,
)
from varcomm.graph.hops import check_hops, deepened
from varcomm.graph.partitioned_graph import PartitionedGraph
from varcomm.graph.tables import check_edge_index, check_name
from varcomm.layout import ShardSizes, checked_sizes, holds_integers
from varcomm.transport.agree import agree, share
from varcomm.transport.group import Group, GroupLike, resolve

__all__ = ["from_edges"]

logger = logging.getLogger("varcomm")

Attributes = Mapping[str, torch.Tensor]

_METHODS = ("block", "hilbert", "rcb")
_WHAT = "graph.from_edges"


def from_edges(
    edge_index: torch.Tensor,
    sizes: Sequence[int],
    group: GroupLike = None,
    *,
    node_attrs: Attributes | None = None,
    edge_attrs: Attributes | None = None,
    node_ids: torch.Tensor | None = None,
    method: str | torch.Tensor | None = None,
    hops: int = 1,
) -> PartitionedGraph:
    """Build a partitioned graph from whatever edges and nodes each rank happened to read.

    Collective: every rank calls it, and all raise if one has to. No rank ever holds the graph:
    edges travel to the owner of their target, and halos are found by asking owners.

    Parameters
    ----------
    edge_index : torch.Tensor
        Any edges, each on one rank, by the numbers of nodes in the whole graph; int64 of shape
        (2, e). The edges of the whole graph are those of rank 0, then those of rank 1, and so on.
    sizes : sequence of int
        The nodes that each rank speaks for, one int a rank, in sum N: rank 0 for the first
        ``sizes[0]`` nodes, and so on.
    group : ProcessGroup or DeviceMesh, optional
        The ranks that take part; None is the whole world.
    node_attrs : mapping of str to torch.Tensor, optional
        Attributes of nodes, (sizes[rank], *F), or of those in `node_ids`. A rank with no rows may
        leave them out.
    edge_attrs : mapping of str to torch.Tensor, optional
        Attributes of this rank's edges, (e, *F). A rank without edges may leave them out.
    node_ids : torch.Tensor, optional
        The nodes that the rows of `node_attrs` are of, where these are others than those that the
        rank speaks for; each node on one rank, in any order. int64 of one dimension.
    method : {"block", "hilbert", "rcb"} or torch.Tensor, optional
        Who owns what. ``"block"``, or None: each rank the nodes that it speaks for. ``"hilbert"``
        and ``"rcb"``: as :func:`assign` does it, by the attribute ``pos``, which is never
        collected. Or the ranks that own the nodes that this rank speaks for, (sizes[rank],).
    hops : int
        How many layers one exchange is to serve; see :func:`distribute`.

    Returns
    -------
    PartitionedGraph
        This rank's part, on the device of `edge_index`.

    Raises
    ------
    ArgumentError
        On every rank, if what one of them brings will not do.
    DisagreementError
        On every rank, if their sizes, methods, or names, dtypes or shapes of attributes differ, or
        if a node is brought twice or not at all.

    Notes
    -----
    Communication: each edge, its number and its attributes once to the owner of its target; each
    node's attributes once to its owner. Unless nodes belong to the rank that speaks for them, also
    16 bytes for each different node in a rank's edges, to ask who owns it. Memory a rank is in
    proportion to what it brings and what it gets.

    Examples
    --------
    Two ranks have each read half of the edges of a directed ring of 4 nodes.

    >>> import torch, varcomm
    >>> def fn(rank):
    ...     edges = [[[3, 1], [0, 2]], [[0, 2], [1, 3]]][rank]
    ...     graph = varcomm.graph.from_edges(torch.tensor(edges), [2, 2])
    ...     return graph.owned_ids.tolist(), graph.halo_ids.tolist(), graph.edge_index.tolist()
    >>> varcomm.launch(fn, 2)
    [([0, 1], [3], [[2, 0], [0, 1]]), ([2, 3], [1], [[2, 0], [0, 1]])]
    """
    ranks = resolve(group)
    began = time.perf_counter()

    def check() -> tuple[BroughtNodes, BroughtEdges]:
        check_hops(hops, None)
        ranges = ShardSizes(checked_sizes(sizes, "sizes", ranks.size))
        edges = check_edge_index(edge_index, ranges.total, ranges.total, "edge_index")
        ids, rows = node_ids, ranges[ranks.rank]
        if ids is not None:
            _check_ids(ids, ranges)
            rows = len(ids)
        of_nodes = _checked_attributes(node_attrs, rows, "node_attrs", "nodes")
        of_edges = _checked_attributes(edge_attrs, edges.shape[1], "edge_attrs", "edges")
        owner = _checked_owner(method, ranges, ranks)
        return BroughtNodes(ranges, owner, ids, of_nodes), BroughtEdges(edges, of_edges)

    nodes, edges = agree(_WHAT, check, ranks)
    name = method if isinstance(method, str) else "block" if method is None else "the ranks given"
    _check_alike(
        {
            "sizes": tuple(nodes.ranges),
            "method": name,
            "hops": hops,
            "use of node_ids": node_ids is not None,
        },
        ranks,
    )
    nodes = at_home(
        BroughtNodes(
            nodes.ranges, nodes.owner, nodes.ids, _completed(nodes.attributes, edges, ranks)
        ),
        ranks,
    )
    edges = BroughtEdges(edges.edge_index, _completed(edges.attributes, edges, ranks))
    if name in ("hilbert", "rcb"):
        nodes = by_position(nodes, name, ranks)
    graph = sent_to_owners({None: nodes}, {None: edges}, {}, name, ranks)
    logger.info("%r, in %.2f s", graph, time.perf_counter() - began)
    return deepened(graph, hops)


def _completed(rows: Attributes, edges: BroughtEdges, group: Group) -> dict[str, torch.Tensor]:
    """Return attributes with those that only ranks with rows of them have named; collective."""
    outlines = share(
        _WHAT,
        lambda: {key: (value.dtype, value.shape[1:], len(value)) for key, value in rows.items()},
        group,
    )
    names = dict.fromkeys(name for outline in outlines for name in outline)
    kinds: dict[str, tuple[torch.dtype, torch.Size]] = {}
    for name in names:
        found = {rank: o[name][:2] for rank, o in enumerate(outlines) if name in o}
        first = next(iter(found))
        kinds[name] = found[first]
        if others := [rank for rank in found if found[rank] != found[first]]:
            raise DisagreementError(
                f"{_WHAT}: {name} is {_kind(*found[first])} on rank {first} and "
                f"{_kind(*found[others[0]])} on rank {others[0]}."
            )
    empty = {rank for rank, o in enumerate(outlines) if not any(count for *_, count in o.values())}
    for rank, outline in enumerate(outlines):
        if rank not in empty and (missing := [name for name in names if name not in outline]):
            raise DisagreementError(f"{_WHAT}: rank {rank} has rows, but none of {missing[0]}.")
    device = edges.edge_index.device
    return {
        name: rows[name] if name in rows else torch.empty(0, *shape, dtype=dtype, device=device)
        for name, (dtype, shape) in kinds.items()
    }


def _kind(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{dtype} of shape (n, {', '.join(map(str, shape))})" if shape else f"{dtype}, (n,)"


def _check_alike(values: Mapping[str, object], group: Group) -> None:
    given = share(_WHAT, lambda: dict(values), group)
    for name in values:
        for rank, other in enumerate(given):
            if other[name] != given[0][name]:
                raise DisagreementError(
                    f"{_WHAT}: ranks differ in {name}: rank 0 has {given[0][name]!r}, rank {rank} "
                    f"has {other[name]!r}."
                )


def _check_ids(ids: Any, ranges: ShardSizes) -> None:
    if not isinstance(ids, torch.Tensor) or ids.dtype != torch.int64 or ids.dim() != 1:
        raise ArgumentError("node_ids must be a tensor of torch.int64 with one dimension.")
    ranges.owner(ids)  # which raises for those out of range


def _checked_attributes(
    attributes: Any, count: int, name: str, rows: str
) -> dict[str, torch.Tensor]:
    if attributes is None:
        return {}
    if not isinstance(attributes, Mapping):
        raise ArgumentError(
            f"{name} must be a mapping from names to tensors; got {type(attributes).__name__}."
        )
    for key, value in attributes.items():
        if not isinstance(value, torch.Tensor) or value.shape[:1] != (count,):
            got = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ArgumentError(
                f"{name}[{key!r}] must be a tensor with a row for each of the {count} {rows} that "
                f"this rank brings; got {got}."
            )
        check_name(key, value, name)
    return dict(attributes)


def _checked_owner(method: Any, ranges: ShardSizes, group: Group) -> torch.Tensor | None:
    if method is None or method in _METHODS:
        return None
    count = ranges[group.rank]
    if not isinstance(method, torch.Tensor) or isinstance(method, str):
        raise ArgumentError(
            f"method must be one of {', '.join(_METHODS)}, a tensor of ranks, or None; got "
            f"{method!r}. The others of graph.assign need the whole graph."
        )
    if method.shape != (count,) or not holds_integers(method):
        raise ArgumentError(
            f"method, if no name, must hold the rank of each of the {count} nodes that this rank "
            f"speaks for, as integers; got {method.dtype} of shape {tuple(method.shape)}."
        )
    if count and not (int(method.min()) >= 0 and int(method.max()) < group.size):
        raise ArgumentError(
            f"method spans ranks {int(method.min())}...{int(method.max())}, out of range for "
            f"{group.size} ranks."
        )
    return method.to(torch.int64)
