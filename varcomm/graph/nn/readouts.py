"""Aggregations of PyG over all nodes of each graph; graphs may span ranks.

Inside of a layer, an aggregation is over the edges into a node, which are local. A model that calls
an aggregation itself, on nodes and a batch vector, means the nodes of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch_geometric.nn import aggr

from varcomm.errors import ArgumentError
from varcomm.graph.nn.batches import Batch, accumulated, check_floats, check_ids, largest
from varcomm.graph.nn.extremes import extreme, product
from varcomm.graph.nn.pooling import softmax_over
from varcomm.graph.nn.rows import Where, check_rows, node_rows
from varcomm.ops.compilation import kept_from_compilation
from varcomm.ops.operator import checking

__all__ = ["GLOBAL_READOUTS", "global_readout", "is_global_readout"]


def global_readout(module: aggr.Aggregation, graph: Where) -> Callable[..., torch.Tensor]:
    """Return a ``forward`` of an aggregation over all nodes.

    Parameters
    ----------
    module : torch_geometric.nn.aggr.Aggregation
        Of :data:`GLOBAL_READOUTS`, or derived without a ``forward`` or ``reduce`` of its own.
    graph : PartitionedGraph, NodeShard or EdgeShard
        The graph of the nodes, as in :func:`~varcomm.graph.global_add_pool`.

    Returns
    -------
    callable
        Takes the arguments of ``module.forward`` for this rank: rows of owned nodes along `dim`, or
        of these and the halo, and `index` or `ptr` of as many. Returns the rows of all graphs on
        every rank. An exact operator, as :func:`~varcomm.graph.global_add_pool`.

    Raises
    ------
    ArgumentError
        If `module` is of another kind.

    Notes
    -----
    Communication: 8 bytes per rank for the number of graphs; then, for each graph, the sums of the
    aggregation, or extremes as :func:`~varcomm.graph.global_max_pool`.

    In one process: `module` itself.

    Examples
    --------
    >>> import torch, varcomm
    >>> from torch_geometric.data import Data
    >>> from torch_geometric.nn.aggr import MultiAggregation
    >>> def fn(rank):
    ...     x, edge = torch.tensor([[1.0], [2.0], [6.0]]), torch.tensor([[0], [1]])
    ...     graph = varcomm.graph.partition(Data(x=x, edge_index=edge), method="block")
    ...     read = MultiAggregation(["mean", "max", "mul"])
    ...     read.forward = varcomm.graph.global_readout(read, graph)
    ...     return read(graph.x).tolist()
    >>> varcomm.launch(fn, 2)
    [[[3.0, 6.0, 12.0]], [[3.0, 6.0, 12.0]]]
    """
    if not is_global_readout(module):
        known = ", ".join(kind.__name__ for kind in GLOBAL_READOUTS)
        raise ArgumentError(
            f"{type(module).__name__} is not known to be exact over all nodes. Known are {known}; "
            "MultiAggregation of these, and without dropout."
        )
    return _GlobalReadout(module, graph)


def is_global_readout(module: torch.nn.Module) -> bool:
    """Return whether :func:`global_readout` accepts a module."""
    kind = _kind(module)
    if kind is aggr.MultiAggregation:
        # ranks would drop different values of one result
        drops = any(
            isinstance(part, torch.nn.MultiheadAttention) and part.dropout > 0
            for part in module.children()
        )
        return not drops and all(map(is_global_readout, module.get_submodule("aggrs").children()))
    return kind is not None


@dataclass(frozen=True, eq=False)
class _GlobalReadout:
    """A ``forward`` that is copied with its module, as methods are."""

    module: aggr.Aggregation
    graph: Where

    @kept_from_compilation
    def __call__(
        self,
        x: torch.Tensor,
        index: torch.Tensor | None = None,
        ptr: torch.Tensor | None = None,
        dim_size: int | None = None,
        dim: int = -2,
    ) -> torch.Tensor:
        name, x = type(self.module).__name__, x.movedim(dim, 0)
        if index is None:
            index = torch.zeros(len(x), dtype=torch.int64, device=x.device)
            if ptr is not None:
                index = torch.arange(len(ptr) - 1, device=x.device).repeat_interleave(ptr.diff())
        rows = node_rows(name, x, self.graph)
        with checking(name, rows.group) as where:
            check_rows(x, rows, where)
            check_floats(x, (), where)
            # PyG's Aggregation fills in a dim_size of this rank
            end = max(check_ids(index, dim_size, x, where, "index"), dim_size or 0)
        size = largest(end, rows, x.device)
        graphs = Batch(rows, index, size).owned()
        return _read(self.module, x[: rows.num_owned], graphs).movedim(0, dim)


def _kind(module: torch.nn.Module) -> type[aggr.Aggregation] | None:
    """Return the known class whose ``forward`` a module has, or None."""
    of = type(module)
    if getattr(of, "reduce", None) is not aggr.Aggregation.reduce:
        return None
    return next((k for k in _READOUTS if issubclass(of, k) and of.forward is k.forward), None)


def _read(module: aggr.Aggregation, x: torch.Tensor, graphs: Batch) -> torch.Tensor:
    kind = _kind(module)
    assert kind is not None
    return _READOUTS[kind](module, x, graphs)


def _var(module: aggr.VarAggregation, x: torch.Tensor, graphs: Batch) -> torch.Tensor:
    """Return the mean of squares minus the square of the mean, as PyG does."""
    wide = x.to(accumulated(x.dtype))
    squares = wide.detach().square() if module.semi_grad else wide.square()
    mean, of_squares = graphs.mean(torch.stack([wide, squares], dim=1)).unbind(1)
    return (of_squares - mean * mean).to(x.dtype)


def _std(module: aggr.StdAggregation, x: torch.Tensor, graphs: Batch) -> torch.Tensor:
    """Return the root of the variance; 0, and without gradient, below 1e-5, as PyG does."""
    out = _var(module.var_aggr, x, graphs).clamp(min=1e-5).sqrt()
    return out.masked_fill(out <= math.sqrt(1e-5), 0.0)


def _softmax(module: aggr.SoftmaxAggregation, x: torch.Tensor, graphs: Batch) -> torch.Tensor:
    t = module.t.view(-1, module.channels) if module.channels != 1 else module.t
    with torch.set_grad_enabled(torch.is_grad_enabled() and (module.learn or not module.semi_grad)):
        alpha = softmax_over(x * t, graphs)
    return graphs.sum(x * alpha).to(x.dtype)


def _power_mean(module: aggr.PowerMeanAggregation, x: torch.Tensor, graphs: Batch) -> torch.Tensor:
    low, high, p = module.min_value, module.max_value, module.p
    if isinstance(p, int | float) and p == 1:
        return graphs.mean(x).to(x.dtype)
    p = p.view(-1, module.channels) if module.channels != 1 else p
    mean = graphs.mean(x.clamp(low, high).pow(p)).to(x.dtype)
    return mean.clamp(low, high).pow(1.0 / p)


def _variance_preserving(
    module: aggr.VariancePreservingAggregation, x: torch.Tensor, graphs: Batch
) -> torch.Tensor:
    total = graphs.sum(x)
    count = graphs.counts.to(total.dtype).sqrt().clamp(min=1.0)
    return (total / count.view(-1, *[1] * (total.dim() - 1))).to(x.dtype)


def _attentional(
    module: aggr.AttentionalAggregation, x: torch.Tensor, graphs: Batch
) -> torch.Tensor:
    def applied(mlp: torch.nn.Module | None, other: torch.nn.Module | None) -> torch.Tensor:
        if mlp is not None:
            return mlp(x, batch=graphs.index, batch_size=graphs.size)  # type: ignore[no-any-return]
        return x if other is None else other(x)

    gate = softmax_over(applied(module.gate_mlp, module.gate_nn), graphs)
    values = gate * applied(module.mlp, module.nn)
    return graphs.sum(values).to(values.dtype)


def _multi(module: aggr.MultiAggregation, x: torch.Tensor, graphs: Batch) -> torch.Tensor:
    out: torch.Tensor = module.combine([_read(part, x, graphs) for part in module.aggrs])
    return out


_READOUTS: dict[type[aggr.Aggregation], Callable[..., torch.Tensor]] = {
    aggr.SumAggregation: lambda _, x, graphs: graphs.sum(x).to(x.dtype),
    aggr.MeanAggregation: lambda _, x, graphs: graphs.mean(x).to(x.dtype),
    aggr.MaxAggregation: lambda _, x, graphs: extreme("amax", x, graphs),
    aggr.MinAggregation: lambda _, x, graphs: extreme("amin", x, graphs),
    aggr.MulAggregation: lambda _, x, graphs: product(x, graphs).to(x.dtype),
    aggr.VarAggregation: _var,
    aggr.StdAggregation: _std,
    aggr.SoftmaxAggregation: _softmax,
    aggr.PowerMeanAggregation: _power_mean,
    aggr.VariancePreservingAggregation: _variance_preserving,
    aggr.AttentionalAggregation: _attentional,
    aggr.MultiAggregation: _multi,
}

GLOBAL_READOUTS = tuple(_READOUTS)
