"""Normalisation over the nodes or edges of all ranks, by the modules of PyTorch and PyG.

:func:`global_norm` gives what stands for a module's ``forward``: outputs, running statistics and
derivatives of any order are then those of one process on the whole graph.

Statistics are of owned rows, summed over ranks by exact operators: in backward, what arrives at a
statistic on any rank is summed over ranks, and goes to the owned rows that it was made of. Rows may
be given with the halo's; these are normalised as their originals are, and count in no statistic.
Whether rows are of nodes or of edges, and of which type, is seen at the first call.

Variances are means of squared distances from the mean, which takes two rounds of messages but loses
nothing where means are large [1]_. Floats narrower than 4 bytes are normalised in fp32 and rounded
once, as torch does in its ``batch_norm``; rows are counted in int64.

.. [1] Chan, Golub and LeVeque, "Algorithms for Computing the Sample Variance: Analysis and
   Recommendations", 1983.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch_geometric.nn import norm

from varcomm.errors import ArgumentError
from varcomm.graph.nn.batch_norms import (
    batch_norm,
    diff_group_norm,
    hetero_batch_norm,
    instance_norm,
    pyg_batch_norm,
)
from varcomm.graph.nn.batches import (
    Batch,
    accumulated,
    batch_of,
    check_floats,
    result_dtype,
)
from varcomm.graph.nn.rows import Rows, Where, rows_of_any_kind
from varcomm.ops.autograd import kept_from_compilation
from varcomm.ops.operator import checking

__all__ = ["GLOBAL_NORMS", "global_norm", "is_global_norm"]


def global_norm(module: torch.nn.Module, graph: Where) -> Callable[..., torch.Tensor]:
    """Return what stands for ``module.forward`` where rows are split over ranks.

    Parameters
    ----------
    module : torch.nn.Module
        Of :data:`GLOBAL_NORMS`, or derived without a ``forward`` of its own. It keeps its
        parameters and buffers; its state dict does not change.
    graph : PartitionedGraph, NodeShard or EdgeShard
        Over whose rows it normalises. Of a graph, they are those of the nodes, or else the edges,
        of one type: of which there are as many on all ranks, at the first call.

    Returns
    -------
    callable
        Takes what ``module.forward`` takes, of this rank: owned rows, or these and those of
        the halo, and a batch vector of as many rows, int64. Graphs of a batch may span ranks;
        `batch_size`, where it is not given, is one more than the largest number on any rank. It
        raises ArgumentError, before any communication, where they do not fit; at the first call on
        all ranks, if `x` has not the rows of one kind on all.

    Raises
    ------
    ArgumentError
        If `module` is of another kind.

    Notes
    -----
    Every rank calls it at the same time, in the same mode.

    Communication: in training, each call sums over ranks, by :func:`varcomm.all_reduce`, for C
    channels and G graphs (1 without a batch vector), in the dtype of `x` or fp32:

    ======================= ===========================================
    ``BatchNorm1d``         C sums, then C squares
    ``BatchNorm``           the same
    ``DiffGroupNorm``       the same for each of its groups
    ``HeteroBatchNorm``     C sums and C squares for each type
    ``InstanceNorm``        C sums and C squares for each graph
    ``GraphNorm``           the same
    ``LayerNorm``           a sum and a square for each graph
    ``PairNorm``            C sums for each graph; unless
                            ``scale_individually``, a square for each
    ``MeanSubtractionNorm`` C sums for each graph
    ``GraphSizeNorm``       nothing
    ======================= ===========================================

    With a batch vector, or types, 8 bytes for each graph or type to count rows; and 8 bytes a
    rank, where their number is not given. With running statistics in evaluation, nothing is sent.

    At the first call for a graph, ranks also tell each other which rows fit. A module serves one
    kind of rows, of nodes or of edges, and of one type.

    Running statistics are equal on all ranks, bit for bit.

    In one process: `module` itself.

    Examples
    --------
    >>> import torch, varcomm
    >>> from torch_geometric.data import Data
    >>> def fn(rank):
    ...     data = Data(x=torch.tensor([[1.0], [2.0], [6.0]]), edge_index=torch.tensor([[0], [1]]))
    ...     graph = varcomm.graph.partition(data, method="block")
    ...     norm = torch.nn.BatchNorm1d(1, momentum=1.0)
    ...     norm.forward = varcomm.graph.global_norm(norm, graph)
    ...     return norm(graph.x).shape, norm.running_mean.item(), norm.running_var.item()
    >>> varcomm.launch(fn, 2)
    [(torch.Size([2, 1]), 3.0, 7.0), (torch.Size([1, 1]), 3.0, 7.0)]
    """
    if not is_global_norm(module):
        known = ", ".join(kind.__name__ for kind in GLOBAL_NORMS)
        raise ArgumentError(
            f"{type(module).__name__} is not known to be exact over all nodes. Known are {known}; "
            'LayerNorm with mode="graph".'
        )
    return _GlobalNorm(module, graph)


def is_global_norm(module: torch.nn.Module) -> bool:
    """Return whether :func:`global_norm` takes a module."""
    kind = _kind(module)
    if kind is norm.LayerNorm:
        return bool(module.mode == "graph")
    inner = {norm.BatchNorm: "module", norm.DiffGroupNorm: "norm"}
    if kind in inner:  # of which SyncBatchNorm may have taken the place
        return _kind(module.get_submodule(inner[kind])) is torch.nn.BatchNorm1d
    return kind is not None


@dataclass(eq=False)
class _GlobalNorm:
    """Stands for a module's ``forward``; copied with the module, as its methods are.

    Ranks ask each other once which rows it runs over; calls are checked against that from then on.
    """

    module: torch.nn.Module
    graph: Where
    rows: Rows | None = None

    @kept_from_compilation
    def __call__(self, *args: object, **kwargs: object) -> torch.Tensor:
        kind = _kind(self.module)
        assert kind is not None
        if self.rows is None:
            x: Any = args[0] if args else kwargs.get("x", kwargs.get("input"))
            self.rows = rows_of_any_kind(type(self.module).__name__, x, self.graph)
        return _FORWARDS[kind](self.module, self.rows, *args, **kwargs)


def _kind(module: torch.nn.Module) -> type[torch.nn.Module] | None:
    """Return the class that a module is of, with its ``forward``, if it is among those known."""
    of = type(module)
    return next((k for k in _FORWARDS if issubclass(of, k) and of.forward is k.forward), None)


def _graph_norm(
    module: norm.GraphNorm,
    rows: Rows,
    x: torch.Tensor,
    batch: torch.Tensor | None = None,
    batch_size: int | None = None,
) -> torch.Tensor:
    """Cai et al., "GraphNorm: A Principled Approach to Accelerating GNN Training", 2021.

    The mean is subtracted as far as ``mean_scale`` says; the variance is around what is left.
    """
    graphs = _graphs(module, rows, x, batch, batch_size)
    mean = graphs.mean(x)
    out: torch.Tensor = x.to(mean.dtype) - graphs.at_nodes(mean * module.mean_scale)
    deviation = (graphs.mean(out.square()) + module.eps).sqrt()
    out = out / graphs.at_nodes(deviation) * module.weight + module.bias
    return out.to(result_dtype(x, module.mean_scale, module.weight, module.bias))


def _layer_norm(
    module: norm.LayerNorm,
    rows: Rows,
    x: torch.Tensor,
    batch: torch.Tensor | None = None,
    batch_size: int | None = None,
) -> torch.Tensor:
    """Ba, Kiros and Hinton, "Layer Normalization", 2016; over nodes and channels of a graph.

    As in PyG, ``eps`` is added to the variance with a batch vector, and to its root without one.
    """
    graphs = _graphs(module, rows, x, batch, batch_size, dims=(2,))

    def mean_of(values: torch.Tensor) -> torch.Tensor:
        sums = values.sum(1, keepdim=True, dtype=accumulated(values.dtype))
        return graphs.mean(sums) / values.shape[1]

    mean = mean_of(x)
    out = x.to(mean.dtype) - graphs.at_nodes(mean)
    var = mean_of(out.square())
    if batch is None:
        # the root has no derivative at 0, and torch takes 0 for that of std
        constant = var == 0
        deviation = var.masked_fill(constant, 1).sqrt().masked_fill(constant, 0) + module.eps
    else:
        deviation = (var + module.eps).sqrt()
    out = out / graphs.at_nodes(deviation)
    if module.weight is not None and module.bias is not None:
        out = out * module.weight + module.bias
    return out.to(result_dtype(x, module.weight, module.bias))


def _pair_norm(
    module: norm.PairNorm,
    rows: Rows,
    x: torch.Tensor,
    batch: torch.Tensor | None = None,
    batch_size: int | None = None,
) -> torch.Tensor:
    """Zhao and Akoglu, "PairNorm: Tackling Oversmoothing in GNNs", 2020."""
    graphs = _graphs(module, rows, x, batch, batch_size, dims=(2,))
    mean = graphs.mean(x)
    out: torch.Tensor = x.to(mean.dtype) - graphs.at_nodes(mean)
    if module.scale_individually:
        length = module.eps + out.norm(2, -1, keepdim=True)
    else:
        squares = graphs.mean(out.square().sum(-1, keepdim=True))
        length = graphs.at_nodes((module.eps + squares).sqrt())
    out = out / length * module.scale
    return out.to(x.dtype)


def _mean_subtraction_norm(
    module: norm.MeanSubtractionNorm,
    rows: Rows,
    x: torch.Tensor,
    batch: torch.Tensor | None = None,
    dim_size: int | None = None,
) -> torch.Tensor:
    """Yang et al., "Revisiting Over-smoothing in Deep GCNs", 2020."""
    graphs = _graphs(module, rows, x, batch, dim_size)
    mean = graphs.mean(x)
    return (x.to(mean.dtype) - graphs.at_nodes(mean)).to(x.dtype)


def _graph_size_norm(
    module: norm.GraphSizeNorm,
    rows: Rows,
    x: torch.Tensor,
    batch: torch.Tensor | None = None,
    batch_size: int | None = None,
) -> torch.Tensor:
    """Dwivedi et al., "Benchmarking Graph Neural Networks", 2020."""
    graphs = _graphs(module, rows, x, batch, batch_size, dims=(2,))
    scale = graphs.counts.to(accumulated(x.dtype)).rsqrt()
    return (x * graphs.at_nodes(scale.view(-1, 1))).to(x.dtype)


def _graphs(
    module: torch.nn.Module,
    rows: Rows,
    x: torch.Tensor,
    batch: torch.Tensor | None,
    size: int | None,
    dims: tuple[int, ...] = (),
) -> Batch:
    """Check what a norm is given, and return the graphs that it is over."""
    name = type(module).__name__
    with checking(name, rows.group) as where:
        check_floats(x, dims, where)
    return batch_of(name, rows, x, batch, size)


_FORWARDS: dict[type[torch.nn.Module], Callable[..., torch.Tensor]] = {
    torch.nn.BatchNorm1d: batch_norm,
    torch.nn.LazyBatchNorm1d: batch_norm,
    norm.BatchNorm: pyg_batch_norm,
    norm.HeteroBatchNorm: hetero_batch_norm,
    norm.DiffGroupNorm: diff_group_norm,
    norm.InstanceNorm: instance_norm,
    norm.GraphNorm: _graph_norm,
    norm.LayerNorm: _layer_norm,
    norm.PairNorm: _pair_norm,
    norm.MeanSubtractionNorm: _mean_subtraction_norm,
    norm.GraphSizeNorm: _graph_size_norm,
}

GLOBAL_NORMS = tuple(_FORWARDS)
