"""``partition``: from a graph that all ranks have, or one of them, to the part that each owns."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data, HeteroData

from varcomm.errors import ArgumentError, DisagreementError
from varcomm.graph.building.assemble import assemble
from varcomm.graph.building.cut import Numbering, owned_edges
from varcomm.graph.building.from_one_rank import from_one_rank
from varcomm.graph.building.hops import check_hops, deepened
from varcomm.graph.building.tables import Tables, ends, read
from varcomm.graph.partitioned_graph import NodeType, PartitionedGraph
from varcomm.graph.partitioners.assign import METHODS, assign, method_used
from varcomm.ops.broadcast import broadcast
from varcomm.ops.digest import differing, digest
from varcomm.sizes import checked_rank, holds_integers
from varcomm.transport.agreement import agree, agree_and_share, share
from varcomm.transport.group import Group, GroupLike, resolve

__all__ = ["Method", "assigned", "checked_method", "partition"]

logger = logging.getLogger("varcomm")

Ranks = torch.Tensor | np.ndarray[Any, Any]
Method = str | Ranks | Mapping[str, Ranks] | None
Owners = dict[NodeType, torch.Tensor]

_WHAT = "graph.partition"


def partition(
    data: Data | HeteroData | None,
    group: GroupLike = None,
    method: Method = None,
    src: int | None = None,
    hops: int = 1,
) -> PartitionedGraph:
    """Split a graph over ranks: each owns some nodes, and all edges into them.

    Collective: every rank calls it, and all raise if one has to, but for a wrong `group`, which
    could tell nobody.

    Parameters
    ----------
    data : torch_geometric.data.Data or torch_geometric.data.HeteroData
        The whole graph: edges of shape (2, E), and any attributes of nodes, of edges, and of the
        graph as a whole. Directed, undirected, bipartite and heterogeneous graphs, self loops,
        multi-edges and isolated nodes are all ordinary. On the device on which to train.
    group : ProcessGroup or DeviceMesh, optional
        The ranks that take part; None is the whole world.
    method : str or torch.Tensor or numpy.ndarray or mapping of str, optional
        How :func:`assign` decides who owns what: ``"metis"``, ``"kahip"``, ``"rcb"``,
        ``"hilbert"``, ``"block"`` or ``"random"``. Or the rank of each node, of shape (N,), by type
        of node where there are several; ranks may own nothing. None takes METIS where pymetis is
        installed, else bisection or blocks.
    src : int, optional
        The rank, within the group, that alone has `data` and `method`; the others give None for
        both. None: every rank has them, the same.
    hops : int
        How many layers one exchange is to serve; see :func:`distribute`.

    Returns
    -------
    PartitionedGraph
        This rank's part, on the device of `data`; with `src`, on that rank's kind of device.

    Raises
    ------
    ArgumentError
        On every rank, if the graph or the method will not do on one of them.
    DisagreementError
        On every rank, if they have different graphs or ranks of nodes.
    MissingPackageError
        If `method` needs a package that is not installed.

    Notes
    -----
    Attributes are told apart as PyG does: one of N entries belongs to nodes and one of E entries to
    edges, and both are cut to what a rank owns. If N equals E, ``edge`` in its name makes it one of
    edges. Values and arrays of one entry belong to the graph, and are kept; arrays of any other
    length are refused, as an attribute with a row too few would be one of them. An attribute of
    the graph that by chance has N or E entries is cut too: give it a first dimension of one.
    Numbers of nodes, such as ``face`` or ``edge_label_index``, are refused.

    Attributes of nodes and edges are data: what is cut out is not differentiable with respect to
    the whole graph, and arrays of numbers become tensors. With `src` they must be either; lists,
    and arrays of texts, only ranks that have the graph can cut.

    Communication: where all ranks have the graph, rank 0 assigns the nodes and broadcasts their
    ranks; everything else is computed on each rank for its own part, without a loop over nodes.
    With `src`, that rank sends each rank its rows and edges, as :func:`from_edges` does.

    In one process: `data` itself.

    Examples
    --------
    A directed ring of 4 nodes on 2 ranks: each rank needs one node of the other's.

    >>> import torch, varcomm
    >>> from torch_geometric.data import Data
    >>> def fn(rank):
    ...     edge_index = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    ...     ring = Data(x=torch.arange(4.0).view(4, 1), edge_index=edge_index)
    ...     graph = varcomm.graph.partition(ring, method="block")
    ...     return graph.owned_ids.tolist(), graph.halo_ids.tolist(), graph.edge_index.tolist()
    >>> varcomm.launch(fn, 2)
    [([0, 1], [3], [[0, 2], [1, 0]]), ([2, 3], [1], [[2, 0], [0, 1]])]
    """
    if isinstance(group, str | torch.Tensor | np.ndarray):
        raise ArgumentError(
            f"{_WHAT}: group must be None, a ProcessGroup or a DeviceMesh; got "
            f"{type(group).__name__}. How nodes are assigned is said by name: method=..."
        )
    ranks = resolve(group)
    began = time.perf_counter()

    def call() -> tuple[int | None, int]:
        check_hops(hops, data)
        return None if src is None else checked_rank(src, ranks.size, "src"), int(hops)

    # before anything else, since what follows depends on it
    calls = share(_WHAT, call, ranks)
    if others := [rank for rank, other in enumerate(calls) if other != calls[0]]:
        raise DisagreementError(
            f"{_WHAT}: ranks differ in src or hops: rank 0 has src={calls[0][0]} and "
            f"hops={calls[0][1]}, rank {others[0]} has src={calls[others[0]][0]} and "
            f"hops={calls[others[0]][1]}."
        )
    source, hops = calls[0]
    if source is None:
        graph = _from_all(data, method, ranks)
    else:
        graph = _from_one(data, method, source, ranks)
    logger.info("%r, in %.2f s", graph, time.perf_counter() - began)
    return deepened(graph, hops)


def _from_all(data: Any, method: Method, group: Group) -> PartitionedGraph:
    def check() -> tuple[Tables, str | Owners | None]:
        tables = read(data)
        return tables, checked_method(method, tables, group.size)

    def tell(own: tuple[Tables, str | Owners | None]) -> tuple[Any, ...]:
        tables, checked = own
        return tables.digests() | _digests(checked), list(tables.nodes), list(tables.edges)

    (tables, checked), told = agree_and_share(_WHAT, check, tell, group)
    others, names = differing([digests for digests, *_ in told])
    if others:
        raise DisagreementError(
            f"{_WHAT}: ranks {others} have other arguments than rank 0; they differ in "
            f"{', '.join(sorted(names))}."
        )
    # each may have built the graph in an order of its own; all take that of the first
    tables = tables.in_order(*told[0][1:])
    owners, name = _owners(data, tables, checked, group)
    return _own_part(tables, owners, name, group)


def _from_one(data: Any, method: Method, src: int, group: Group) -> PartitionedGraph:
    def check() -> tuple[Tables, Owners, str] | None:
        if group.rank != src:
            for given, name in ((data, "data"), (method, "method")):
                if given is not None:
                    raise ArgumentError(
                        f"{name} must be None here, since src={src} says that rank {src} has it."
                    )
            return None
        tables = read(data)
        checked = checked_method(method, tables, group.size)
        if isinstance(checked, dict):
            return tables, checked, "the ranks given"
        name = method_used(data, group.size, checked)
        return tables, assigned(data, group.size, name), name

    return from_one_rank(_WHAT, agree(_WHAT, check, group), src, group)


def checked_method(method: Method, tables: Tables, size: int) -> str | Owners | None:
    """Return the name of a method, or ranks of nodes by type, if they will do for `size` ranks."""
    if method is None or isinstance(method, str):
        if method is not None and method not in METHODS:
            raise ArgumentError(
                f"method must be one of {', '.join(METHODS)}, a tensor of ranks, or None; "
                f"got {method!r}."
            )
        return method
    given: dict[Any, Any] = dict(method) if isinstance(method, Mapping) else {None: method}
    if given.keys() != tables.nodes.keys():
        types = [key for key in tables.nodes if key is not None]
        raise ArgumentError(
            "method, if no name, must be "
            + (f"ranks by type of node, {types}" if types else "a tensor of ranks")
            + f"; got {list(given) if isinstance(method, Mapping) else type(method).__name__}."
        )
    return {
        key: _checked_ranks(given[key], nodes.count, size) for key, nodes in tables.nodes.items()
    }


def _checked_ranks(ranks: Any, nodes: int, size: int) -> torch.Tensor:
    if isinstance(ranks, np.ndarray):
        # of other kinds, only the dtype is to be complained of
        whole = ranks.dtype.kind in "iu"
        ranks = torch.tensor(ranks.astype(np.int64) if whole else np.zeros(ranks.shape))
    if not isinstance(ranks, torch.Tensor) or ranks.shape != (nodes,) or not holds_integers(ranks):
        got = (
            f"{ranks.dtype} of shape {tuple(ranks.shape)}"
            if isinstance(ranks, torch.Tensor)
            else type(ranks).__name__
        )
        raise ArgumentError(
            f"method, if no name, must hold the rank of each of the {nodes} nodes as "
            f"integers; got {got}."
        )
    if nodes and not (int(ranks.min()) >= 0 and int(ranks.max()) < size):
        raise ArgumentError(
            f"method spans ranks {int(ranks.min())}...{int(ranks.max())}, out of range "
            f"for {size} ranks."
        )
    return ranks.to(torch.int64)


def _digests(method: str | Owners | None) -> dict[str, object]:
    if not isinstance(method, dict):
        return {"method": method}
    return {
        "method" if key is None else f"method[{key!r}]": digest(ranks)
        for key, ranks in method.items()
    }


def _owners(
    data: Any, tables: Tables, method: str | Owners | None, group: Group
) -> tuple[Owners, str]:
    """Return the rank of each node, the same on all ranks, and how it was decided."""
    device = tables.device
    if isinstance(method, dict):
        return {key: ranks.to(device) for key, ranks in method.items()}, "the ranks given"
    name = share(_WHAT, lambda: method_used(data, group.size, method), group)[0]
    owners = agree(
        _WHAT, lambda: assigned(data, group.size, name) if group.rank == 0 else None, group
    )
    pg = group.process_group
    return {
        key: broadcast(None if owners is None else owners[key].to(device), group=pg)
        for key in tables.nodes
    }, name


def assigned(data: Any, parts: int, name: str) -> Owners:
    """Return the rank of each node, by type, as a method of this name decides it."""
    owner = assign(data, parts, name)
    return {None: owner} if isinstance(owner, torch.Tensor) else dict(owner)


def _own_part(tables: Tables, owners: Owners, name: str, group: Group) -> PartitionedGraph:
    """Cut out this rank's part of a graph that it has; only halos are asked for."""
    numbered = {key: Numbering.of(owners[key], group.size) for key in tables.nodes}
    shards = {key: numbered[key].shard(nodes, group) for key, nodes in tables.nodes.items()}
    owned = {
        key: owned_edges(edges, group.rank, *(numbered[end] for end in ends(key)))
        for key, edges in tables.edges.items()
    }
    return assemble(shards, owned, tables.attributes, name, group)
