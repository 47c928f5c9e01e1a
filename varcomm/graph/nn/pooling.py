"""Pools over the nodes of each graph of a batch; graphs may span ranks.

The functions are exact operators: their backward sums the gradients of all ranks. If all ranks then
compute the same loss, :func:`~varcomm.graph.replicated` counts it once::

    pooled = global_mean_pool(x, graph.batch, graph)
    loss = replicated(F.cross_entropy(head(pooled), y), graph)

Floats narrower than 4 bytes are summed and sent in fp32, and rounded once.
"""

from __future__ import annotations

import torch

from varcomm.errors import ArgumentError
from varcomm.graph.nn.graphs import Batch, accumulated, extreme, extreme_value, first_maximum
from varcomm.graph.nn.rows import Where, batch_of, check_rows, node_rows
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
    own, graphs = _pooled("global_add_pool", x, batch, graph, size)
    total = graphs.sum(own)
    return total.to(x.dtype) if x.is_floating_point() else total


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
    ...     x, edge = torch.tensor([[1.0], [2.0], [6.0]]), torch.tensor([[0], [1]])
    ...     graph = varcomm.graph.partition(Data(x=x, edge_index=edge), method="block")
    ...     return varcomm.graph.global_mean_pool(graph.x, None, graph).tolist()
    >>> varcomm.launch(fn, 2)
    [[[3.0]], [[3.0]]]
    """
    own, graphs = _pooled("global_mean_pool", x, batch, graph, size)
    mean = graphs.mean(own) if batch is not None else graphs.sum(own) / graphs.rows.total
    return mean.to(x.dtype) if x.is_floating_point() else mean


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

    Communication: ``(P - 1) / P`` times G F values and 4-byte counts (without `batch` 8-byte ids),
    and the same of values; up to 16 KiB, and on two ranks, ``P - 1`` times G F values and counts.
    In backward values alone.

    In one process: :func:`torch_geometric.nn.global_max_pool`.

    Examples
    --------
    >>> import torch, varcomm
    >>> from torch_geometric.data import Data
    >>> def fn(rank):
    ...     x, edge = torch.tensor([[1.0], [2.0], [6.0]]), torch.tensor([[0], [1]])
    ...     graph = varcomm.graph.partition(Data(x=x, edge_index=edge), method="block")
    ...     return varcomm.graph.global_max_pool(graph.x, None, graph).tolist()
    >>> varcomm.launch(fn, 2)
    [[[6.0]], [[6.0]]]
    """
    own, graphs = _pooled("global_max_pool", x, batch, graph, size, ordered=True)
    if batch is not None:
        return extreme("amax", own, graphs)
    return first_maximum(own, graphs)


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
        (G, *F), as of :func:`global_max_pool`.

    Notes
    -----
    Nodes with the same minimum share the gradient evenly.

    Communication: as :func:`global_max_pool`.

    In one process: the minimum of each feature among ``x[batch == g]``, for graph g.

    Examples
    --------
    >>> import torch, varcomm
    >>> from torch_geometric.data import Data
    >>> def fn(rank):
    ...     x, edge = torch.tensor([[1.0], [2.0], [6.0]]), torch.tensor([[0], [1]])
    ...     graph = varcomm.graph.partition(Data(x=x, edge_index=edge), method="block")
    ...     return varcomm.graph.global_min_pool(graph.x, None, graph).tolist()
    >>> varcomm.launch(fn, 2)
    [[[1.0]], [[1.0]]]
    """
    own, graphs = _pooled("global_min_pool", x, batch, graph, size, ordered=True)
    return extreme("amin", own, graphs)


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
        Rows as of `x`, which sum to 1 over the nodes of a graph on all ranks.

    Notes
    -----
    ``exp(x - m) / sum(exp(x - m))``, where the maximum m of a graph is a constant.

    Communication: maxima, G F, then :func:`varcomm.all_reduce` of G F sums.

    In one process: :func:`torch_geometric.utils.softmax` of `x` by `batch`.

    Examples
    --------
    >>> import torch, varcomm
    >>> from torch_geometric.data import Data
    >>> def fn(rank):
    ...     x, edge = torch.tensor([[1.0], [1.0], [1.0]]), torch.tensor([[0], [1]])
    ...     graph = varcomm.graph.partition(Data(x=x, edge_index=edge), method="block")
    ...     return (3 * varcomm.graph.global_softmax(graph.x, None, graph)).tolist()
    >>> varcomm.launch(fn, 2)
    [[[1.0], [1.0]], [[1.0]]]
    """
    rows = node_rows("global_softmax", x, graph)
    graphs = batch_of("global_softmax", rows, x, batch, size, dims=())
    wide = x.to(accumulated(x.dtype))
    top = extreme_value("amax", wide[: rows.num_owned], graphs)
    share = (wide - graphs.at_nodes(top)).exp()
    return (share / graphs.at_nodes(graphs.sum(share))).to(x.dtype)


def _pooled(
    name: str,
    x: torch.Tensor,
    batch: torch.Tensor | None,
    graph: Where,
    size: int | None,
    ordered: bool = False,
) -> tuple[torch.Tensor, Batch]:
    """Check the arguments of a pool; return the owned rows and their graphs."""
    rows = node_rows(name, x, graph)
    with checking(name, rows.group) as where:
        check_rows(x, rows, where)
        if x.dtype == torch.bool or (ordered and x.is_complex()):
            kinds = "numbers that have an order" if ordered else "numbers"
            raise ArgumentError(f"{where}x must be of {kinds}; got {x.dtype}.")
        if ordered and batch is None and rows.total == 0:
            raise ArgumentError(f"{where}there are no {rows.name}, and none could be the extreme.")
    own = x[: rows.num_owned]
    if isinstance(batch, torch.Tensor) and batch.shape == (rows.num_owned + rows.num_halo,):
        batch = batch[: rows.num_owned]
    return own, batch_of(name, rows, own, batch, size)
