"""Normalisation over the nodes or edges of all ranks, by the modules of PyTorch and PyG.

Statistics are of owned rows; rows of the halo are normalised as their originals are. A variance is
the mean of squared distances from the mean: two rounds of messages, but no digits are lost if means
are large [1]_. Floats narrower than 4 bytes are normalised in fp32 and rounded once.

.. [1] Chan, Golub and LeVeque, "Algorithms for Computing the Sample Variance: Analysis and
   Recommendations", 1983.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import Any

import torch
from torch.nn.functional import batch_norm
from torch_geometric.nn import norm

from varcomm.errors import ArgumentError
from varcomm.graph.nn.graphs import Batch, accumulated
from varcomm.graph.nn.rows import (
    Rows,
    Where,
    batch_of,
    check_floats,
    check_ids,
    check_rows,
    rows_of_any_kind,
)
from varcomm.ops.compilation import kept_from_compilation
from varcomm.ops.operator import checking

__all__ = ["GLOBAL_NORMS", "global_norm", "is_global_norm"]


def global_norm(module: torch.nn.Module, graph: Where) -> Callable[..., torch.Tensor]:
    """Return a ``forward`` of a normalisation whose rows are sharded.

    Parameters
    ----------
    module : torch.nn.Module
        Of :data:`GLOBAL_NORMS`, or derived without a ``forward`` of its own. Its state dict does
        not change.
    graph : PartitionedGraph, NodeShard or EdgeShard
        The rows. Of a graph: the nodes, or else the edges, of the type with as many rows as `x` on
        all ranks at the first call.

    Returns
    -------
    callable
        Takes the arguments of ``module.forward`` for this rank: owned rows, or these and the halo,
        and a batch vector of as many rows, int64. It raises ArgumentError before any communication
        if they do not fit; at the first call on all ranks.

    Raises
    ------
    ArgumentError
        If `module` is of another kind.

    Notes
    -----
    A module serves one kind of rows. Running statistics have the same bits on all ranks.

    Communication: in training, :func:`varcomm.all_reduce` of C sums and then C squares, for C
    channels, in the dtype of `x` or fp32: once for ``BatchNorm1d`` and ``BatchNorm``, per soft
    group for ``DiffGroupNorm``, per type for ``HeteroBatchNorm``, per graph for ``InstanceNorm``
    and ``GraphNorm``. Per graph, ``LayerNorm`` sends a sum and a square; ``PairNorm`` C sums and,
    unless ``scale_individually``, a square; ``MeanSubtractionNorm`` C sums; ``GraphSizeNorm``
    nothing. Without a batch vector, all rows are one graph. With a batch vector or types, rows are
    counted with 8 bytes per graph or type; 8 bytes per rank if their number is not given. In
    evaluation with running statistics, nothing is sent. At the first call ranks agree on the rows.

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
    """Return whether :func:`global_norm` accepts a module."""
    kind = _kind(module)
    if kind is norm.LayerNorm:
        return bool(module.mode == "graph")
    inner = {norm.BatchNorm: "module", norm.DiffGroupNorm: "norm"}
    if kind in inner:  # which SyncBatchNorm may have replaced
        return _kind(module.get_submodule(inner[kind])) is torch.nn.BatchNorm1d
    return kind is not None


@dataclass(eq=False)
class _GlobalNorm:
    """A ``forward`` that is copied with its module; at its first call, ranks agree on the rows."""

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
    """Return the known class whose ``forward`` a module has, or None."""
    of = type(module)
    return next((k for k in _FORWARDS if issubclass(of, k) and of.forward is k.forward), None)


def _batch_norm(module: torch.nn.BatchNorm1d, rows: Rows, input: torch.Tensor) -> torch.Tensor:
    """Normalise each channel of (rows, C) or (rows, C, L): Ioffe and Szegedy, 2015."""
    kept = not module.training and module.running_mean is not None
    with checking(type(module).__name__, rows.group) as where:
        check_rows(input, rows, where)
        _check_channels(module, input, (2, 3), where)
        count = rows.total * prod(input.shape[2:])
        if not kept:
            _check_count(count, rows, where)
    if kept:
        return _evaluated(module, input)
    tracked = module.training and module.track_running_stats
    factor = _factor(module) if tracked else 0.0
    nodes = Batch(rows, None, 1)

    def mean_of(values: torch.Tensor) -> torch.Tensor:
        if values.dim() == 3:
            values = values.sum(2, dtype=accumulated(values.dtype))
        return nodes.sum(values) / count

    def at_rows(values: torch.Tensor) -> torch.Tensor:
        return values if input.dim() == 2 else values.unsqueeze(-1)

    mean = mean_of(input)
    centred = input.to(mean.dtype) - at_rows(mean)
    var = mean_of(centred.square())
    if tracked and count:
        _move(module.running_mean, mean[0], factor)
        _move(module.running_var, var[0] * (count / (count - 1)), factor)
    scale = (var + module.eps).rsqrt()
    scale = scale if module.weight is None else scale * module.weight
    out = centred * at_rows(scale)
    out = out if module.bias is None else out + at_rows(module.bias.view(1, -1))
    return out.to(input.dtype)


def _pyg_batch_norm(module: norm.BatchNorm, rows: Rows, x: torch.Tensor) -> torch.Tensor:
    """Normalise as :func:`_batch_norm`; a single row, if allowed, as in evaluation."""
    if module.allow_single_element and rows.total <= 1:
        return _evaluated(module.module, x)
    return _batch_norm(module.module, rows, x)


def _diff_group_norm(module: norm.DiffGroupNorm, rows: Rows, x: torch.Tensor) -> torch.Tensor:
    """Add the normalised values of soft groups of nodes: Zhou et al., 2020."""
    channels, groups = module.in_channels, module.groups
    grouped = module.lin(x).softmax(dim=-1).unsqueeze(-1) * x.unsqueeze(-2)
    out = _batch_norm(module.norm, rows, grouped.view(-1, groups * channels))
    scale: float = module.lamda
    return x + scale * out.view(-1, groups, channels).sum(-2)


def _hetero_batch_norm(
    module: norm.HeteroBatchNorm, rows: Rows, x: torch.Tensor, type_vec: torch.Tensor
) -> torch.Tensor:
    """Normalise each channel of (rows, C) over the nodes of each type.

    As in PyG, statistics are constants without a gradient.
    """
    with checking(type(module).__name__, rows.group) as where:
        check_rows(x, rows, where)
        _check_channels(module, x, (2,), where)
        check_ids(type_vec, module.num_types, x, where, "type_vec")
    types = Batch(rows, type_vec, module.num_types)
    if not module.training and module.track_running_stats:
        mean, var = module.running_mean, module.running_var
        dtype = _dtype_with(x, mean, module.weight)
        x = x.to(accumulated(x.dtype))
    else:
        dtype = _dtype_with(x, module.weight)
        with torch.no_grad():
            mean = types.mean(x)
            x = x.to(mean.dtype)
            var = types.mean((x - types.at_nodes(mean)).square())
    if module.training and module.track_running_stats:
        factor = _factor(module)
        seen = (types.counts > 0).view(-1, 1)
        _move(module.running_mean, mean, factor, seen)
        _move(module.running_var, var, factor, seen)
    out = (x - types.at_nodes(mean)) / types.at_nodes(var.clamp(module.eps).sqrt())
    if module.affine:
        out = out * types.at_nodes(module.weight) + types.at_nodes(module.bias)
    return out.to(dtype)


def _instance_norm(
    module: norm.InstanceNorm,
    rows: Rows,
    x: torch.Tensor,
    batch: torch.Tensor | None = None,
    batch_size: int | None = None,
) -> torch.Tensor:
    """Normalise each channel of (rows, C) over each graph: Ulyanov et al., 2017."""
    kept = not module.training and module.track_running_stats
    with checking(type(module).__name__, rows.group) as where:
        check_rows(x, rows, where)
        _check_channels(module, x, (2,), where)
        if not kept and batch is None:
            _check_count(rows.total, rows, where)
    dtype = x.dtype if batch is None else _dtype_with(x, module.weight)
    if kept:
        centred = x.to(accumulated(x.dtype)) - module.running_mean
        deviation = (module.running_var + module.eps).sqrt()
    else:
        graphs = batch_of(type(module).__name__, rows, x, batch, batch_size, dims=())
        mean, centred = _centred(x, graphs)
        squares = graphs.sum(centred.square())
        counts = graphs.counts.view(-1, 1)
        if rows.total:
            unbiased = squares / (counts - 1).clamp(min=1)
            _move(module.running_mean, mean.mean(0), module.momentum)
            _move(module.running_var, unbiased.mean(0), module.momentum)
        deviation = graphs.at_nodes((squares / counts.clamp(min=1) + module.eps).sqrt())
    out: torch.Tensor = centred / deviation
    out = out if module.weight is None else out * module.weight
    out = out if module.bias is None else out + module.bias
    return out.to(dtype)


def _graph_norm(module: norm.GraphNorm, x: torch.Tensor, graphs: Batch) -> torch.Tensor:
    """Normalise after a learned part of the mean is subtracted: Cai et al., 2021."""
    mean = graphs.mean(x)
    out: torch.Tensor = x.to(mean.dtype) - graphs.at_nodes(mean * module.mean_scale)
    deviation = (graphs.mean(out.square()) + module.eps).sqrt()
    out = out / graphs.at_nodes(deviation) * module.weight + module.bias
    return out.to(_dtype_with(x, module.mean_scale, module.weight, module.bias))


def _layer_norm(module: norm.LayerNorm, x: torch.Tensor, graphs: Batch) -> torch.Tensor:
    """Normalise over nodes and channels of each graph: Ba, Kiros and Hinton, 2016.

    As in PyG, ``eps`` is added to the variance with a batch vector, and to its root without one.
    """

    def mean_of(values: torch.Tensor) -> torch.Tensor:
        sums = values.sum(1, keepdim=True, dtype=accumulated(values.dtype))
        return graphs.mean(sums) / values.shape[1]

    mean = mean_of(x)
    out = x.to(mean.dtype) - graphs.at_nodes(mean)
    var = mean_of(out.square())
    if graphs.index is None:
        # the root has no derivative at 0; torch takes 0 as that of std
        constant = var == 0
        deviation = var.masked_fill(constant, 1).sqrt().masked_fill(constant, 0) + module.eps
    else:
        deviation = (var + module.eps).sqrt()
    out = out / graphs.at_nodes(deviation)
    if module.weight is not None and module.bias is not None:
        out = out * module.weight + module.bias
    return out.to(_dtype_with(x, module.weight, module.bias))


def _pair_norm(module: norm.PairNorm, x: torch.Tensor, graphs: Batch) -> torch.Tensor:
    """Keep the total distance between nodes of each graph: Zhao and Akoglu, 2020."""
    _, out = _centred(x, graphs)
    if module.scale_individually:
        length = module.eps + out.norm(2, -1, keepdim=True)
    else:
        squares = graphs.mean(out.square().sum(-1, keepdim=True))
        length = graphs.at_nodes((module.eps + squares).sqrt())
    scaled: torch.Tensor = out / length * module.scale
    return scaled.to(x.dtype)


def _mean_subtraction_norm(
    module: norm.MeanSubtractionNorm,
    rows: Rows,
    x: torch.Tensor,
    batch: torch.Tensor | None = None,
    dim_size: int | None = None,
) -> torch.Tensor:
    """Subtract the mean of each graph: Yang et al., 2020."""
    graphs = batch_of(type(module).__name__, rows, x, batch, dim_size, dims=())
    return _centred(x, graphs)[1].to(x.dtype)


def _graph_size_norm(module: norm.GraphSizeNorm, x: torch.Tensor, graphs: Batch) -> torch.Tensor:
    """Divide by the root of each graph's number of nodes: Dwivedi et al., 2020."""
    scale = graphs.counts.to(accumulated(x.dtype)).rsqrt()
    return (x * graphs.at_nodes(scale.view(-1, 1))).to(x.dtype)


def _over_graphs(
    normalise: Callable[..., torch.Tensor], dims: tuple[int, ...] = ()
) -> Callable[..., torch.Tensor]:
    def forward(
        module: torch.nn.Module,
        rows: Rows,
        x: torch.Tensor,
        batch: torch.Tensor | None = None,
        batch_size: int | None = None,
    ) -> torch.Tensor:
        graphs = batch_of(type(module).__name__, rows, x, batch, batch_size, dims)
        return normalise(module, x, graphs)

    return forward


def _centred(x: torch.Tensor, graphs: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    mean = graphs.mean(x)
    return mean, x.to(mean.dtype) - graphs.at_nodes(mean)


def _dtype_with(*values: torch.Tensor | None) -> torch.dtype:
    return reduce(torch.promote_types, [value.dtype for value in values if value is not None])


def _evaluated(module: torch.nn.BatchNorm1d, x: torch.Tensor) -> torch.Tensor:
    mean, var = module.running_mean, module.running_var
    return batch_norm(x, mean, var, module.weight, module.bias, eps=module.eps)


def _factor(module: Any) -> float:
    """Count a call, and return the part that its statistics have in the running ones."""
    count = module.num_batches_tracked
    if count is not None and (module.momentum is None or isinstance(module, torch.nn.BatchNorm1d)):
        count.add_(1)
    return 1.0 / float(count) if module.momentum is None else module.momentum


def _move(
    running: torch.Tensor | None,
    new: torch.Tensor,
    factor: float,
    where: torch.Tensor | None = None,
) -> None:
    if running is not None:
        with torch.no_grad():
            moved = ((1 - factor) * running.to(new.dtype) + factor * new).to(running.dtype)
            running.copy_(moved if where is None else torch.where(where, moved, running))


def _check_count(count: int, rows: Rows, where: str) -> None:
    if count == 1:
        raise ArgumentError(
            f"{where}expected more than 1 value per channel when training; the {rows.name} of all "
            "ranks together have 1."
        )


def _check_channels(
    module: torch.nn.Module, x: torch.Tensor, dims: tuple[int, ...], where: str
) -> None:
    """Raise ArgumentError unless `x` fits parameters and buffers, which would be broadcast."""
    check_floats(x, dims, where)
    for name in ("weight", "bias", "running_mean", "running_var"):
        value = getattr(module, name)
        if value is not None and value.shape[-1] != x.shape[1]:
            raise ArgumentError(
                f"{where}x has {x.shape[1]} channels, but {name} has {value.shape[-1]}."
            )
        if value is not None and value.dtype not in (x.dtype, accumulated(x.dtype)):
            raise ArgumentError(
                f"{where}x is of {x.dtype}, but {name} of {value.dtype}. Convert the module or x."
            )


_FORWARDS: dict[type[torch.nn.Module], Callable[..., torch.Tensor]] = {
    torch.nn.BatchNorm1d: _batch_norm,
    torch.nn.LazyBatchNorm1d: _batch_norm,
    norm.BatchNorm: _pyg_batch_norm,
    norm.HeteroBatchNorm: _hetero_batch_norm,
    norm.DiffGroupNorm: _diff_group_norm,
    norm.InstanceNorm: _instance_norm,
    norm.GraphNorm: _over_graphs(_graph_norm),
    norm.LayerNorm: _over_graphs(_layer_norm, dims=(2,)),
    norm.PairNorm: _over_graphs(_pair_norm, dims=(2,)),
    norm.MeanSubtractionNorm: _mean_subtraction_norm,
    norm.GraphSizeNorm: _over_graphs(_graph_size_norm, dims=(2,)),
}

GLOBAL_NORMS = tuple(_FORWARDS)
