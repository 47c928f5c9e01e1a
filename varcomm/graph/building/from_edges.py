"""``from_edges``: a partitioned graph from the edges and nodes that each rank has read."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import torch

from varcomm.errors import ArgumentError, DisagreementError
from varcomm.graph.building.assemble import (
    BroughtEdges,
    BroughtNodes,
    at_home,
    by_position,
    check_hops,
    checked_owner,
    deepened,
    sent_to_owners,
)
from varcomm.graph.building.tables import Kinds, check_edge_index, check_name, kinds, no_rows
from varcomm.graph.partitioned_graph import PartitionedGraph
from varcomm.graph.shard import described
from varcomm.ops.checks import checked_tensor
from varcomm.plan.checks import checked_index
from varcomm.sizes import ShardSizes, checked_sizes
from varcomm.transport.agreement import agree_and_share, compare
from varcomm.transport.engine import engine_for
from varcomm.transport.group import GroupLike, resolve

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
    """Build a partitioned graph from the edges and nodes that each rank has read.

    Collective; an error on one rank is raised on all ranks. No rank holds the full graph: edges go
    to the owner of their target, and owners supply the halos.

    Parameters
    ----------
    edge_index : torch.Tensor
        Any edges, each on one rank, by node ids of the full graph; int64 of shape (2, e). The full
        graph has the edges of rank 0, then those of rank 1, and so on.
    sizes : sequence of int
        Nodes that each rank describes: rank 0 the first ``sizes[0]`` nodes, and so on; zeros
        allowed, identical on all ranks.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None is the whole world.
    node_attrs : mapping of str to torch.Tensor, optional
        Attributes of the nodes that this rank describes, (sizes[rank], *F), or of the nodes in
        `node_ids`. A rank without rows may omit them.
    edge_attrs : mapping of str to torch.Tensor, optional
        Attributes of this rank's edges, (e, *F). A rank without edges may omit them.
    node_ids : torch.Tensor, optional
        The nodes of the rows of `node_attrs`, if they are not the nodes that the rank describes;
        each node on one rank, in any order. int32 or int64 of one dimension.
    method : {"block", "hilbert", "rcb"} or torch.Tensor, optional
        Owners. ``"block"`` or None: each rank owns the nodes that it describes. ``"hilbert"`` and
        ``"rcb"``: as in :func:`assign_sharded`, from the attribute ``pos``. A tensor: the ranks
        that own the nodes that this rank describes, (sizes[rank],).
    hops : int
        Layers that one exchange serves; see :func:`distribute`.

    Returns
    -------
    PartitionedGraph
        This rank's part, on the device of `edge_index`. Not differentiable with respect to
        attributes; rows that stay on their rank share memory with the input.

    Raises
    ------
    ArgumentError
        On every rank, if the arguments of one rank are invalid.
    DisagreementError
        On every rank, if sizes, methods, or names, dtypes or shapes of attributes differ, or if a
        node comes twice or not at all.

    Notes
    -----
    In one process: ``torch_geometric.data.Data`` of all edges and nodes.

    Communication: each edge, its id and its attributes once to the owner of its target; each node's
    attributes once to its owner. If nodes change their rank, also 16 bytes for each different node
    in a rank's edges. Memory per rank is proportional to its input and its part.

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
    name = method if isinstance(method, str) else "block" if method is None else "the ranks given"
    equal: dict[str, object] = {}  # on all ranks

    def check() -> tuple[BroughtNodes, torch.Tensor, Attributes]:
        check_hops(hops, None)
        ranges = ShardSizes(checked_sizes(sizes, "sizes", ranks.size))
        if isinstance(edge_index, torch.Tensor):
            engine_for(ranks, edge_index.device)
        edges = check_edge_index(edge_index, ranges.total, ranges.total, "edge_index")
        ids, count, device = node_ids, ranges[ranks.rank], edges.device
        if ids is not None:
            _check_device(ids, "node_ids", device)
            ids = checked_index(ids, ranges.total, "node_ids", "nodes")
            count = len(ids)
        of_nodes = _checked_attributes(node_attrs, count, "node_attrs", "nodes", device)
        of_edges = _checked_attributes(edge_attrs, edges.shape[1], "edge_attrs", "edges", device)
        owner = None
        if method is not None and name not in _METHODS:
            owner = _checked_owner(method, ranges[ranks.rank], ranks.size, device)
        equal.update({"sizes": tuple(ranges), "method": name, "hops": int(hops)})
        equal.update({"use of node_ids": ids is not None, "the kind of device": device.type})
        return BroughtNodes(ranges, owner, ids, of_nodes), edges, of_edges

    def outline(brought: tuple[BroughtNodes, torch.Tensor, Attributes]) -> tuple[Any, ...]:
        """Return a digest, because all ranks' sizes are P^2 numbers; rows, and their kinds."""
        nodes, edges, of_edges = brought
        count = nodes.ranges[ranks.rank] if nodes.ids is None else len(nodes.ids)
        digest = crc32(repr(equal).encode())
        return digest, (count, kinds(nodes.attributes)), (edges.shape[1], kinds(of_edges))

    (nodes, edges, of_edges), outlines = agree_and_share(_WHAT, check, outline, ranks)
    digests, node_outlines, edge_outlines = zip(*outlines, strict=True)
    if len(set(digests)) > 1:
        compare(ranks, {"operation": _WHAT} | equal)  # raises on every rank
    of_nodes = _completed(nodes.attributes, node_outlines, "node_attrs", edges.device)
    of_edges = _completed(of_edges, edge_outlines, "edge_attrs", edges.device)
    if both := [key for key in of_nodes if key in of_edges]:
        raise ArgumentError(
            f"{_WHAT}: {both[0]!r} is in node_attrs and in edge_attrs: graph.{both[0]} could be "
            "either. Rename one."
        )
    nodes = at_home(BroughtNodes(nodes.ranges, nodes.owner, nodes.ids, of_nodes), ranks)
    if name in ("hilbert", "rcb"):
        nodes = by_position(nodes, name, ranks)
    first = sum(count for count, _ in edge_outlines[: ranks.rank])
    ids = torch.arange(first, first + edges.shape[1], device=edges.device)
    brought = BroughtEdges(edges, ids, of_edges)
    graph = sent_to_owners({None: nodes}, {None: brought}, {}, name, ranks)
    logger.info("%r, in %.2f s", graph, time.perf_counter() - began)
    return deepened(graph, hops)


def _completed(
    rows: Attributes, outlines: Sequence[tuple[int, Kinds]], what: str, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return attributes in one order on all ranks, with empty ones that only other ranks have."""
    expected: dict[str, Any] = {}
    first: dict[str, int] = {}
    for rank, (_, outline) in enumerate(outlines):
        for name, kind in outline.items():
            of = first.setdefault(name, rank)
            if kind != expected.setdefault(name, kind):
                raise DisagreementError(
                    f"{_WHAT}: {what}[{name!r}] is {_described(*expected[name])} on rank {of} and "
                    f"{_described(*kind)} on rank {rank}."
                )
    for rank, (count, outline) in enumerate(outlines):
        if count and (missing := [name for name in first if name not in outline]):
            raise DisagreementError(
                f"{_WHAT}: rank {rank} brings {count} rows without {what}[{missing[0]!r}], which "
                f"rank {first[missing[0]]} has."
            )
    return {name: rows.get(name, empty) for name, empty in no_rows(expected, device).items()}


def _described(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{dtype} of shape ({', '.join(['n', *map(str, shape)])})"


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


def _check_device(value: Any, name: str, device: torch.device) -> None:
    if isinstance(value, torch.Tensor) and value.device != device:
        raise ArgumentError(f"{name} is on {value.device}, and edge_index on {device}.")


def _checked_owner(method: Any, count: int, size: int, device: torch.device) -> torch.Tensor:
    if not isinstance(method, torch.Tensor):
        raise ArgumentError(
            f"method must be one of {', '.join(_METHODS)}, a tensor of ranks, or None; got "
            f"{method if isinstance(method, str) else type(method).__name__}. The others of "
            "graph.assign need the full graph."
        )
    _check_device(method, "method", device)
    return checked_owner(method, count, size)
