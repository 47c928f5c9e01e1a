"""Normalisations with running statistics, over the rows of all ranks.

Each function stands for the ``forward`` of a class: it takes the module, the rows it runs over, and
what that ``forward`` takes. :mod:`varcomm.graph.norms` tells what all of them have in common.
"""

from __future__ import annotations

from math import prod

import torch
from torch_geometric.nn import norm

from varcomm.errors import ArgumentError
from varcomm.graph.nn.batches import (
    Batch,
    accumulated,
    batch_of,
    check_floats,
    check_ids,
    result_dtype,
)
from varcomm.graph.nn.rows import Rows, check_rows
from varcomm.ops.operator import checking

__all__ = [
    "batch_norm",
    "diff_group_norm",
    "hetero_batch_norm",
    "instance_norm",
    "pyg_batch_norm",
]


def batch_norm(module: torch.nn.BatchNorm1d, rows: Rows, input: torch.Tensor) -> torch.Tensor:
    """Normalise each channel of (rows, C) or (rows, C, L) over all rows; 2 messages, 2 C values.

    From Ioffe and Szegedy, "Batch Normalization: Accelerating Deep Network Training by Reducing
    Internal Covariate Shift", 2015.
    """
    kept = not module.training and module.running_mean is not None
    with checking(type(module).__name__, rows.group) as where:
        check_rows(input, rows, where)
        _check_channels(module, input, (2, 3), where)
        count = rows.total * prod(input.shape[2:])
        if not kept:
            _check_count(count, rows, where)
    if kept:
        return torch.nn.functional.batch_norm(
            input,
            module.running_mean,
            module.running_var,
            module.weight,
            module.bias,
            eps=module.eps,
        )
    factor = 0.0 if module.momentum is None else module.momentum
    tracked = module.training and module.track_running_stats
    if tracked and module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        if module.momentum is None:
            factor = 1.0 / float(module.num_batches_tracked)

    whole = Batch(rows, None, 1)

    def mean_of(values: torch.Tensor) -> torch.Tensor:
        part = whole.local_sum(values)
        return whole.all_reduce(part if part.dim() == 2 else part.sum(2)) / count

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


def pyg_batch_norm(module: norm.BatchNorm, rows: Rows, x: torch.Tensor) -> torch.Tensor:
    """Do what :func:`batch_norm` does, but on a single row, if allowed, as when evaluating."""
    if module.allow_single_element and rows.total <= 1:
        inner = module.module
        return torch.nn.functional.batch_norm(
            x, inner.running_mean, inner.running_var, inner.weight, inner.bias, eps=inner.eps
        )
    return batch_norm(module.module, rows, x)


def diff_group_norm(module: norm.DiffGroupNorm, rows: Rows, x: torch.Tensor) -> torch.Tensor:
    """Add what each soft group of nodes has, normalised by :func:`batch_norm`.

    From Zhou et al., "Towards Deeper Graph Neural Networks with Differentiable Group
    Normalization", 2020.
    """
    channels, groups = module.in_channels, module.groups
    share = module.lin(x).softmax(dim=-1)
    grouped = share.unsqueeze(-1) * x.unsqueeze(-2)
    out = batch_norm(module.norm, rows, grouped.view(-1, groups * channels))
    scale: float = module.lamda
    return x + scale * out.view(-1, groups, channels).sum(-2)


def hetero_batch_norm(
    module: norm.HeteroBatchNorm,
    rows: Rows,
    x: torch.Tensor,
    type_vec: torch.Tensor,
) -> torch.Tensor:
    """Normalise each channel of (rows, C) over the nodes of each type; as in PyG, not through it.

    PyG takes statistics as constants, so that no gradient goes through them. 3 messages of C, 1 and
    C values a type.
    """
    kept = not module.training and module.track_running_stats
    with checking(type(module).__name__, rows.group) as where:
        check_rows(x, rows, where)
        _check_channels(module, x, (2,), where)
        check_ids(type_vec, module.num_types, x, where, "type_vec")
    types = Batch(rows, type_vec, module.num_types)
    if kept:
        mean, var = module.running_mean, module.running_var
        dtype = result_dtype(x, mean, module.weight)
        x = x.to(accumulated(x.dtype))
    else:
        dtype = result_dtype(x, module.weight)
        with torch.no_grad():
            mean = types.mean(x)
            x = x.to(mean.dtype)
            var = types.mean((x - types.at_nodes(mean)).square())
    if module.training and module.track_running_stats:
        factor = module.momentum
        if factor is None:
            module.num_batches_tracked.add_(1)
            factor = 1.0 / float(module.num_batches_tracked)
        seen = (types.counts > 0).view(-1, 1)
        _move(module.running_mean, mean, factor, seen)
        _move(module.running_var, var, factor, seen)
    out = (x - types.at_nodes(mean)) / types.at_nodes(var.clamp(module.eps).sqrt())
    if module.affine:
        out = out * types.at_nodes(module.weight) + types.at_nodes(module.bias)
    return out.to(dtype)


def instance_norm(
    module: norm.InstanceNorm,
    rows: Rows,
    x: torch.Tensor,
    batch: torch.Tensor | None = None,
    batch_size: int | None = None,
) -> torch.Tensor:
    """Normalise each channel of (rows, C) over each graph; 2 messages of C values a graph.

    From Ulyanov et al., "Instance Normalization: The Missing Ingredient for Fast Stylization",
    2017.
    """
    name = type(module).__name__
    kept = not module.training and module.track_running_stats
    with checking(name, rows.group) as where:
        check_rows(x, rows, where)
        _check_channels(module, x, (2,), where)
        if not kept and batch is None:
            _check_count(rows.total, rows, where)
    dtype = x.dtype if batch is None else result_dtype(x, module.weight)
    if kept:
        centred = x.to(accumulated(x.dtype)) - module.running_mean
        deviation = (module.running_var + module.eps).sqrt()
    else:
        graphs = batch_of(name, rows, x, batch, batch_size)
        mean = graphs.mean(x)
        centred = x.to(mean.dtype) - graphs.at_nodes(mean)
        squares = graphs.sum(centred.square())
        counts = graphs.counts.view(-1, 1)
        if rows.total:
            unbiased = squares / (counts - 1).clamp(min=1)
            _move(module.running_mean, mean.mean(0), module.momentum)
            _move(module.running_var, unbiased.mean(0), module.momentum)
        deviation = graphs.at_nodes((squares / counts.clamp(min=1) + module.eps).sqrt())
    out: torch.Tensor = centred / deviation
    if module.weight is not None:
        out = out * module.weight
    if module.bias is not None:
        out = out + module.bias
    return out.to(dtype)


def _move(
    running: torch.Tensor | None,
    new: torch.Tensor,
    factor: float,
    where: torch.Tensor | None = None,
) -> None:
    """Move a running statistic, if there is one, towards a new one, in the dtype of that."""
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
    """Raise ArgumentError unless `x` fits to parameters and buffers, which would be broadcast."""
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
