"""Rules of normalisations; statistics are over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from varcomm.errors import ArgumentError
from varcomm.grid.field import placed, plain, refused, rule, wrap
from varcomm.grid.reductions import Moments, moments, reduced_splits, widened

Func = Callable[..., Any]


def _normalised(x: Any, of: Moments, eps: float, weight: Any, bias: Any) -> Any:
    """Scale and shift each channel.

    torch's kernel for known statistics would be faster; in torch 2.13 its backward is wrong for one
    image, or one row, if the gradient lies in memory with the channels last.
    """
    shape = [1, -1, *[1] * (x.dim() - 2)]
    scale = (of.var + eps).rsqrt()
    scale = scale if weight is None else scale * widened(weight.view(shape))
    shift = -of.offset * scale
    shift = shift if bias is None else shift + widened(bias.view(shape))
    out = (of.centred * scale).add_(shift)  # addcmul takes twice the time
    return wrap(out.to(x.dtype), x.grid_layout)


@rule("batch_norm instance_norm")
def _batch_norm(
    func: Func,
    input: Any,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    use_input_stats: bool | None = None,
) -> Any:
    """Normalise channels by moments over samples and points, or over the points of each sample."""
    name = func.__name__
    if func not in (F.batch_norm, F.instance_norm):  # whose arguments are in another order
        raise refused(f"torch.{name}", f"Call torch.nn.functional.{name}.")
    if input.grid_layout.at(input.dim()).get(1):
        raise refused(f"{name} of split channels")
    if not (training if use_input_stats is None else use_input_stats):
        if running_mean is None or running_var is None:
            raise ArgumentError(f"{name}: evaluation needs running_mean and running_var.")
        shape = [1, -1, *[1] * (input.dim() - 2)]
        mean, var = widened(running_mean).view(shape), widened(running_var).view(shape)
        known = Moments(widened(plain(input)) - mean, torch.zeros_like(mean), mean, var, 0)
        return _normalised(input, known, eps, weight, bias)
    points = [*range(2, input.dim())]
    found = moments(input, points if func is F.instance_norm else [0, *points])
    if found.elements <= 1:
        value = "spatial element" if func is F.instance_norm else "value per channel"
        raise ArgumentError(
            f"Expected more than 1 {value} when training, got input size {input.shape}"
        )
    of_all = found.elements / (found.elements - 1)
    with torch.no_grad():
        for running, new in ((running_mean, found.mean), (running_var, found.var * of_all)):
            if running is not None:
                running.lerp_(new.detach().mean(0).flatten().to(running.dtype), momentum)
    return _normalised(input, found, eps, weight, bias)


@rule("group_norm")
def _group_norm(
    func: Func,
    input: Any,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    if input.grid_layout.at(input.dim()).get(1):
        raise refused("group_norm of split channels")
    grouped = input.unflatten(1, (num_groups, -1))
    centred, offset, mean, var, count = moments(grouped, range(2, grouped.dim()))
    each = input.shape[1] // num_groups
    offset, mean, var = (m.squeeze(2).repeat_interleave(each, 1) for m in (offset, mean, var))
    found = Moments(centred.flatten(1, 2), offset, mean, var, count)
    return _normalised(input, found, eps, weight, bias)


@rule("layer_norm")
def _layer_norm(
    func: Func,
    input: Any,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    dims = _last(input, normalized_shape)
    if not reduced_splits(input, dims):
        out = func(plain(input), normalized_shape, weight, bias, eps)
        return wrap(out, input.grid_layout)
    found = moments(input, dims)
    return _by_element(input, found.centred - found.offset, found.var, eps, weight, bias)


@rule("rms_norm")
def _rms_norm(
    func: Func,
    input: Any,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Any:
    dims, local = _last(input, normalized_shape), plain(input)
    if not reduced_splits(input, dims):
        return wrap(func(local, normalized_shape, weight, eps), input.grid_layout)
    wide = wrap(widened(local), input.grid_layout)
    square = plain(wide.square().mean(tuple(dims), keepdim=True))
    eps = torch.finfo(local.dtype).eps if eps is None else eps
    return _by_element(input, plain(wide), square, eps, weight, None)


def _last(x: Any, shape: Sequence[int]) -> range:
    if [*x.shape[x.dim() - len(shape) :]] != [*shape]:
        raise ArgumentError(f"a norm over {list(shape)} of a field of shape {tuple(x.shape)}.")
    return range(x.dim() - len(shape), x.dim())


def _by_element(
    x: Any, centred: Tensor, var: Tensor, eps: float, weight: Tensor | None, bias: Tensor | None
) -> Any:
    out = centred * (var + eps).rsqrt()
    out = out if weight is None else out * placed(weight, x.grid_layout)
    out = out if bias is None else out + placed(bias, x.grid_layout)
    return wrap(out.to(plain(x).dtype), x.grid_layout)
