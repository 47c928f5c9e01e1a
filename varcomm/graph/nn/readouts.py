"""Aggregations of PyG over all nodes of each graph; graphs may span ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch_geometric.nn import aggr

from varcomm.errors import ArgumentError
from varcomm.graph.nn.rows import Where, check_floats, node_rows
from varcomm.ops.compilation import kept_from_compilation
from varcomm.ops.operator import checking

__all__ = ["GLOBAL_READOUTS", "global_readout", "is_global_readout"]

# What these compute by PyG's scatter and softmax is over the graphs of a PartitionedIndex.
_KNOWN = """
    Sum Mean Max Min Mul Var Std Softmax PowerMean VariancePreserving Attentional Multi Set2Set
"""
GLOBAL_READOUTS = tuple(
    getattr(aggr, name, None) or getattr(aggr, f"{name}Aggregation") for name in _KNOWN.split()
)


def global_readout(module: aggr.Aggregation, graph: Where) -> Callable[..., torch.Tensor]:
    """Return a ``forward`` of an aggregation over all nodes, an exact operator.

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
        of these and the halo, and `index` or `ptr` of as many. Returns rows of all graphs.

    Raises
    ------
    ArgumentError
        If `module` is of another kind.

    Notes
    -----
    Communication: as of the pools that it is made of, and 8 bytes per rank.

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
        name, rows_first = type(self.module).__name__, x.movedim(dim, 0)
        if index is None and ptr is not None:
            index = torch.arange(len(ptr) - 1, device=x.device).repeat_interleave(ptr.diff())
        rows = node_rows(name, rows_first, self.graph)
        with checking(name, rows.group) as where:
            check_floats(rows_first, (), where)
        # PyG's Aggregation fills in a dim_size of this rank
        known, size = rows.index(name, rows_first, index, dim_size, "index", agreed=False)
        out: torch.Tensor = type(self.module).forward(self.module, x, known, dim_size=size, dim=dim)
        return out


def _kind(module: torch.nn.Module) -> type[aggr.Aggregation] | None:
    """Return the known class whose ``forward`` a module has, or None."""
    of = type(module)
    if getattr(of, "reduce", None) is not aggr.Aggregation.reduce:
        return None
    known = (kind for kind in GLOBAL_READOUTS if issubclass(of, kind))
    return next((kind for kind in known if of.forward is kind.forward), None)
