"""Pools over the nodes of each graph of a batch; graphs may span ranks.

The functions are exact operators: their backward sums the gradients of all ranks. If all ranks then
compute the same loss, :func:`~varcomm.graph.replicated` counts it once::

    pooled = global_mean_pool(x, graph.batch, graph)
    loss = replicated(F.cross_entropy(head(pooled), y), graph)

Floats narrower than 4 bytes are summed and sent in fp32, and rounded once.
"""

from __future__ import annotations

import torch
from torch_geometric.utils import scatter, softmax

from varcomm.errors import ArgumentError
from varcomm.graph.nn.graphs import accumulated, first_maximum
from varcomm.graph.nn.rows import Where, check_floats, node_rows
from varcomm.ops.compilation import kept_from_compilation
from varcomm.ops.operator import checking

__all__ = [
    "global_add_pool",
    "global_max_pool",
    "global_mean_pool",
    "global_min_pool",
    "global_softmax",
]


@kept_from_compilation
def global_add_pool(
    x: torch.Tensor, batch: torch.Tensor | None, graph: Where, size: int | None = None
) -> torch.Tensor:
    """Sum over the nodes of each graph.

    Parameters
    ----------
    x : torch.Tensor
        Rows of the owned nodes, (n, *F), or of these and the halo, which does not count; not bool.
    batch : torch.Tensor or None
        The graph of each row, int64 of shape (n,), in any order; None if all are of one graph.
    graph : PartitionedGraph, NodeShard or EdgeShard
        The graph, or its nodes or edges of a type, ``graph["paper"]``. In a graph of several types,
        the type with as many rows as `x` on all ranks.
    size : int, optional
        Number of graphs, G; None is one more than the largest number in `batch` on any rank.

    Returns
    -------
    torch.Tensor
        (G, *F), the same bits on every rank; 0 for graphs without nodes.

    Raises
    ------
    ArgumentError
        On this rank, before any communication, if `x`, `batch` or `size` do not fit. On every rank,
        if `x` fits no type of nodes, or several.

    Notes
    -----
    Adjoint: gradients of all ranks are summed, and each node gets that of its graph.

    Communication: :func:`varcomm.all_reduce` of the result; 8 bytes per rank if `size` is None. In
    a graph of several types, ranks first agree on the type.

    In one process: :func:`torch_geometric.nn.global_add_pool`.

    Examples
    --------
    >>> import torch, varcomm
    >>> from torch_geometric.data import Data
    >>> def fn(rank):
    ...     edge, batch = torch.tensor([[0], [1]]), torch.tensor([0, 1, 0])
    ...     data = Data(x=torch.eye(3), batch=batch, edge_index=edge)
    ...     graph = varcomm.graph.partition(data, method="block")
    ...     return varcomm.graph.global_add_pool(graph.x, graph.batch, graph).tolist()
    >>> varcomm.launch(fn, 2)[1]
    [[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]
    """
    return _pooled("global_add_pool", "sum", x, batch, graph, size)


@kept_from_compilation
def global_mean_pool(
    x: torch.Tensor, batch: torch.Tensor | None, graph: Where, size: int | None = None
) -> torch.Tensor:
    """Average over the nodes of each graph.

    Parameters
    ----------
    x, batch, graph, size
        As of :func:`global_add_pool`, with its errors.

    Returns
    -------
    torch.Tensor
        (G, *F), the same bits on every rank; 0 for graphs without nodes. Without `batch`, the mean
        of no nodes is NaN, as in torch.

    Notes
    -----
    Communication: as :func:`global_add_pool`; with `batch`, 8 bytes per graph to count nodes.

    In one process: :func:`torch_geometric.nn.global_mean_pool`.

    Examples
    --------
    >>> import torch, varcomm
    >>> from torch_geometric.data import Data
    >>> def fn(rank):
    ...     data = Data(x=torch.tensor([[1.0], [8.0]]), edge_index=torch.tensor([[0], [1]]))
    ...     graph = varcomm.graph.partition(data, method="block")
    ...     return varcomm.graph.global_mean_pool(graph.x, None, graph).tolist()
    >>> varcomm.launch(fn, 2)
    [[[4.5]], [[4.5]]]
    """
    return _pooled("global_mean_pool", "mean", x, batch, graph, size)


@kept_from_compilation
def global_max_pool(
    x: torch.Tensor, batch: torch.Tensor | None, graph: Where, size: int | None = None
) -> torch.Tensor:
    """Return the maximum of each feature over the nodes of each graph.

    Parameters
    ----------
    x, batch, graph, size
        As of :func:`global_add_pool`, with its errors; no complex `x`; if `batch` is None, some
        rank must have a node.

    Returns
    -------
    torch.Tensor
        (G, *F), the same bits on every rank; 0 for graphs without nodes.

    Notes
    -----
    As in PyG, nodes with the same maximum share the gradient evenly; if `batch` is None, the first
    node in the order of the full graph gets it; a maximum of 0 loses a share to the 0 that torch
    starts from.

    Communication: up to ``P - 1`` times G F values and 4-byte counts; twice ``(P - 1) / P`` times
    as much above 16 KiB. In backward values alone.

    In one process: :func:`torch_geometric.nn.global_max_pool`.

    Examples
    --------
    >>> import torch, varcomm
    >>> from torch_geometric.data import Data
    >>> def fn(rank):
    ...     data = Data(x=torch.tensor([[1.0], [8.0]]), edge_index=torch.tensor([[0], [1]]))
    ...     graph = varcomm.graph.partition(data, method="block")
    ...     return varcomm.graph.global_max_pool(graph.x, None, graph).tolist()
    >>> varcomm.launch(fn, 2)
    [[[8.0]], [[8.0]]]
    """
    return _pooled("global_max_pool", "max", x, batch, graph, size)


@kept_from_compilation
def global_min_pool(
    x: torch.Tensor, batch: torch.Tensor | None, graph: Where, size: int | None = None
) -> torch.Tensor:
    """Return the minimum of each feature over the nodes of each graph.

    Parameters
    ----------
    x, batch, graph, size
        As of :func:`global_max_pool`.

    Returns
    -------
    torch.Tensor
        (G, *F), as of :func:`global_max_pool`; nodes with the same minimum share its gradient.

    Notes
    -----
    Communication: as :func:`global_max_pool`.

    In one process: the minimum of each feature among ``x[batch == g]``, for graph g.

    Examples
    --------
    >>> import torch, varcomm
    >>> from torch_geometric.data import Data
    >>> def fn(rank):
    ...     data = Data(x=torch.tensor([[1.0], [8.0]]), edge_index=torch.tensor([[0], [1]]))
    ...     graph = varcomm.graph.partition(data, method="block")
    ...     return varcomm.graph.global_min_pool(graph.x, None, graph).tolist()
    >>> varcomm.launch(fn, 2)
    [[[1.0]], [[1.0]]]
    """
    return _pooled("global_min_pool", "min", x, batch, graph, size)


@kept_from_compilation
def global_softmax(
    x: torch.Tensor, batch: torch.Tensor | None, graph: Where, size: int | None = None
) -> torch.Tensor:
    """Normalise each feature over the nodes of each graph: attention for a readout.

    Parameters
    ----------
    x : torch.Tensor
        Floats, (n, *F) or with the halo's rows, which are normalised and do not count.
    batch, graph, size
        As of :func:`global_add_pool`, with its errors; `batch` with as many rows as `x`.

    Returns
    -------
    torch.Tensor
        Rows as of `x`, whose owned ones sum to 1 over the nodes of a graph on all ranks.

    Notes
    -----
    Communication: as :func:`global_max_pool`, then :func:`varcomm.all_reduce` of G F sums.

    In one process: :func:`torch_geometric.utils.softmax` of `x` by `batch`.

    Examples
    --------
    >>> import torch, varcomm
    >>> from torch_geometric.data import Data
    >>> def fn(rank):
    ...     data = Data(x=torch.tensor([[1.0], [1.0]]), edge_index=torch.tensor([[0], [1]]))
    ...     graph = varcomm.graph.partition(data, method="block")
    ...     return varcomm.graph.global_softmax(graph.x, None, graph).tolist()
    >>> varcomm.launch(fn, 2)
    [[[0.5]], [[0.5]]]
    """
    rows = node_rows("global_softmax", x, graph)
    with checking("global_softmax", rows.group) as where:
        check_floats(x, (), where)
    known, size = rows.index("global_softmax", x, batch, size)
    return softmax(x.to(accumulated(x.dtype)), known, num_nodes=size).to(x.dtype)  # type: ignore[no-any-return]


def _pooled(
    name: str,
    reduce: str,
    x: torch.Tensor,
    batch: torch.Tensor | None,
    graph: Where,
    size: int | None,
) -> torch.Tensor:
    """Check the arguments of a pool, and reduce the owned rows of all ranks by their graphs."""
    rows, ordered = node_rows(name, x, graph), reduce in ("max", "min")
    with checking(name, rows.group) as where:
        rows.check(x, where)
        if x.dtype == torch.bool or (ordered and x.is_complex()):
            kinds = "numbers that have an order" if ordered else "numbers"
            raise ArgumentError(f"{where}x must be of {kinds}; got {x.dtype}.")
        if ordered and batch is None and rows.total(x) == 0:
            raise ArgumentError(f"{where}there are no {rows.name}, and none could be the extreme.")
    if x.is_complex():  # which PyG does not divide by counts
        parts = torch.view_as_real(x.resolve_conj())
        return torch.view_as_complex(_pooled(name, reduce, parts, batch, graph, size))
    own = x[: rows.num_owned]
    if isinstance(batch, torch.Tensor) and batch.shape == x.shape[:1]:
        batch = batch[: rows.num_owned]
    if batch is None and reduce == "max":
        return first_maximum(own, rows.shard)
    if batch is None and not ordered:
        out = rows.sum(own)
        out = out / rows.total(x) if reduce == "mean" else out
    else:
        known, size = rows.index(name, own, batch, size)
        exact = ordered or not x.is_floating_point()
        out = scatter(own if exact else own.to(accumulated(x.dtype)), known, 0, size, reduce)
    return out.to(x.dtype) if x.is_floating_point() else out
