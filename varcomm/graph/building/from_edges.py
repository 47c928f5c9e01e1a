"""``from_edges``: a partitioned graph from pieces that ranks have read, which none ever joins."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch

from varcomm.errors import ArgumentError, DisagreementError
from varcomm.graph.building.attribute import check_name
from varcomm.graph.building.brought import (
    BroughtEdges,
    BroughtNodes,
    at_home,
    by_position,
    sent_to_owners,
)
from varcomm.graph.building.hops import check_hops, deepened
from varcomm.graph.building.tables import check_edge_index
from varcomm.graph.partitioned_graph import PartitionedGraph
from varcomm.graph.shard import described
from varcomm.ops.checks import checked_tensor
from varcomm.ops.digest import differing
from varcomm.plan.checks import checked_index
from varcomm.sizes import ShardSizes, checked_sizes, holds_integers
from varcomm.transport.agreement import agree_and_share, share
from varcomm.transport.engines import engine_for
from varcomm.transport.group import Group, GroupLike, resolve
from varcomm.transport.serialization import travels

__all__ = ["from_edges"]

logger = logging.getLogger("varcomm")

Attributes = Mapping[str, torch.Tensor]

# Of each attribute, what its rows are like.
Outline = Mapping[str, tuple[torch.dtype, torch.Size]]

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

    Collective: every rank calls it, and all raise if one has to, but for a wrong `group`, which
    could tell nobody. No rank ever holds the graph: edges travel to the owner of their target, and
    halos are found by asking owners.

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
        Attributes of nodes, (sizes[rank], *F), or of those in `node_ids`; any dtype. A rank with no
        rows may leave them out.
    edge_attrs : mapping of str to torch.Tensor, optional
        Attributes of this rank's edges, (e, *F). A rank without edges may leave them out.
    node_ids : torch.Tensor, optional
        The nodes that the rows of `node_attrs` are of, where these are others than those that the
        rank speaks for; each node on one rank, in any order. int32 or int64 of one dimension.
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

    Attributes are data: what is built is not differentiable with respect to them. Rows that stay
    where they are share their memory with what is given.

    In one process: ``torch_geometric.data.Data`` of all edges and nodes.

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
        if isinstance(edge_index, torch.Tensor):
            engine_for(ranks, edge_index.device)
        edges = check_edge_index(edge_index, ranges.total, ranges.total, "edge_index")
        ids, count, device = node_ids, ranges[ranks.rank], edges.device
        if ids is not None:
            if isinstance(ids, torch.Tensor):
                _check_device(ids, "node_ids", device)
            ids = checked_index(ids, ranges.total, "node_ids", "nodes")
            count = len(ids)
        of_nodes = _checked_attributes(node_attrs, count, "node_attrs", "nodes", device)
        of_edges = _checked_attributes(edge_attrs, edges.shape[1], "edge_attrs", "edges", device)
        owner = _checked_owner(method, ranges, ranks, device)
        return BroughtNodes(ranges, owner, ids, of_nodes), BroughtEdges(edges, of_edges)

    def tell(brought: tuple[BroughtNodes, BroughtEdges]) -> _Told:
        nodes, edges = brought
        count = nodes.ranges[ranks.rank] if nodes.ids is None else len(nodes.ids)
        return _Told(
            {word: crc32(repr(value).encode()) for word, value in alike(nodes.ranges).items()},
            (count, _outline(nodes.attributes)),
            (edges.edge_index.shape[1], _outline(edges.attributes)),
        )

    def alike(ranges: ShardSizes) -> dict[str, object]:
        return {
            "sizes": tuple(ranges),
            "method": name,
            "hops": int(hops),
            "use of node_ids": node_ids is not None,
            "the kind of device": edge_index.device.type,
        }

    name = method if isinstance(method, str) else "block" if method is None else "the ranks given"
    (nodes, edges), told = agree_and_share(_WHAT, check, tell, ranks)
    _check_alike([other.alike for other in told], alike(nodes.ranges), ranks)
    device = edges.edge_index.device
    of_nodes = _completed(nodes.attributes, [other.nodes for other in told], "node_attrs", device)
    of_edges = _completed(edges.attributes, [other.edges for other in told], "edge_attrs", device)
    if both := [key for key in of_nodes if key in of_edges]:
        raise ArgumentError(
            f"{_WHAT}: {both[0]!r} is in node_attrs and in edge_attrs: graph.{both[0]} could be "
            "either. Rename one."
        )
    nodes = at_home(BroughtNodes(nodes.ranges, nodes.owner, nodes.ids, of_nodes), ranks)
    first = sum(count for count, _ in (other.edges for other in told[: ranks.rank]))
    edges = BroughtEdges(edges.edge_index, of_edges, first=first)
    if name in ("hilbert", "rcb"):
        nodes = by_position(nodes, name, ranks)
    graph = sent_to_owners({None: nodes}, {None: edges}, {}, name, ranks)
    logger.info("%r, in %.2f s", graph, time.perf_counter() - began)
    return deepened(graph, hops)


@travels
@dataclass(frozen=True)
class _Told:
    """What a rank tells the others of what it brings.

    Attributes
    ----------
    alike : dict of int
        Digests of what must be the same on all ranks: sizes from each would be P^2 numbers.
    nodes, edges : tuple
        How many rows, and what the rows of each attribute are like.
    """

    alike: dict[str, int]
    nodes: tuple[int, Outline]
    edges: tuple[int, Outline]


def _outline(rows: Attributes) -> Outline:
    return {name: (value.dtype, value.shape[1:]) for name, value in rows.items()}


def _completed(
    rows: Attributes, outlines: Sequence[tuple[int, Outline]], what: str, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return attributes with those that only ranks with rows of them have named."""
    first: dict[str, tuple[int, tuple[torch.dtype, torch.Size]]] = {}
    for rank, (_, outline) in enumerate(outlines):
        for name, kind in outline.items():
            of, expected = first.setdefault(name, (rank, kind))
            if kind != expected:
                raise DisagreementError(
                    f"{_WHAT}: {what}[{name!r}] is {_kind(*expected)} on rank {of} and "
                    f"{_kind(*kind)} on rank {rank}."
                )
    for rank, (there, outline) in enumerate(outlines):
        if there and (missing := [name for name in first if name not in outline]):
            raise DisagreementError(
                f"{_WHAT}: rank {rank} brings {there} rows without {what}[{missing[0]!r}], which "
                f"rank {first[missing[0]][0]} has."
            )
    # in the same order on all ranks, as they are sent one after the other
    return {
        name: rows[name] if name in rows else torch.empty(0, *shape, dtype=dtype, device=device)
        for name, (_, (dtype, shape)) in first.items()
    }


def _kind(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{dtype} of shape ({', '.join(['n', *map(str, shape)])})"


def _check_alike(
    digests: Sequence[Mapping[str, int]], own: Mapping[str, object], group: Group
) -> None:
    """Raise on every rank unless all have the same; collective where they do not."""
    _, names = differing(digests)
    if names:
        name = names[0]
        other = [digest[name] == digests[0][name] for digest in digests].index(False)
        given = share(_WHAT, lambda: own[name], group)
        raise DisagreementError(
            f"{_WHAT}: ranks differ in {name}: rank 0 has {given[0]!r}, rank {other} has "
            f"{given[other]!r}."
        )


def _checked_attributes(
    attributes: Any, count: int, name: str, rows: str, device: torch.device
) -> dict[str, torch.Tensor]:
    if attributes is None:
        return {}
    if not isinstance(attributes, Mapping):
        raise ArgumentError(
            f"{name} must be a mapping from names to tensors; got {type(attributes).__name__}."
        )
    for key, value in attributes.items():
        check_name(key, value, name)
        if not isinstance(value, torch.Tensor) or value.shape[:1] != (count,):
            raise ArgumentError(
                f"{name}[{key!r}] must be a tensor with a row for each of the {count} {rows} that "
                f"this rank brings; got {described(value)}."
            )
        checked_tensor(value, "", f"{name}[{key!r}]")
        _check_device(value, f"{name}[{key!r}]", device)
    return dict(attributes)


def _check_device(value: torch.Tensor, name: str, device: torch.device) -> None:
    if value.device != device:
        raise ArgumentError(f"{name} is on {value.device}, and edge_index on {device}.")


def _checked_owner(
    method: Any, ranges: ShardSizes, group: Group, device: torch.device
) -> torch.Tensor | None:
    if method is None or (isinstance(method, str) and method in _METHODS):
        return None
    count = ranges[group.rank]
    if not isinstance(method, torch.Tensor):
        raise ArgumentError(
            f"method must be one of {', '.join(_METHODS)}, a tensor of ranks, or None; got "
            f"{method if isinstance(method, str) else type(method).__name__}. The others of "
            "graph.assign need the whole graph."
        )
    if method.shape != (count,) or not holds_integers(method):
        raise ArgumentError(
            f"method, if no name, must hold the rank of each of the {count} nodes that this rank "
            f"speaks for, as integers; got {described(method)}."
        )
    _check_device(method, "method", device)
    if count and not (int(method.min()) >= 0 and int(method.max()) < group.size):
        raise ArgumentError(
            f"method spans ranks {int(method.min())}...{int(method.max())}, out of range for "
            f"{group.size} ranks."
        )
    return method.to(torch.int64)
