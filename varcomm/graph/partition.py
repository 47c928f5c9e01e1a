"""``partition``: from a graph that every rank has to the part that each rank owns."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data
from torch_geometric.utils import select

from varcomm.errors import ArgumentError, DisagreementError
from varcomm.graph.assign import METHODS, assign, method_used
from varcomm.graph.digest import differing, digest
from varcomm.graph.partitioned_graph import PartitionedGraph
from varcomm.layout import ShardSizes, holds_integers
from varcomm.ops.broadcast import broadcast
from varcomm.plan.exchange_plan import ExchangePlan
from varcomm.transport.agree import agree, share
from varcomm.transport.group import Group, GroupLike, resolve

__all__ = ["partition"]

logger = logging.getLogger("varcomm")

Method = str | torch.Tensor | np.ndarray[Any, Any] | None

# Names that the graph itself answers to, where an attribute of the same name could not be reached.
_MEMBERS = frozenset(dir(PartitionedGraph)) | PartitionedGraph.__dataclass_fields__.keys()


def partition(data: Data, group: GroupLike = None, method: Method = None) -> PartitionedGraph:
    """Split a graph over ranks: each owns some nodes, and all edges into them.

    Collective: every rank calls it with the same graph, and all raise if one has to.

    Parameters
    ----------
    data : torch_geometric.data.Data
        The whole graph, the same on every rank: ``edge_index`` of shape (2, E), and any attributes
        of nodes, of edges, and of the graph as a whole. Directed and undirected graphs, self loops,
        multi-edges and isolated nodes are all ordinary. On the device on which to train.
    group : ProcessGroup or DeviceMesh, optional
        The ranks that take part; None is the whole world.
    method : {"metis", "rcb", "block", "random"} or torch.Tensor or numpy.ndarray, optional
        How :func:`assign` decides who owns what, or the rank of each node, of shape (N,); ranks may
        own nothing. None takes METIS where pymetis is installed, else bisection or blocks.

    Returns
    -------
    PartitionedGraph
        This rank's part, on the device of `data`.

    Raises
    ------
    ArgumentError
        On every rank, if the graph or the method will not do on one of them.
    DisagreementError
        On every rank, if they have different graphs or ranks of nodes.
    MissingPackageError
        If `method` is ``"metis"`` and pymetis is not installed.

    Notes
    -----
    Attributes are told apart as PyG does: one of N entries belongs to nodes and one of E entries to
    edges, and both are cut to what a rank owns; anything else belongs to the graph, and is kept. If
    N equals E, ``edge`` in its name makes it one of edges. An attribute of the graph that by chance
    has N or E entries is cut too: give it a first dimension of one. Numbers of nodes, such as
    ``face`` or ``edge_label_index``, are refused.

    Rank 0 assigns the nodes and broadcasts their ranks; everything else is computed on each rank
    for its own part, without a loop over nodes.

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
    what = "graph.partition"
    if isinstance(group, str | torch.Tensor | np.ndarray):
        raise ArgumentError(
            f"{what}: group must be None, a ProcessGroup or a DeviceMesh; got "
            f"{type(group).__name__}. How nodes are assigned is said by name: method=..."
        )
    ranks = resolve(group)
    given = share(what, lambda: _checked(data, method, ranks), ranks)
    others, names = differing(given)
    if others:
        raise DisagreementError(
            f"{what}: ranks {others} have other arguments than rank 0; they differ in "
            f"{', '.join(sorted(names))}."
        )
    began = time.perf_counter()
    owner, name = _owners(data, _as_tensor(method), ranks)
    graph = _own_part(data, owner, name, ranks)
    logger.info(
        "%s: %d of %d nodes and %d of %d edges by %s, in %.2f s",
        ranks,
        graph.num_owned,
        len(owner),
        graph.edge_index.shape[1],
        data.num_edges,
        name,
        time.perf_counter() - began,
    )
    return graph


def _checked(data: Data, method: Method, group: Group) -> dict[str, object]:
    """Return, by its name, a digest of all that must be the same on all ranks, if it will do."""
    if not isinstance(data, Data):
        raise ArgumentError(f"data must be a torch_geometric.data.Data; got {type(data).__name__}.")
    edge_index, nodes = data.edge_index, data.num_nodes
    if not isinstance(edge_index, torch.Tensor) or edge_index.dtype != torch.int64:
        raise ArgumentError("data.edge_index must be a tensor of torch.int64.")
    if edge_index.dim() != 2 or edge_index.shape[0] != 2:
        raise ArgumentError(
            f"data.edge_index must have shape (2, E); got {tuple(edge_index.shape)}."
        )
    if edge_index.numel():
        low, high = torch.stack(edge_index.aminmax()).tolist()
        if low < 0 or high >= nodes:
            raise ArgumentError(
                f"data.edge_index spans {low}...{high}, out of range for {nodes} nodes."
            )
    for key, value in data:
        if key != "edge_index" and _refers_to_nodes(key, value):
            raise ArgumentError(
                f"data.{key} refers to nodes by their numbers, which change. Remove it: del "
                f"data.{key}."
            )
        if key in _MEMBERS:
            raise ArgumentError(
                f"data.{key} could not be reached: graph.{key} of a PartitionedGraph is its own. "
                f"Rename it: data.my_{key} = data.{key}; del data.{key}."
            )
    method = _as_tensor(method)
    if isinstance(method, torch.Tensor):
        if method.shape != (nodes,) or not holds_integers(method):
            raise ArgumentError(
                f"method, if no name, must hold the rank of each of the {nodes} nodes as "
                f"integers; got {method.dtype} of shape {tuple(method.shape)}."
            )
        if nodes and not (int(method.min()) >= 0 and int(method.max()) < group.size):
            raise ArgumentError(
                f"method spans ranks {int(method.min())}...{int(method.max())}, out of range "
                f"for {group.size} ranks."
            )
    elif method is not None and method not in METHODS:
        raise ArgumentError(
            f"method must be one of {', '.join(METHODS)}, a tensor of ranks, or None; "
            f"got {method!r}."
        )
    digests = {f"data.{key}": digest(value) for key, value in data}
    return digests | {"data.num_nodes": nodes, "method": digest(method)}


def _refers_to_nodes(key: str, value: object) -> bool:
    """Return whether an attribute is numbers of nodes, by its name; a leaf_area_index is not."""
    if key in ("face", "adj", "adj_t", "ptr"):
        return True
    if isinstance(value, torch.Tensor | np.ndarray):
        whole = str(value.dtype).removeprefix("torch.").startswith(("int", "uint"))
    else:
        whole = not isinstance(value, float | str | bool)
    return whole and ("index" in key or "idx" in key)


def _as_tensor(method: Method) -> str | torch.Tensor | None:
    if isinstance(method, np.ndarray):
        # of other kinds, only the dtype is to be complained of
        whole = method.dtype.kind in "iu"
        return torch.tensor(method.astype(np.int64) if whole else np.zeros(method.shape))
    return method


def _owners(
    data: Data, method: str | torch.Tensor | None, group: Group
) -> tuple[torch.Tensor, str]:
    """Return the rank of each node, and how it was decided."""
    if isinstance(method, torch.Tensor):
        return method.to(data.edge_index.device, torch.int64), "the ranks given"
    name = share("graph.partition", lambda: method_used(data, group.size, method), group)[0]

    def on_first_rank() -> torch.Tensor | None:
        return assign(data, group.size, name) if group.rank == 0 else None

    owner = agree("graph.partition", on_first_rank, group)
    if owner is not None:
        owner = owner.to(data.edge_index.device)
    return broadcast(owner, group=group.process_group), name


def _own_part(data: Data, owner: torch.Tensor, name: str, group: Group) -> PartitionedGraph:
    device = data.edge_index.device
    sizes = ShardSizes(torch.bincount(owner, minlength=group.size).tolist())
    # Nodes are numbered anew, rank after rank: then owners are found by arithmetic.
    order = torch.sort(owner, stable=True).indices
    number = torch.empty_like(order)
    number[order] = torch.arange(len(order), device=device)
    mine = sizes.range(group.rank)

    source, target = number[data.edge_index]
    edges = torch.nonzero((target >= mine.start) & (target < mine.stop)).view(-1)
    source, target = source[edges], target[edges] - mine.start
    is_halo = (source < mine.start) | (source >= mine.stop)
    # ascending numbers: owner by owner, and in each owner's order
    halo, position = torch.unique(source[is_halo], return_inverse=True)
    source -= mine.start
    source[is_halo] = len(mine) + position

    owned_ids = order[mine.start : mine.stop]
    part = Data(num_nodes=len(mine))
    for key, value in data:
        if data.is_node_attr(key):
            part[key] = select(value, owned_ids, data.__cat_dim__(key, value))
        elif key != "edge_index" and data.is_edge_attr(key):
            part[key] = select(value, edges, data.__cat_dim__(key, value))
        elif key != "num_nodes":
            part[key] = value
    part.edge_index = torch.stack([source, target])
    plan = ExchangePlan.from_needed(halo, sizes, group=group.process_group)
    return PartitionedGraph(
        data=part,
        node_sizes=sizes,
        owned_ids=owned_ids,
        halo_ids=order[halo],
        plan=plan,
        method=name,
    )
