"""Normalisation over the nodes or edges of all ranks, by the modules of PyTorch and PyG.

Statistics use owned rows; halo rows are normalised like their originals. A variance is the mean of
squared distances from the mean, which keeps its digits if means are large. Floats narrower than 4
bytes are normalised in fp32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch_geometric.nn import norm
from torch_geometric.utils import scatter

from varcomm.errors import ArgumentError
from varcomm.graph.index.node_groups import accumulated
from varcomm.graph.layers.norm_rows import Rows, Where, rows_of_any_kind
from varcomm.graph.on_device import require
from varcomm.ops.checks import checking
from varcomm.ops.compilation import kept_from_compilation


def global_norm(
    module: torch.nn.Module, graph: Where, in_layer: bool = False
) -> Callable[..., torch.Tensor]:
    """Return a ``forward`` for a normalisation module whose rows are sharded.

    Parameters
    ----------
    module : torch.nn.Module
        Instance of a class in :data:`GLOBAL_NORMS`, or of a subclass without a ``forward`` of its
        own. The state dict of the module does not change.
    graph : PartitionedGraph, NodeShard, EdgeShard, sequence of int, or None
        The rows. For a graph, the first call selects the type of nodes or edges whose number of
        rows matches `x` on all ranks. Nodes have precedence. Rows that are equal on all ranks,
        such as pooled rows, are normalised as in one process. Other rows are some nodes or edges,
        such as those of a mask, without the halo. A sequence of int is the rows per rank of the
        world. None means any number of rows per rank, which may differ between calls, such as a
        last batch.
    in_layer : bool
        Whether `x` has a row for each edge that a layer computes with, in any number.

    Returns
    -------
    callable
        A function with the arguments of ``module.forward``: the owned rows of this rank, with or
        without the halo, and an int64 batch vector of equal length. The function raises
        ArgumentError before any communication if the arguments do not match. At the first call, all
        ranks raise.

    Raises
    ------
    ArgumentError
        If `module` is of another class.

    See Also
    --------
    distribute, PartitionedGraph.mean

    Notes
    -----
    Use a module for one kind of rows only. Running statistics have the same bits on all ranks.

    Communication: in training, :func:`varcomm.all_reduce` of C sums and then of C squares, for C
    channels, in the dtype of `x` or fp32. Other norms send these sums per type or graph, each with
    a count of 8 bytes. Without a graph or sizes, and for sequences or images, a count of 8 bytes is
    sent first. In evaluation with running statistics, nothing is sent.

    In one process: ``module.forward``.

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
    return _GlobalNorm(module, graph, in_layer)


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
    in_layer: bool
    rows: Rows | None = None

    @kept_from_compilation
    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        module, name = self.module, type(self.module).__name__
        kind = _kind(module)
        assert kind is not None
        own: Callable[..., torch.Tensor] = type(module).forward
        inner: Any = getattr(module, "module", module)
        x: Any = args[0] if args else kwargs.get("x", kwargs.get("input"))
        if isinstance(inner, (*_BATCH_NORMS, norm.InstanceNorm)) and _is_kept(inner):
            return own(module, x)
        if self.rows is None:
            self.rows = rows_of_any_kind(name, x, self.graph, self.in_layer)
        if self.rows.replicated:
            return own(module, *args, **kwargs)
        with checking(name, self.rows.group) as where:
            self.rows.check(x, where)
        return _FORWARDS[kind](module, self.rows, *args, **kwargs)


def _kind(module: torch.nn.Module) -> type[torch.nn.Module] | None:
    """Return the known class whose ``forward`` a module has, or None."""
    of = type(module)
    return next((k for k in _FORWARDS if issubclass(of, k) and of.forward is k.forward), None)


def _is_kept(module: Any) -> bool:
    """Return whether a module normalises by its running statistics, row by row."""
    return not module.training and module.running_mean is not None


def _batch_norm(module: _BatchNorm, rows: Rows, input: torch.Tensor) -> torch.Tensor:
    """Normalise each channel of (rows, C, *L): Ioffe and Szegedy, 2015."""
    name, x, channels = type(module).__name__, input, module.num_features
    shapes = next(shapes for kind, shapes in _BATCH_NORMS.items() if isinstance(module, kind))
    with checking(name, rows.group) as where:
        if x.dim() not in (len(s.split(",")) for s in shapes) or x.shape[1] != channels:
            wanted = " or ".join(f"({shape})" for shape in shapes).replace("C", str(channels))
            raise ArgumentError(f"{where}x must be of shape {wanted}; got {tuple(x.shape)}.")
    if _is_kept(module):
        return type(module).forward(module, x)
    count = rows.total(x)
    _check_count(count, name, rows)

    def mean_of(values: torch.Tensor) -> torch.Tensor:
        if values.dim() > 2:
            values = values.flatten(2).sum(2, dtype=accumulated(values.dtype))
        return rows.sum(values) / count

    def at_rows(values: torch.Tensor) -> torch.Tensor:
        return values.view(1, channels, *[1] * (x.dim() - 2))

    mean = mean_of(x)
    centred = x.to(mean.dtype) - at_rows(mean)
    var = mean_of(centred.square())
    if module.training and module.running_mean is not None:
        _track(module, mean[0], var[0], count)
    scale = (var + module.eps).rsqrt()
    scale = scale if module.weight is None else scale * module.weight
    out = centred * at_rows(scale)
    out = out if module.bias is None else out + at_rows(module.bias.view(1, -1))
    return out.to(x.dtype)


def _pyg_batch_norm(module: norm.BatchNorm, rows: Rows, x: torch.Tensor) -> torch.Tensor:
    """Normalise as :func:`_batch_norm`; a single row, if allowed, as in evaluation."""
    if module.allow_single_element and int(rows.total(x)) <= 1:
        return type(module).forward(module, x)  # type: ignore[no-any-return]
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
    known, _ = rows.index("HeteroBatchNorm", x, type_vec, module.num_types, "type_vec")
    return type(module).forward(module, x, known)  # type: ignore[no-any-return]


def _over_graphs(
    module: torch.nn.Module,
    rows: Rows,
    x: torch.Tensor,
    batch: torch.Tensor | None = None,
    batch_size: int | None = None,
    dim_size: int | None = None,
) -> torch.Tensor:
    """Normalise by PyG's code, whose scatter is over the nodes of all ranks."""
    size = dim_size if batch_size is None else batch_size
    known, size = rows.index(type(module).__name__, x, batch, size)
    out = type(module).forward(module, x.to(accumulated(x.dtype)), known, size)
    return _rounded(out, x, module)


def _rounded(out: torch.Tensor, x: torch.Tensor, module: torch.nn.Module) -> torch.Tensor:
    """Return a result in the dtype that PyG's has."""
    dtypes = [x.dtype, *(parameter.dtype for parameter in module.parameters())]
    return out.to(reduce(torch.promote_types, dtypes))


def _instance_norm(
    module: norm.InstanceNorm,
    rows: Rows,
    x: torch.Tensor,
    batch: torch.Tensor | None = None,
    batch_size: int | None = None,
) -> torch.Tensor:
    total = int(rows.total(x))
    if total == 0:
        return x.clone()
    if batch is None:
        _check_count(total, "InstanceNorm", rows)
    out = _over_graphs(module, rows, x, batch, batch_size)
    for name in ("running_mean", "running_var"):
        if getattr(module, name) is not None:  # PyG keeps the autograd graph
            setattr(module, name, getattr(module, name).detach())
    return out.to(x.dtype) if batch is None else out


def _layer_norm(
    module: norm.LayerNorm,
    rows: Rows,
    x: torch.Tensor,
    batch: torch.Tensor | None = None,
    batch_size: int | None = None,
) -> torch.Tensor:
    """Normalise over nodes and channels: Ba, Kiros and Hinton, 2016.

    As in PyG, ``eps`` is added to the variance with a batch vector, and to its root without one.
    """
    known, size = rows.index("LayerNorm", x, batch, batch_size)

    def mean_of(values: torch.Tensor) -> torch.Tensor:
        return scatter(values.mean(1, keepdim=True), known, 0, size, "mean")  # type: ignore[no-any-return]

    out = x.to(accumulated(x.dtype))
    out = out - mean_of(out).index_select(0, known)
    var, parameters = mean_of(out.square()), [*module.parameters()]
    if batch is None:
        # the root has no derivative at 0; torch takes 0 as that of std
        constant = var == 0
        deviation = var.masked_fill(constant, 1).sqrt().masked_fill(constant, 0) + module.eps
    else:
        deviation = (var + module.eps).sqrt()
    out = out / deviation.index_select(0, known)
    out = out * module.weight + module.bias if parameters else out
    return _rounded(out, x, module)


@torch.no_grad()
def _track(module: Any, mean: torch.Tensor, var: torch.Tensor, count: int | torch.Tensor) -> None:
    """Move the running statistics by those of a call over `count` values, unless it is 0."""
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
    factor = module.momentum
    factor = 1.0 / module.num_batches_tracked.double() if factor is None else factor
    if isinstance(count, int) and count == 0:
        return
    new = {"running_mean": mean, "running_var": var * (count / (count - 1))}
    for name, value in new.items():
        running = getattr(module, name)
        moved = (1 - factor) * running.to(value.dtype) + factor * value
        running.copy_(moved if isinstance(count, int) else torch.where(count == 0, running, moved))


def _check_count(count: int | torch.Tensor, name: str, rows: Rows) -> None:
    with checking(name, rows.group) as where:

        def error() -> ArgumentError:
            return ArgumentError(
                f"{where}expected more than 1 value per channel when training; the {rows.name} of "
                "all ranks together have 1."
            )

        if isinstance(count, torch.Tensor):
            require(count != 1, error, rows, name)
        elif count == 1:
            raise error()


_BatchNorm = torch.nn.BatchNorm1d | torch.nn.BatchNorm2d | torch.nn.BatchNorm3d
# the shapes that each accepts
_BATCH_NORMS: dict[type[_BatchNorm], tuple[str, ...]] = {
    torch.nn.BatchNorm1d: ("rows, C", "rows, C, length"),
    torch.nn.BatchNorm2d: ("rows, C, height, width",),
    torch.nn.BatchNorm3d: ("rows, C, depth, height, width",),
}

_FORWARDS: dict[type[torch.nn.Module], Callable[..., torch.Tensor]] = {
    torch.nn.BatchNorm1d: _batch_norm,
    torch.nn.LazyBatchNorm1d: _batch_norm,
    torch.nn.BatchNorm2d: _batch_norm,
    torch.nn.BatchNorm3d: _batch_norm,
    norm.BatchNorm: _pyg_batch_norm,
    norm.HeteroBatchNorm: _hetero_batch_norm,
    norm.DiffGroupNorm: _diff_group_norm,
    norm.InstanceNorm: _instance_norm,
    norm.GraphNorm: _over_graphs,
    norm.LayerNorm: _layer_norm,
    norm.PairNorm: _over_graphs,
    norm.MeanSubtractionNorm: _over_graphs,
    norm.GraphSizeNorm: _over_graphs,
}

GLOBAL_NORMS = tuple(_FORWARDS)
