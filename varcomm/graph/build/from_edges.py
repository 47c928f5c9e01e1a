"""``from_edges``: a partitioned graph from the edges and nodes that each rank has read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from zlib import crc32

import torch

from varcomm.errors import ArgumentError, DisagreementError
from varcomm.graph.build.assemble import (
    BroughtNodes,
    Edges,
    checked_owner,
    sent_to_owners,
)
from varcomm.graph.build.groups import checked_names, ids_of_groups
from varcomm.graph.build.move import Move
from varcomm.graph.build.pyg_data import check_edge_index, check_name
from varcomm.graph.build.several_hops import check_hops, deepened
from varcomm.graph.node_shard import Ranks, described
from varcomm.graph.partitioned_graph import PartitionedGraph
from varcomm.graph.partitioners.assign import assign_sharded
from varcomm.ops.checks import checked_tensor
from varcomm.ops.packing import taken
from varcomm.plan.checks import checked_index
from varcomm.sizes import ShardSizes, checked_sizes
from varcomm.transport.agreement import agree, agree_and_share, compare
from varcomm.transport.engines.choose import engine_for
from varcomm.transport.group import Group, GroupLike, resolve

Attributes = Mapping[str, torch.Tensor]

_BY_POSITION = ("hilbert", "rcb")
_WHAT = "graph.from_edges"


def from_edges(
    edge_index: torch.Tensor,
    sizes: Sequence[int],
    group: GroupLike = None,
    *,
    node_attrs: Attributes | None = None,
    edge_attrs: Attributes | None = None,
    node_ids: torch.Tensor | None = None,
    method: str | Ranks | None = None,
    hops: int = 1,
    groups: Sequence[str] = (),
) -> PartitionedGraph:
    """Build a partitioned graph from the edges and nodes that each rank has read.

    Collective; an error on one rank is raised on all ranks. No rank holds the full graph: edges go
    to the owner of their target, and owners supply the halos.

    Parameters
    ----------
    edge_index : torch.Tensor
        Any edges, each on one rank, by node ids of the full graph; int64 of shape (2, e). In the
        full graph, edges are in rank order.
    sizes : sequence of int
        Number of nodes that each rank describes: rank 0 describes the first ``sizes[0]`` nodes, and
        so on. Zeros are allowed; identical on all ranks.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None means the whole world.
    node_attrs : mapping of str to torch.Tensor, optional
        Attributes of the nodes that this rank describes, (sizes[rank], *F), or of the nodes
        `node_ids`. Names, dtypes and ``*F`` are identical on all ranks.
    edge_attrs : mapping of str to torch.Tensor, optional
        Attributes of this rank's edges, (e, *F), as for nodes.
    node_ids : torch.Tensor, optional
        The node of each row of `node_attrs`, if the rows are not the nodes that this rank
        describes. Each node is on one rank, in any order. int32 or int64 of one dimension.
    method : {"block", "hilbert", "rcb"}, torch.Tensor, numpy.ndarray or sequence of int, optional
        Owners. ``"block"`` or None: each rank owns the nodes that it describes. ``"hilbert"`` and
        ``"rcb"``: as in :func:`assign_sharded`, from the attribute ``pos``. A tensor, array or
        list: the owner of each node that this rank describes, (sizes[rank],).
    hops : int
        Layers that one exchange serves; see :func:`distribute`.
    groups : list of str
        Names in `node_attrs` that hold ids of groups, as in :func:`partition`.

    Returns
    -------
    PartitionedGraph
        This rank's part, on the device of `edge_index`. The graph is not differentiable with
        respect to attributes. Rows that stay on their rank share memory with the input.

    Raises
    ------
    ArgumentError
        On every rank, if the arguments of one rank are invalid.
    DisagreementError
        On every rank, if sizes, methods, or names, dtypes or shapes of attributes differ, or if a
        node is missing or repeated.

    See Also
    --------
    partition, assign_sharded, radius

    Notes
    -----
    Communication: each edge, its id and its attributes are sent once to the owner of its target,
    and each node's attributes once to its owner. If nodes move to another rank, ranks also send 16
    bytes per moved node and per distinct node in a rank's edges. Memory per rank is proportional to
    its input and its part.

    In one process: ``torch_geometric.data.Data`` of all edges and nodes.

    Examples
    --------
    Two ranks have each read half of the edges of a directed ring of 4 nodes.

    >>> import torch, varcomm
    >>> def fn(rank):
    ...     edges = [[[3, 1], [0, 2]], [[0, 2], [1, 3]]][rank]
    ...     graph = varcomm.graph.from_edges(torch.tensor(edges), [2, 2])
    ...     return graph.owned_ids.tolist(), graph.halo_ids.tolist(), graph.edges.local_ids.tolist()
    >>> varcomm.launch(fn, 2)
    [([0, 1], [3], [[2, 0], [0, 1]]), ([2, 3], [1], [[2, 0], [0, 1]])]
    """
    ranks = resolve(group)
    name = method if isinstance(method, str) else "block" if method is None else "the ranks given"
    equal: dict[str, object] = {}  # on all ranks

    def check() -> tuple[BroughtNodes, Edges]:
        check_hops(hops, None)
        ranges = ShardSizes(checked_sizes(sizes, "sizes", ranks.size))
        if isinstance(edge_index, torch.Tensor):
            engine_for(ranks, edge_index.device)
        ends = check_edge_index(edge_index, ranges.total, ranges.total, "edge_index")
        ids, count, device = node_ids, ranges[ranks.rank], ends.device
        if ids is not None:
            _check_device(ids, "node_ids", device)
            ids = checked_index(ids, ranges.total, "node_ids", "nodes").clone()
            count = len(ids)
        of_nodes = _checked_attributes(node_attrs, count, "node_attrs", device)
        of_edges = _checked_attributes(edge_attrs, ends.shape[1], "edge_attrs", device)
        if both := of_nodes.keys() & of_edges.keys():
            raise ArgumentError(
                f"{min(both)!r} is in node_attrs and in edge_attrs: graph.{min(both)} could be "
                "either. Rename one."
            )
        owner = None
        if method is not None and not isinstance(method, str):
            if isinstance(method, torch.Tensor):
                _check_device(method, "method", device)
            owner = checked_owner(method, ranges[ranks.rank], ranks.size).to(device)
        elif name not in ("block", *_BY_POSITION):
            raise ArgumentError(
                'method must be "block", "hilbert", "rcb", the ranks of nodes, or None; got '
                f"{method!r}. The others of graph.assign need the full graph."
            )
        equal.update({"sizes": tuple(ranges), "method": name, "hops": int(hops)})
        equal["groups"] = names = checked_names(groups)
        ids_of_groups({None: of_nodes}, names)
        equal.update({"use of node_ids": ids is not None, "the kind of device": device.type})
        for what, rows in (("node_attrs", of_nodes), ("edge_attrs", of_edges)):
            equal[what] = {k: [str(v.dtype), list(v.shape[1:])] for k, v in rows.items()}
        place = torch.arange(ends.shape[1], device=device)  # among this rank's edges
        return BroughtNodes(ranges, of_nodes, owner, ids), Edges(ends, place, of_edges)

    def outline(brought: tuple[BroughtNodes, Edges]) -> tuple[int, int]:
        return crc32(repr(equal).encode()), len(brought[1].ids)  # all sizes are P^2 numbers

    (nodes, edges), outlines = agree_and_share(_WHAT, check, outline, ranks)
    if len({digest for digest, _ in outlines}) > 1:
        compare(ranks, {"operation": _WHAT} | equal)  # raises on every rank
    if nodes.ids is not None:
        rows = _at_home(nodes.ranges, nodes.ids, nodes.attributes, ranks)
        nodes = replace(nodes, attributes=rows, ids=None)
    if name in _BY_POSITION:
        if "pos" not in nodes.attributes:  # on all ranks
            raise ArgumentError(
                f'{_WHAT}: method="{name}" needs the positions of nodes in node_attrs["pos"].'
            )
        pos, pg = nodes.attributes["pos"], ranks.process_group
        nodes = replace(nodes, owner=assign_sharded(pos, ranks.size, name, group=pg))
    edges = replace(edges, ids=edges.ids + sum(count for _, count in outlines[: ranks.rank]))
    graph = sent_to_owners({None: nodes}, {None: edges}, {}, name, ranks, checked_names(groups))
    return deepened(graph, hops)


def _at_home(
    ranges: ShardSizes, node_ids: torch.Tensor, rows: Attributes, group: Group
) -> dict[str, torch.Tensor]:
    """Send rows to the ranks that describe their nodes; collective."""
    node_ids, order = node_ids.sort()
    move, mine = Move.to(ranges.owner(node_ids), node_ids, group), ranges.range(group.rank)

    def check() -> None:
        counts = torch.bincount(move.ids - mine.start, minlength=len(mine))
        if len(wrong := torch.nonzero(counts != 1)):
            node = int(wrong[0])
            raise DisagreementError(
                f"node_ids must name each node once, on all ranks together; node "
                f"{mine.start + node} was named {int(counts[node])} times."
            )

    agree(_WHAT, check, group)
    return {key: move.row(taken(value.detach(), order)) for key, value in rows.items()}


def _checked_attributes(
    attributes: Any, count: int, name: str, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return checked attributes, sorted by name: ranks send them in this order."""
    attributes = dict(attributes or {})
    for key, value in attributes.items():
        check_name(key, value, name)
        if not isinstance(value, torch.Tensor) or value.shape[:1] != (count,):
            raise ArgumentError(
                f"{name}[{key!r}] must be a tensor with a row for each of the {count} nodes or "
                f"edges that this rank passes; got {described(value)}."
            )
        checked_tensor(value, "", f"{name}[{key!r}]")
        _check_device(value, f"{name}[{key!r}]", device)
    return dict(sorted(attributes.items()))


def _check_device(value: Any, name: str, device: torch.device) -> None:
    if isinstance(value, torch.Tensor) and value.device != device:
        raise ArgumentError(f"{name} is on {value.device}, and edge_index on {device}.")
