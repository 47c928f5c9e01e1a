"""``assign`` and ``assign_sharded``: the owner of each node, in one process or on all ranks."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.utils import remove_self_loops, to_undirected

from varcomm.errors import ArgumentError, MissingPackageError
from varcomm.graph.build.pyg_data import edge_indices, ends, label, node_counts, stores
from varcomm.graph.partitioners.coordinates import (
    AllRows,
    by_bisection,
    by_hilbert,
    by_order,
    check_sum,
    checked_positions,
    checked_weight,
)
from varcomm.sizes import at_least
from varcomm.transport.agreement import agree, compare, share
from varcomm.transport.engines.choose import engine_for
from varcomm.transport.group import GroupLike, resolve

_BY_POSITION = {"rcb": by_bisection, "hilbert": by_hilbert}
METHODS = ("metis", "rcb", "hilbert", "block", "random")


def assign(
    data: Data | HeteroData,
    parts: int,
    method: str | None = None,
    *,
    node_weight: torch.Tensor | Mapping[str, torch.Tensor] | None = None,
    edge_weight: torch.Tensor | Mapping[tuple[str, str, str], torch.Tensor] | None = None,
    chunk: int | Mapping[str, int] | None = None,
) -> Any:
    """Assign each node of a graph to one of `parts` ranks.

    Parameters
    ----------
    data : torch_geometric.data.Data or torch_geometric.data.HeteroData
        The full graph: ``edge_index`` of shape (2, E) for ``"metis"``, ``pos`` of shape (N, D) for
        ``"rcb"`` and ``"hilbert"``; of every type, if it has several.
    parts : int
        Number of ranks.
    method : {"metis", "rcb", "hilbert", "block", "random"}, optional
        - ``"metis"``: few cut edges, parts that differ by a few percent [1]_. Needs pymetis. If
          there is at most one node per rank, nodes are assigned as blocks.
        - ``"rcb"``: recursive coordinate bisection across the widest extent [2]_.
        - ``"hilbert"``: pieces of a Hilbert curve through the positions [3]_.
        - ``"block"``: nodes in the given order.
        - ``"random"``: each node on a random rank, the same in every run. It causes the most
          communication.

        Parts of ``"rcb"``, ``"hilbert"`` and ``"block"`` differ by one node. By default, the first
        of METIS, bisection and blocks whose package and data are available.
    node_weight : torch.Tensor, optional
        Cost of each node: non-negative integers of shape (N,); a dict by node type for a
        HeteroData. Parts then have equal weight. With ``"hilbert"`` and ``"block"``, parts differ
        from the mean by less than the heaviest node and one, and with ``"rcb"`` by less than twice
        as much. Not for ``"random"``.
    edge_weight : torch.Tensor, optional
        Cost of each cut edge for ``"metis"``: non-negative integers of shape (E,); a dict by edge
        type for a HeteroData. The weights of all edges between two nodes are added. Without
        weights, several edges between the same nodes count as one.
    chunk : int or dict of int, optional
        Keep blocks of `chunk` consecutive nodes together, such as the rows of a chunk of a file;
        see :class:`Rows`. For a HeteroData, pass a dict by node type; nodes of a missing type are
        assigned one by one. The method assigns chunks, with the sum of their weights, their mean
        position and all their edges.

    Returns
    -------
    torch.Tensor or dict of torch.Tensor
        The rank of each node, int64 of shape (N,), on the CPU, by node type for a HeteroData;
        deterministic. ``"block"`` splits each type by itself; all other methods split the nodes of
        all types together.

    Raises
    ------
    ArgumentError
        If `method` is unknown, `parts` is not a positive integer, or positions, edges or weights
        are missing or invalid.
    MissingPackageError
        If pymetis is needed and not installed.

    See Also
    --------
    assign_sharded, partition, rebalance

    References
    ----------
    .. [1] G. Karypis and V. Kumar, SIAM Journal on Scientific Computing 20 (1998), 359-392.
    .. [2] M. J. Berger and S. H. Bokhari, IEEE Transactions on Computers C-36 (1987), 570-580.
    .. [3] J. Skilling, AIP Conference Proceedings 707 (2004), 381-387.

    Examples
    --------
    >>> import torch
    >>> from torch_geometric.data import Data
    >>> ring = Data(edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), num_nodes=4)
    >>> assign(ring, 2, "block", node_weight=torch.tensor([3, 1, 1, 1]))
    tensor([0, 1, 1, 1])
    """
    if not isinstance(data, Data | HeteroData):
        raise ArgumentError(f"data must be a Data or a HeteroData; got {type(data).__name__}.")
    if method is not None and method not in METHODS:
        raise ArgumentError(f"method must be one of {', '.join(METHODS)}, or None; got {method!r}.")
    parts = at_least(1, parts, "parts")
    counts = node_counts(data)
    chosen = _chosen(data, method)
    weight = _weights(node_weight, "node_weight", counts, "nodes")
    if weight is not None:
        if chosen == "random":
            raise ArgumentError('method="random" takes no node_weight. Choose another method.')
        if len(weight):
            check_sum(float(weight.double().sum()), 2.0**62 / parts, "node_weight", least=1)
    if edge_weight is not None and chosen != "metis":
        raise ArgumentError(f'method="{chosen}" takes no edge_weight; "metis" does.')
    if chunk is None:
        owner = _owners(data, counts, parts, chosen, weight, edge_weight)
    else:
        owner = _by_chunks(data, counts, parts, chosen, weight, edge_weight, chunk)
    if isinstance(data, HeteroData):
        return dict(zip(counts, owner.split(list(counts.values())), strict=True))
    return owner


def assign_sharded(
    pos: torch.Tensor,
    parts: int,
    method: str = "hilbert",
    group: GroupLike = None,
    *,
    node_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Assign each node to one of `parts` ranks, if no rank has all positions.

    Collective; an error on one rank is raised on all ranks. The result equals the result of
    :func:`assign` for the positions of all ranks in rank order. Positions stay on their rank.
    Communication: at most 8 rounds for ``"hilbert"``, and for ``"rcb"`` 8 for each of the
    ``log2(parts)`` levels of boxes, and a round per 8 bits of N. Each round takes an
    :func:`all_reduce` of at most 2 KiB per cut.

    In one process: :func:`assign`.

    Parameters
    ----------
    pos : torch.Tensor
        This rank's positions, finite, of shape (n, D) or (n,); n may be zero. D and the dtype are
        identical on all ranks.
    parts : int
        Number of parts, independent of the number of ranks in `group`.
    method : {"hilbert", "rcb"}
        As in :func:`assign`.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None means the whole world.
    node_weight : torch.Tensor, optional
        Cost of each node: non-negative integers of shape (n,); on all ranks or on none.

    Returns
    -------
    torch.Tensor
        The part of each of this rank's nodes, int64 of shape (n,), on the device of `pos`.

    Raises
    ------
    ArgumentError
        On every rank, if positions, weights, `parts` or `method` are invalid on one rank.
    DisagreementError
        On every rank, if ranks differ in D, dtype, device, `parts`, `method` or use of weights.
    GroupError
        If this rank is not in `group`; on every rank, if `group` does not serve the device.

    See Also
    --------
    assign, from_edges

    Examples
    --------
    >>> import torch, varcomm
    >>> def fn(rank):
    ...     pos = torch.tensor([0.0, 3.0, 1.0]) if rank == 0 else torch.tensor([2.0])
    ...     return varcomm.graph.assign_sharded(pos, 2, "rcb")
    >>> varcomm.launch(fn, 2)
    [tensor([0, 1, 0]), tensor([1])]
    """
    ranks, what = resolve(group), "graph.assign_sharded"

    def check() -> tuple[torch.Tensor, torch.Tensor | None]:
        if method not in _BY_POSITION:
            raise ArgumentError(f"method must be one of {', '.join(_BY_POSITION)}; got {method!r}.")
        at_least(1, parts, "parts")
        if isinstance(pos, torch.Tensor):
            engine_for(ranks, pos.device)
        rows = checked_positions(pos, "pos", method)
        if node_weight is None:
            return rows, None
        if isinstance(node_weight, torch.Tensor) and node_weight.device != rows.device:
            raise ArgumentError(f"node_weight is on {node_weight.device}, pos is on {rows.device}.")
        return rows, checked_weight(node_weight, "node_weight", len(rows), "rows")

    rows, weight = agree(what, check, ranks)
    same = {"parts": int(parts), "method": method, "coordinates": rows.shape[1]}
    same |= {"dtype": str(rows.dtype), "device": rows.device.type}
    compare(ranks, {"operation": what, **same, "node_weight": weight is not None})
    if weight is not None:
        total = float(weight.double().sum())
        counts, totals = zip(*share(what, lambda: (len(rows), total), ranks), strict=True)
        if any(counts):
            check_sum(sum(totals), 2.0**62 / parts, f"{what}: node_weight", least=1)
    return _BY_POSITION[method](rows, int(parts), AllRows(ranks), weight)


def method_used(data: Data | HeteroData, parts: int, method: str | None) -> str:
    """Return the method that assigns the nodes: `method`, or the first that has its data.

    METIS cannot cut into one part, or into more parts than nodes: blocks instead.
    """
    method = _chosen(data, method)
    can_cut = 1 < parts < sum(node_counts(data).values())
    return "block" if method == "metis" and not can_cut else method


def _chosen(data: Data | HeteroData, method: str | None) -> str:
    if method is not None:
        return method
    has_edges = any(store.get("edge_index") is not None for store in data.edge_stores)
    if has_edges and importlib.util.find_spec("pymetis") is not None:
        return "metis"
    return "rcb" if all(store.get("pos") is not None for store in data.node_stores) else "block"


def _owners(
    data: Data | HeteroData,
    counts: Mapping[Any, int],
    parts: int,
    method: str,
    weight: torch.Tensor | None,
    edge_weight: Any,
) -> torch.Tensor:
    """Return the rank of each node, type after type."""
    nodes = sum(counts.values())
    if method in _BY_POSITION:
        return _BY_POSITION[method](_positions(data, method, counts), parts, AllRows(), weight)
    if method == "random":
        return torch.from_numpy(np.random.default_rng(0).integers(parts, size=nodes))
    if method == "metis":
        # checked even if there is nothing to cut
        edge_index, cost = _edges(data, counts, edge_weight)
        if 1 < parts < nodes:
            return _by_metis(edge_index, nodes, cost, parts, weight)
    weights = [None] * len(counts) if weight is None else weight.split(list(counts.values()))
    each = zip(counts.values(), weights, strict=True)
    return torch.cat([by_order(count, parts, weight) for count, weight in each])


def _by_chunks(
    data: Data | HeteroData,
    counts: Mapping[Any, int],
    parts: int,
    method: str,
    weight: torch.Tensor | None,
    edge_weight: Any,
    chunk: Any,
) -> torch.Tensor:
    """Return the rank of each node, type after type, from the ranks of chunks."""
    if isinstance(data, HeteroData) != isinstance(chunk, Mapping) or (
        isinstance(chunk, Mapping) and not chunk.keys() <= counts.keys()
    ):
        kinds = "an integer" if None in counts else f"a dict of integers for some of {list(counts)}"
        raise ArgumentError(f"chunk must be {kinds}; got {chunk!r}.")
    rows = {key: chunk.get(key, 1) if isinstance(chunk, Mapping) else chunk for key in counts}
    rows = {key: at_least(1, own, "chunk") for key, own in rows.items()}
    coarse = HeteroData() if isinstance(data, HeteroData) else Data()
    chunks = {key: -(-count // rows[key]) for key, count in counts.items()}
    numbers = {key: torch.arange(count) // rows[key] for key, count in counts.items()}
    weight = torch.ones(sum(counts.values()), dtype=torch.int64) if weight is None else weight
    weights = []
    for (key, number), own in zip(numbers.items(), weight.split([*counts.values()]), strict=True):
        weights.append(own.new_zeros(chunks[key]).index_add_(0, number, own))
        if method in _BY_POSITION:
            fine, store = (data, coarse) if key is None else (data[key], coarse[key])
            pos = checked_positions(fine.get("pos"), f"{label(key)}.pos", method, len(own)).cpu()
            sums = torch.zeros(chunks[key], pos.shape[1], dtype=torch.float64)
            each = torch.bincount(number, minlength=chunks[key])
            store.pos = sums.index_add_(0, number, pos.double()) / each[:, None]
    if method == "metis":
        costs: dict[Any, torch.Tensor] = {}
        for kind, edge_index in edge_indices(data, counts).items():
            source, target = ends(kind)
            store = coarse if kind is None else coarse[kind]
            u, v = edge_index.cpu()
            store.edge_index = torch.stack([u // rows[source], v // rows[target]])
            costs[kind] = torch.ones(len(u), dtype=torch.int64)
        if edge_weight is None:
            edge_weight = costs[None] if None in counts else costs
    total = None if method == "random" else torch.cat(weights)
    owners = _owners(coarse, chunks, parts, method, total, edge_weight)
    of_types = zip(numbers.values(), owners.split([*chunks.values()]), strict=True)
    return torch.cat([owner[number] for number, owner in of_types])


def _by_metis(
    edge_index: torch.Tensor,
    nodes: int,
    edge_weight: torch.Tensor | None,
    parts: int,
    node_weight: torch.Tensor | None,
) -> torch.Tensor:
    """Return the part of each node by METIS's k-way partitioning, or its recursive bisection."""
    try:
        import pymetis
    except ImportError as error:
        raise MissingPackageError(
            'method="metis" needs pymetis: pip install pymetis. '
            'Or choose method="rcb" (with data.pos) or "block".'
        ) from error
    # weights of all edges between two nodes are added; a sum of zero removes the edge
    if edge_weight is not None:
        edge_index, edge_weight = edge_index[:, edge_weight > 0], edge_weight[edge_weight > 0]
    edge_index, edge_weight = remove_self_loops(edge_index, edge_weight)
    if edge_weight is None:
        edge_index = to_undirected(edge_index, num_nodes=nodes)
    else:
        edge_index, edge_weight = to_undirected(edge_index, edge_weight, nodes, reduce="add")
    source, target = edge_index.contiguous()
    starts = torch.searchsorted(source, torch.arange(nodes + 1))
    _, owner = pymetis.part_graph(
        parts,
        adjacency=pymetis.CSRAdjacency(starts.numpy(), target.numpy()),
        vweights=None if node_weight is None else node_weight.numpy(),
        eweights=None if edge_weight is None else edge_weight.numpy(),
    )
    return torch.from_numpy(np.asarray(owner, dtype=np.int64))


def _positions(data: Data | HeteroData, method: str, counts: Mapping[Any, int]) -> torch.Tensor:
    found = [
        checked_positions(store.get("pos"), f"{label(kind)}.pos", method, counts[kind]).cpu()
        for kind, store in stores(data, "node")
    ]
    if len({pos.shape[1] for pos in found}) > 1:
        raise ArgumentError(
            f'method="{method}" needs as many coordinates for nodes of every type; got positions '
            f"of shapes {', '.join(str(tuple(pos.shape)) for pos in found)}."
        )
    return torch.cat(found)


def _edges(
    data: Data | HeteroData, counts: Mapping[Any, int], weight: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return all edges, nodes counted type after type, and their weights, if any; on the CPU."""
    starts = dict(zip(counts, accumulate(counts.values(), initial=0), strict=False))
    found = edge_indices(data, counts)
    shifted = [torch.zeros(2, 0, dtype=torch.int64)]
    for kind, edge_index in found.items():
        shift = torch.tensor([[starts[end]] for end in ends(kind)])
        shifted.append(edge_index.cpu() + shift if shift.any() else edge_index.cpu())
    rows = {kind: edge_index.shape[1] for kind, edge_index in found.items()}
    cost = _weights(weight, "edge_weight", rows, "edges")
    if cost is not None:
        check_sum(2 * float(cost.double().sum()), 2.0**62, "edge_weight, from both ends,")
    return torch.cat(shifted, dim=1), cost


def _weights(given: Any, name: str, counts: Mapping[Any, int], rows: str) -> torch.Tensor | None:
    """Return the weights of the nodes or edges of all types, int64 on the CPU, if any."""
    if given is None:
        return None
    if None in counts:
        given = {None: given}
    if not isinstance(given, Mapping) or given.keys() != counts.keys():
        got = list(given) if isinstance(given, Mapping) else type(given).__name__
        raise ArgumentError(
            f"{name} must be a dict with the weights of each of {list(counts)}; got {got}."
        )
    weights = [torch.zeros(0, dtype=torch.int64)]
    for kind, count in counts.items():
        each = name if kind is None else f"{name}[{kind!r}]"
        weights.append(checked_weight(given[kind], each, count, rows).cpu())
    return torch.cat(weights)
