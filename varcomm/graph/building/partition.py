"""``partition``: each rank's part of a graph that all ranks, or one rank, have in full."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data, HeteroData

from varcomm.errors import ArgumentError, DisagreementError
from varcomm.graph.building.assemble import (
    BroughtNodes,
    Edges,
    Numbering,
    assemble,
    check_hops,
    checked_owner,
    deepened,
    owned_edges,
    sent_to_owners,
)
from varcomm.graph.building.tables import EdgeTable, NodeTable, Tables, ends, read
from varcomm.graph.partitioned_graph import NodeType, PartitionedGraph
from varcomm.graph.partitioners.assign import METHODS, assign, method_used
from varcomm.ops.broadcast import broadcast
from varcomm.ops.digest import differing, digest
from varcomm.sizes import ShardSizes, checked_rank
from varcomm.transport.agreement import agree, agree_and_share, compare, share
from varcomm.transport.group import Group, GroupLike, resolve
from varcomm.transport.serialization import from_bytes, to_bytes

__all__ = ["Method", "assigned", "checked_method", "partition"]

logger = logging.getLogger("varcomm")

Ranks = torch.Tensor | np.ndarray[Any, Any]
Method = str | Ranks | Mapping[str, Ranks] | None
Owners = dict[NodeType, torch.Tensor]

# Dtype and shape of the rows of each attribute.
Kinds = dict[str, tuple[torch.dtype, torch.Size]]

# A graph, the rank of each node by type, and the name of the method.
Assigned = tuple[Tables, Owners, str]

_WHAT = "graph.partition"
_GIVEN = "the ranks given"


def partition(
    data: Data | HeteroData | None,
    group: GroupLike = None,
    method: Method = None,
    src: int | None = None,
    hops: int = 1,
) -> PartitionedGraph:
    """Split a graph over ranks: each rank owns some nodes and all edges into them.

    Collective; an error on one rank is raised on all ranks. The parts are not differentiable with
    respect to the full graph.

    Communication: if all ranks have the graph, rank 0 assigns the nodes and broadcasts the result.
    With `src`, that rank sends each rank its rows and edges.

    In one process: `data` itself.

    Parameters
    ----------
    data : torch_geometric.data.Data or torch_geometric.data.HeteroData
        The full graph, on the device of the training. As in PyG, an attribute with N entries
        belongs to nodes and one with E entries to edges; if N equals E, ``edge`` in its name
        decides. Single values and arrays of one entry belong to the graph as a whole; other lengths
        are refused, and so are node ids, such as ``face`` or ``edge_label_index``. Numeric arrays
        become tensors.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None is the whole world.
    method : str or torch.Tensor or numpy.ndarray or mapping of str, optional
        A method of :func:`assign`: ``"metis"``, ``"rcb"``, ``"hilbert"``, ``"block"`` or
        ``"random"``. Or the rank of each node, (N,), by type of node if there are several. None
        uses METIS if pymetis is installed, else bisection or blocks.
    src : int, optional
        The rank, within the group, that alone has `data` and `method`; the other ranks pass None
        for both, and attributes with rows must be tensors or numeric arrays. None: every rank has
        them, identically.
    hops : int
        Layers that one exchange serves; see :func:`distribute`.

    Returns
    -------
    PartitionedGraph
        This rank's part, on the device of `data`; with `src`, on that rank's kind of device.

    Raises
    ------
    ArgumentError
        On every rank, if the graph or the method is invalid on one rank.
    DisagreementError
        On every rank, if ranks have different graphs or methods.
    MissingPackageError
        If `method` needs a package that is not installed.

    Notes
    -----
    ``adj_t`` becomes ``edge_index`` and ``edge_weight``; node ids in ``train_idx``, ``val_idx``,
    ``valid_idx``, ``test_idx`` or ``split_idx`` become ``train_mask``, and so on. Other node ids,
    such as ``face`` or ``edge_label_index``, are refused: see :meth:`NodeShard.rows`.

    Examples
    --------
    A directed ring of 4 nodes on 2 ranks: each rank needs one node of the other rank.

    >>> import torch, varcomm
    >>> from torch_geometric.data import Data
    >>> def fn(rank):
    ...     edge_index = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    ...     ring = Data(x=torch.arange(4.0).view(4, 1), edge_index=edge_index)
    ...     graph = varcomm.graph.partition(ring, method="block")
    ...     return graph.owned_ids.tolist(), graph.halo_ids.tolist(), graph.edges.local_ids.tolist()
    >>> varcomm.launch(fn, 2)
    [([0, 1], [3], [[0, 2], [1, 0]]), ([2, 3], [1], [[2, 0], [0, 1]])]
    """
    ranks = resolve(group)
    began = time.perf_counter()

    def call() -> tuple[int | None, int]:
        check_hops(hops, data)
        return None if src is None else checked_rank(src, ranks.size, "src"), int(hops)

    # first of all, because everything that follows depends on both
    source, hops = agree(_WHAT, call, ranks)
    compare(ranks, {"operation": _WHAT, "src": source, "hops": hops})
    if source is None:
        graph = _from_all(data, method, ranks)
    else:
        graph = _from_one(data, method, source, ranks)
    logger.info("%r, in %.2f s", graph, time.perf_counter() - began)
    return deepened(graph, hops)


def checked_method(method: Method, tables: Tables, size: int) -> str | Owners | None:
    """Return the name of a method, or ranks of nodes by type, if valid for `size` ranks."""
    if method is None or isinstance(method, str):
        if method not in (None, *METHODS):
            raise ArgumentError(
                f"method must be one of {', '.join(METHODS)}, a tensor of ranks, or None; "
                f"got {method!r}."
            )
        return method
    given: dict[Any, Any] = dict(method) if isinstance(method, Mapping) else {None: method}
    if given.keys() != tables.nodes.keys():
        raise ArgumentError(
            "method, if not a name, must be a tensor of ranks, or a dict of them by type of node; "
            f"got {list(given)} for nodes of types {list(tables.nodes)}."
        )
    return {
        key: checked_owner(given[key], nodes.count, size) for key, nodes in tables.nodes.items()
    }


def assigned(data: Any, parts: int, name: str) -> Owners:
    """Return the rank of each node, by type, from a method of this name."""
    owner = assign(data, parts, name)
    return owner if isinstance(owner, dict) else {None: owner}


def _from_all(data: Any, method: Method, group: Group) -> PartitionedGraph:
    """Cut this rank's part out of a graph that all ranks have; only halo ids travel."""

    def check() -> tuple[Tables, str | Owners | None]:
        tables = read(data)
        return tables, checked_method(method, tables, group.size)

    def outline(own: tuple[Tables, str | Owners | None]) -> tuple[Any, ...]:
        tables, checked = own
        given = checked if isinstance(checked, dict) else {None: checked}
        digests = {
            "method" if key is None else f"method[{key!r}]": digest(v) for key, v in given.items()
        }
        return tables.digests() | digests, list(tables.nodes), list(tables.edges)

    (tables, checked), outlines = agree_and_share(_WHAT, check, outline, group)
    others, names = differing([digests for digests, *_ in outlines])
    if others:
        raise DisagreementError(
            f"{_WHAT}: ranks {others} have other arguments than rank 0; they differ in "
            f"{', '.join(sorted(names))}."
        )
    # ranks may list their types in different orders; rank 0's order holds
    tables = tables.in_order(*outlines[0][1:])
    owners, name = _owners(data, tables, checked, group)
    numbered = {key: Numbering.of(owners[key], group.size) for key in tables.nodes}
    shards = {key: numbered[key].shard(nodes, group) for key, nodes in tables.nodes.items()}
    owned = {
        key: owned_edges(edges, group.rank, *(numbered[end] for end in ends(key)))
        for key, edges in tables.edges.items()
    }
    return assemble(shards, owned, tables.attributes, name, group)


def _owners(
    data: Any, tables: Tables, method: str | Owners | None, group: Group
) -> tuple[Owners, str]:
    """Return the rank of each node, identical on all ranks, and the method's name."""
    device, pg = tables.device, group.process_group
    if isinstance(method, dict):
        return {key: ranks.to(device) for key, ranks in method.items()}, _GIVEN
    name = share(_WHAT, lambda: method_used(data, group.size, method), group)[0]

    def first() -> Owners:
        return assigned(data, group.size, name) if group.rank == 0 else {}

    own = agree(_WHAT, first, group)
    parts = {key: own[key].to(device) if own else None for key in tables.nodes}
    return {key: broadcast(part, group=pg) for key, part in parts.items()}, name


def _from_one(data: Any, method: Method, src: int, group: Group) -> PartitionedGraph:
    """Send the graph of one rank to its owners: `src` contributes all nodes and edges."""

    def check() -> Assigned | None:
        if group.rank != src:
            for given, name in ((data, "data"), (method, "method")):
                if given is not None:
                    raise ArgumentError(
                        f"{name} must be None on this rank: src={src}, so rank {src} has it."
                    )
            return None
        tables = read(data)
        checked = checked_method(method, tables, group.size)
        if isinstance(checked, dict):
            return tables, checked, _GIVEN
        name = method_used(data, group.size, checked)
        return tables, assigned(data, group.size, name), name

    def outline(given: Assigned | None) -> Any:
        if given is None:
            return None
        tables, _, name = given
        of_nodes = {key: (own.count, _kinds(own.attributes)) for key, own in tables.nodes.items()}
        of_edges = {key: _kinds(own.attributes) for key, own in tables.edges.items()}
        packed = {key: _packed(key, value) for key, value in tables.attributes.items()}
        return of_nodes, of_edges, packed, name, tables.device.type

    given, outlines = agree_and_share(_WHAT, check, outline, group)
    of_nodes, of_edges, packed, name, device = outlines[src]

    def no_rows(kinds: Kinds) -> dict[str, torch.Tensor]:
        return {
            key: torch.empty(0, *shape, dtype=dtype, device=device)
            for key, (dtype, shape) in kinds.items()
        }

    if given is None:
        none = torch.empty(2, 0, dtype=torch.int64, device=device)
        owners = dict.fromkeys(of_nodes, none[0])
        tables = Tables(
            {key: NodeTable(0, no_rows(kinds)) for key, (_, kinds) in of_nodes.items()},
            {key: EdgeTable(none, no_rows(kinds)) for key, kinds in of_edges.items()},
            {key: from_bytes(text.encode()) for key, text in packed.items()},
        )
    else:
        tables, owners, _ = given
    nodes, edges = {}, {}
    for key, (count, _) in of_nodes.items():
        ranges = ShardSizes(count * (rank == src) for rank in range(group.size))
        own = tables.nodes[key].attributes
        nodes[key] = BroughtNodes(ranges, own, owners[key].to(tables.device))
    for key, table in tables.edges.items():
        ids = torch.arange(table.edge_index.shape[1], device=table.edge_index.device)
        edges[key] = Edges(table.edge_index, ids, table.attributes)
    return sent_to_owners(nodes, edges, tables.attributes, name, group)


def _packed(name: str, value: Any) -> str:
    try:
        return to_bytes(value).decode()
    except TypeError as error:
        raise ArgumentError(
            f"data.{name} cannot be sent from one rank: {error}. Use tensors, numbers, strings, "
            f"lists or dicts of them; or give data to all ranks, or remove it: del data.{name}."
        ) from error


def _kinds(attributes: Mapping[str, Any]) -> Kinds:
    for key, value in attributes.items():
        if not isinstance(value, torch.Tensor):
            raise ArgumentError(
                f"data.{key} must be a tensor to be sent from one rank; got "
                f"{type(value).__name__}. Make it one, or give data to all ranks."
            )
    return {key: (value.dtype, value.shape[1:]) for key, value in attributes.items()}
