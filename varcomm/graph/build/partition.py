"""``partition``: each rank's part of a graph that all ranks, or one rank, have in full."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch_geometric.data import Data, HeteroData

from varcomm.errors import ArgumentError, DisagreementError
from varcomm.graph.build.assemble import (
    BroughtNodes,
    Edges,
    Numbering,
    assemble,
    checked_owner,
    owned_edges,
    sent_to_owners,
)
from varcomm.graph.build.groups import checked_names, ids_of_groups
from varcomm.graph.build.pyg_data import EdgeTable, NodeTable, Tables, ends, read
from varcomm.graph.build.several_hops import check_hops, deepened
from varcomm.graph.node_shard import Ranks
from varcomm.graph.partitioned_graph import NodeType, PartitionedGraph
from varcomm.graph.partitioners.assign import assign, method_used
from varcomm.ops.broadcast import broadcast
from varcomm.ops.digest import differing, digest
from varcomm.sizes import ShardSizes, checked_rank
from varcomm.transport.agreement import agree, agree_and_share, compare
from varcomm.transport.group import Group, GroupLike, resolve

Method = str | Ranks | Mapping[str, Ranks] | None
Chunk = int | Mapping[str, int] | None
Owners = dict[NodeType, torch.Tensor]

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
    *,
    chunk: Chunk = None,
    groups: Sequence[str] = (),
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
        belongs to nodes and one with E entries to edges; if N equals E, a name that contains
        ``edge`` marks edges. Single values and arrays of one entry belong to the full graph. Other
        lengths are refused, and so are lists of rows, and node ids such as ``face`` and
        ``edge_label_index``. Numeric arrays become tensors.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None means the whole world.
    method : str or torch.Tensor or numpy.ndarray or sequence of int or mapping of str, optional
        A method of :func:`assign`: ``"metis"``, ``"rcb"``, ``"hilbert"``, ``"block"`` or
        ``"random"``. A tensor, array or list contains the rank of each node, (N,), such as the
        parts that pymetis returns. With several types of nodes, pass a dict by type. By default
        METIS if pymetis is installed, otherwise bisection or blocks.
    src : int, optional
        The only rank of the group that passes `data` and `method`; the other ranks pass None for
        both. If None, every rank passes the same data and method.
    hops : int
        Layers that one exchange serves; see :func:`distribute`.
    chunk : int or dict of int, optional
        For a named method: keep blocks of chunk consecutive nodes together, as in :func:`assign`,
        so that :class:`Rows` reads few chunks of a file on two ranks.
    groups : list of str
        Attributes of nodes that hold ids of groups, in addition to ``batch``: int64 of shape (N,),
        from 0. With ``["cell"]``, pools, ``scatter`` and norms by ``graph.cell`` are over the
        nodes of all ranks. With several types of nodes, of each type that has the attribute. With
        `src`, every rank passes the names.

    Returns
    -------
    PartitionedGraph
        This rank's part, on the device of `data`; with `src`, on the type of device of rank `src`.

    Raises
    ------
    ArgumentError
        On every rank, if the graph or the method is invalid on one rank.
    DisagreementError
        On every rank, if ranks have different graphs or methods.
    MissingPackageError
        If `method` needs a package that is not installed.

    See Also
    --------
    from_edges, assign, distribute

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

    def call() -> tuple[int | None, int, list[str]]:
        check_hops(hops, data)
        if chunk is not None and not (method is None or isinstance(method, str)):
            raise ArgumentError("chunk is for named methods; got the ranks of nodes as well.")
        source = None if src is None else checked_rank(src, ranks.size, "src")
        return source, int(hops), checked_names(groups)

    # first of all, because everything that follows depends on both
    source, hops, names = agree(_WHAT, call, ranks)
    settings = {"src": source, "hops": hops, "chunk": repr(chunk), "groups": names}
    compare(ranks, {"operation": _WHAT} | settings)
    if source is None:
        graph = _from_all(data, method, ranks, chunk, names)
    else:
        graph = _from_one(data, method, source, ranks, chunk, names)
    return deepened(graph, hops)


def checked_method(method: Method, tables: Tables, size: int) -> str | Owners | None:
    """Return the name of a method, or ranks of nodes by type, if valid for `size` ranks."""
    if method is None or isinstance(method, str):
        return method
    given: dict[Any, Any] = dict(method) if isinstance(method, Mapping) else {None: method}
    if given.keys() != tables.nodes.keys():
        raise ArgumentError(
            "method, if not a name, must be a list, array or tensor of ranks, or a dict of them by "
            "type of node; "
            f"got {list(given)} for nodes of types {list(tables.nodes)}."
        )
    return {
        key: checked_owner(given[key], nodes.count, size) for key, nodes in tables.nodes.items()
    }


def assigned(data: Any, parts: int, method: str | None, chunk: Chunk = None) -> tuple[Owners, str]:
    """Return the rank of each node, by type, and the name of the method that assigned them."""
    name = method_used(data, parts, method)
    owner = assign(data, parts, name, chunk=chunk)
    return owner if isinstance(owner, dict) else {None: owner}, name


def _read(data: Any, groups: Sequence[str]) -> Tables:
    """Return the tables of a graph that has these groups, or raise before nodes are assigned."""
    tables = read(data)
    ids_of_groups({key: nodes.attributes for key, nodes in tables.nodes.items()}, groups)
    return tables


def _from_all(
    data: Any, method: Method, group: Group, chunk: Chunk, groups: Sequence[str]
) -> PartitionedGraph:
    """Cut this rank's part out of a graph that all ranks have; only halo ids travel."""

    def check() -> tuple[Tables, str | Owners | None]:
        tables = _read(data, groups)
        return tables, checked_method(method, tables, group.size)

    def digests(own: tuple[Tables, str | Owners | None]) -> dict[str, object]:
        tables, checked = own
        given = checked if isinstance(checked, dict) else {None: checked}
        return tables.digests() | {
            "method" if key is None else f"method[{key!r}]": digest(v) for key, v in given.items()
        }

    (tables, checked), of_ranks = agree_and_share(_WHAT, check, digests, group)
    others, names = differing(of_ranks)
    if others:
        raise DisagreementError(
            f"{_WHAT}: ranks {others} have other arguments than rank 0; they differ in "
            f"{', '.join(sorted(names))}."
        )
    owners, name = _owners(data, tables, checked, group, chunk)
    numbered = {key: Numbering.of(owners[key], group.size) for key in tables.nodes}
    shards = {key: numbered[key].shard(nodes, group) for key, nodes in tables.nodes.items()}
    owned = {
        key: owned_edges(edges, group.rank, *(numbered[end] for end in ends(key)))
        for key, edges in tables.edges.items()
    }
    return assemble(shards, owned, tables.attributes, name, group, groups)


def _owners(
    data: Any, tables: Tables, method: str | Owners | None, group: Group, chunk: Chunk
) -> tuple[Owners, str]:
    """Return the rank of each node, identical on all ranks, and the method's name."""
    device, pg = tables.device, group.process_group
    if isinstance(method, dict):
        return {key: ranks.to(device) for key, ranks in method.items()}, _GIVEN

    def first() -> tuple[Owners, str]:
        return assigned(data, group.size, method, chunk) if group.rank == 0 else ({}, "")

    (own, _), names = agree_and_share(_WHAT, first, lambda found: found[1], group)
    parts = {key: own[key].to(device) if own else None for key in tables.nodes}
    return {key: broadcast(part, group=pg) for key, part in parts.items()}, names[0]


def _from_one(
    data: Any, method: Method, src: int, group: Group, chunk: Chunk, groups: Sequence[str]
) -> PartitionedGraph:
    """Send the graph of one rank to its owners: `src` contributes all nodes and edges."""

    def check() -> Assigned | None:
        if group.rank != src:
            for given, name in ((data, "data"), (method, "method")):
                if given is not None:
                    raise ArgumentError(
                        f"{name} must be None on this rank: src={src}, so rank {src} has it."
                    )
            return None
        tables = _read(data, groups)
        checked = checked_method(method, tables, group.size)
        if isinstance(checked, dict):
            return tables, checked, _GIVEN
        return tables, *assigned(data, group.size, checked, chunk)

    def outline(given: Assigned | None) -> Any:
        """Return the graph without its rows."""
        if given is None:
            return None
        tables, _, name = given

        def no_rows(table: NodeTable | EdgeTable) -> dict[str, torch.Tensor]:
            return {key: value[:0] for key, value in table.attributes.items()}

        nodes = {key: (own.count, no_rows(own)) for key, own in tables.nodes.items()}
        edges = {key: no_rows(own) for key, own in tables.edges.items()}
        return nodes, edges, dict(tables.attributes), name, tables.device.type

    given, outlines = agree_and_share(_WHAT, check, outline, group)
    of_nodes, of_edges, attributes, name, device = outlines[src]
    none = torch.empty(2, 0, dtype=torch.int64, device=device)
    nodes, edges = {}, {}
    for key, (count, rows) in of_nodes.items():
        ranges, owner = ShardSizes(count * (rank == src) for rank in range(group.size)), none[0]
        if given is not None:
            rows, owner = given[0].nodes[key].attributes, given[1][key].to(given[0].device)
        nodes[key] = BroughtNodes(ranges, rows, owner)
    for key, rows in of_edges.items():
        table = EdgeTable(none, rows) if given is None else given[0].edges[key]
        ids = torch.arange(table.edge_index.shape[1], device=table.edge_index.device)
        edges[key] = Edges(table.edge_index, ids, table.attributes)
    attributes = attributes if given is None else given[0].attributes
    return sent_to_owners(nodes, edges, attributes, name, group, groups)
