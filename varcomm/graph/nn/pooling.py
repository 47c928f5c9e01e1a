"""Pooling over the nodes of each graph of a batch, where graphs span ranks.

Each function takes the rows of this rank's owned nodes and the number of the graph that each is in,
in any order, and returns what all ranks together have for each graph, on every rank.

They are exact operators, as the collectives are: each rank's result depends on the rows of every
rank, so that what arrives at the results of all ranks in backward is summed. Where all ranks then
compute the same loss, :func:`~varcomm.graph.reductions.replicated` makes it count once::

    pooled = global_mean_pool(x, graph.batch, graph)
    loss = replicated(F.cross_entropy(head(pooled), y), graph)

Floats narrower than 4 bytes are summed and sent in fp32, and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch_geometric import nn as pyg

from varcomm.errors import ArgumentError
from varcomm.graph.nn.batches import Batch, accumulated, batch_of
from varcomm.graph.nn.extremes import extreme, extreme_value, first_maximum
from varcomm.graph.nn.rows import Where, check_rows, node_rows
from varcomm.graph.partitioned_graph import PartitionedGraph
from varcomm.ops.autograd import kept_from_compilation
from varcomm.ops.operator import checking

__all__ = [
    "POOL_FUNCTIONS",
    "global_add_pool",
    "global_max_pool",
    "global_mean_pool",
    "global_min_pool",
    "global_softmax",
    "pools_for",
    "softmax_over",
]


@kept_from_compilation
def global_add_pool(
    x: torch.Tensor,
    batch: torch.Tensor | None,
    graph: Where,
    size: int | None = None,
) -> torch.Tensor:
    """Sum over the nodes of each graph.

    Parameters
    ----------
    x : torch.Tensor
        Rows of the owned nodes, (n, *F), or of these and the halo, which does not count. Any dtype
        but bool; the same dtype and ``*F`` on every rank.
    batch : torch.Tensor or None
        The number of the graph that each row is in, int64 of shape (n,), in any order; graphs may
        have nodes on several ranks, or none. None: all nodes are one graph.
    graph : PartitionedGraph, NodeShard or EdgeShard
        Whose nodes they are; or these themselves, ``graph["paper"]``, or edges. Of a graph with
        several types of nodes they are those of which there are as many on all ranks.
    size : int, optional
        How many graphs there are, G, the same on every rank. If it is not given: one more than the
        largest number in `batch` on any rank.

    Returns
    -------
    torch.Tensor
        (G, *F), the same on every rank bit for bit; 0 for graphs without nodes.

    Raises
    ------
    ArgumentError
        Before any communication, if `x`, `batch` or `size` do not fit on this rank. On every rank,
        if `graph` has several types of nodes, and `x` fits to none of them or to more than one.

    Notes
    -----
    Adjoint: gradients of all ranks are summed, and each node gets that of its graph.

    Communication: :func:`varcomm.all_reduce` of the result, and 8 bytes a rank where `size` is
    asked for. Of a graph with several types of nodes, ranks tell each other before which fit.

    In one process: :func:`torch_geometric.nn.global_add_pool`.

    Examples
    --------
    >>> import torch, varcomm
    >>> from torch_geometric.data import Data
    >>> def fn(rank):
    ...     data = Data(x=torch.eye(3), batch=torch.tensor([0, 1, 0]), edge_index=torch.ones(2, 0))
    ...     data.edge_index = data.edge_index.long()
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
    x: torch.Tensor,
    batch: torch.Tensor | None,
    graph: Where,
    size: int | None = None,
) -> torch.Tensor:
    """Average over the nodes of each graph; as :func:`global_add_pool`.

    Parameters
    ----------
    x, batch, graph, size
        As of :func:`global_add_pool`.

    Returns
    -------
    torch.Tensor
        (G, *F), the same on every rank bit for bit; 0 for graphs without nodes. Without
        `batch`, the mean of no nodes is NaN, as of torch.

    Raises
    ------
    ArgumentError
        As :func:`global_add_pool`.

    Notes
    -----
    Communication: as :func:`global_add_pool`; with `batch`, 8 bytes a graph more, to count nodes.

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
    x: torch.Tensor,
    batch: torch.Tensor | None,
    graph: Where,
    size: int | None = None,
) -> torch.Tensor:
    """Return the largest of each feature among the nodes of each graph.

    Parameters
    ----------
    x, batch, graph, size
        As of :func:`global_add_pool`; no complex `x`, and some node, on any rank, where `batch` is
        None.

    Returns
    -------
    torch.Tensor
        (G, *F), the same on every rank bit for bit; 0 for graphs without nodes.

    Raises
    ------
    ArgumentError
        As :func:`global_add_pool`.

    Notes
    -----
    Where nodes have the same largest value, each gets an equal share of the gradient, on whichever
    ranks they are; where `batch` is None, the first in the order of the whole graph gets it. This
    is what PyG does; so is it that a largest value of 0 loses a share, to the 0 that torch starts
    from.

    Communication: values and how often they occur go to the ranks that compare a piece of them, and
    values come back; in all ``(P - 1) / P`` times G F values, 4-byte counts, and G F values. Up to
    16 KiB, and on two ranks, each compares all: ``P - 1`` times G F values and counts. In backward,
    values alone, the other way. Where `batch` is None, 8-byte numbers in place of counts.

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
    x: torch.Tensor,
    batch: torch.Tensor | None,
    graph: Where,
    size: int | None = None,
) -> torch.Tensor:
    """Return the smallest of each feature among the nodes of each graph.

    As :func:`global_max_pool`, but for equal shares of the gradient where `batch` is None, too.

    Parameters
    ----------
    x, batch, graph, size
        As of :func:`global_max_pool`.

    Returns
    -------
    torch.Tensor
        (G, *F), the same on every rank bit for bit; 0 for graphs without nodes.

    Raises
    ------
    ArgumentError
        As :func:`global_add_pool`.

    Notes
    -----
    Communication: as :func:`global_max_pool`.

    In one process: the smallest of each feature among ``x[batch == g]``, for graph g.

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
    x: torch.Tensor,
    batch: torch.Tensor | None,
    graph: Where,
    size: int | None = None,
) -> torch.Tensor:
    """Normalise over the nodes of each graph, feature by feature: attention to read out by.

    Parameters
    ----------
    x : torch.Tensor
        Floats, (n, *F) or with the halo's rows, which are normalised and do not count.
    batch, graph, size
        As for :func:`global_add_pool`; `batch` with as many rows as `x`.

    Returns
    -------
    torch.Tensor
        Rows as of `x`, which sum to 1 over the nodes of a graph on all ranks.

    Raises
    ------
    ArgumentError
        As :func:`global_add_pool`.

    Notes
    -----
    ``exp(x - m) / sum(exp(x - m))``, where the largest value m of a graph is taken as a constant:
    it does not change the result.

    Communication: largest values, G F, then :func:`varcomm.all_reduce` of G F sums.

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
    with checking("global_softmax", rows.group) as where:
        check_rows(x, rows, where)
        if not x.is_floating_point():
            raise ArgumentError(f"{where}x must be of floats; got {x.dtype}.")
    graphs = batch_of("global_softmax", rows, x, batch, size)
    return softmax_over(x, graphs)


def softmax_over(x: torch.Tensor, graphs: Batch) -> torch.Tensor:
    """Do what :func:`global_softmax` does, with what has been checked."""
    wide = x.to(accumulated(x.dtype))
    top = extreme_value("amax", wide[: graphs.rows.num_owned], graphs.owned())
    share = (wide - graphs.at_nodes(top)).exp()
    return (share / graphs.at_nodes(graphs.sum(share))).to(x.dtype)


POOL_FUNCTIONS: dict[Callable[..., torch.Tensor], Callable[..., torch.Tensor]] = {
    pyg.global_add_pool: global_add_pool,
    pyg.global_mean_pool: global_mean_pool,
    pyg.global_max_pool: global_max_pool,
}


def pools_for(
    graph: PartitionedGraph,
) -> dict[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
    """Return, for each function of PyG that pools over nodes, what to call in its place.

    They take the same arguments, ``(x, batch, size=None)``. With more than two dimensions, nodes
    are along the last but one, as in PyG.
    """
    return {theirs: _AsInPyG(ours, graph) for theirs, ours in POOL_FUNCTIONS.items()}


@dataclass(frozen=True, eq=False)
class _AsInPyG:
    """One of the functions above, for one graph."""

    pool: Callable[..., torch.Tensor]
    graph: Where

    @kept_from_compilation
    def __call__(
        self, x: torch.Tensor, batch: torch.Tensor | None, size: int | None = None
    ) -> torch.Tensor:
        if not isinstance(x, torch.Tensor) or x.dim() <= 2:
            return self.pool(x, batch, self.graph, size)
        out = self.pool(x.movedim(-2, 0), batch, self.graph, size)
        return out[0] if batch is None else out.movedim(0, -2)


def _pooled(
    name: str,
    x: torch.Tensor,
    batch: torch.Tensor | None,
    graph: Where,
    size: int | None,
    ordered: bool = False,
) -> tuple[torch.Tensor, Batch]:
    """Check what a pool is given; return the owned rows, and which graph they are in."""
    rows = node_rows(name, x, graph)
    with checking(name, rows.group) as where:
        check_rows(x, rows, where)
        if x.dtype == torch.bool or (ordered and x.is_complex()):
            kinds = "numbers that have an order" if ordered else "numbers"
            raise ArgumentError(f"{where}x must be of {kinds}; got {x.dtype}.")
        if ordered and batch is None and rows.total == 0:
            raise ArgumentError(
                f"{where}there are no {rows.name}, of which one could be the extreme."
            )
    own = x[: rows.num_owned]
    if isinstance(batch, torch.Tensor) and batch.shape == (rows.num_owned + rows.num_halo,):
        batch = batch[: rows.num_owned]
    return own, batch_of(name, rows, own, batch, size)
