"""Rules of normalisations; statistics are over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from varcomm.errors import ArgumentError
from varcomm.grid.field import placed, plain, refused, rule, wrap
from varcomm.grid.reductions import Over, moments, reduced_splits, sum_over, widened

Func = Callable[..., Any]


class _Norm(torch.autograd.Function):
    """Values less their mean, over their deviation, scaled and shifted channel by channel.

    Means are over all ranks. The first output is the result; backward uses the next three, and is
    differentiable by them. Torch's operators for the same would pass over all values twice as
    often.
    """

    @staticmethod
    def forward(
        x: Tensor, weight: Any, bias: Any, over: Over, points: int, eps: float
    ) -> tuple[Tensor, ...]:
        centred, offset, mean, var = moments(x, over)
        inverse = (var + eps).rsqrt()
        scale = inverse if weight is None else inverse * weight
        shift = -offset * scale if bias is None else bias - offset * scale
        out = _affine(centred, scale, shift, points)
        return out, centred, offset, inverse, mean, var

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, weight, _, ctx.over, ctx.points, _ = inputs
        _, *saved, mean, var = output
        ctx.save_for_backward(weight, *saved)
        ctx.save_for_forward(weight, *saved)
        ctx.mark_non_differentiable(mean, var)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *of: Any) -> tuple[Tensor | None, ...]:
        (weight, centred, offset, inverse), over = ctx.saved_tensors, ctx.over
        of_out, of_centred, of_offset, of_inverse, *_ = of
        scale = inverse if weight is None else inverse * weight
        of_offset = torch.zeros_like(offset) if of_offset is None else of_offset
        of_inverse = torch.zeros_like(offset) if of_inverse is None else of_inverse
        of_weight = of_bias = None
        if of_out is not None:
            sums, products = _sums_over_points(of_out, centred, ctx.points)
            products = products - offset * sums
            weighted = products if weight is None else products * weight
            of_offset = of_offset - (sums * scale).sum_to_size(offset.shape)
            of_inverse = of_inverse + weighted.sum_to_size(offset.shape)
            if ctx.needs_input_grad[1]:
                of_weight = (products * inverse).sum(0, keepdim=True)
            if ctx.needs_input_grad[2]:
                of_bias = sums.sum(0, keepdim=True)
        of_offset, of_inverse = sum_over(torch.stack([of_offset, of_inverse]), over.splits)
        factor = -inverse.pow(3) * of_inverse / over.elements
        of_x = _affine(centred, factor, of_offset / over.elements - offset * factor, ctx.points)
        of_x = of_x if of_out is None else of_x.addcmul_(of_out, scale)
        of_x = of_x if of_centred is None else of_x + of_centred
        return of_x, of_weight, of_bias, None, None, None

    @staticmethod
    def jvp(ctx: Any, of_x: Any, of_weight: Any, of_bias: Any, *_: None) -> tuple[Any, ...]:
        (weight, centred, offset, inverse), over = ctx.saved_tensors, ctx.over
        of_x = torch.zeros_like(centred) if of_x is None else of_x
        distance = centred - offset
        sums = [v.sum(over.dims, keepdim=True) for v in (of_x, of_x * distance)]
        of_offset, of_product = sum_over(torch.stack(sums), over.splits) / over.elements
        of_inverse = -inverse.pow(3) * of_product
        out = (of_x - of_offset) * inverse + distance * of_inverse
        out = out if weight is None else out * weight
        out = out if of_weight is None else out + distance * inverse * of_weight
        out = out if of_bias is None else out + of_bias
        return out, of_x.clone(), of_offset, of_inverse, None, None


def _in_kernels(points: int, *tensors: Tensor) -> bool:
    """Whether to call torch's kernels, which loop over channels and have no derivatives here.

    For few points of each channel the loop is slower than other operators.
    """
    if torch.is_grad_enabled() or not all(x.is_contiguous() for x in tensors):
        return False
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        return False
    shape = tensors[0].shape
    return 0 not in shape and prod(shape[points:]) >= 16


def _affine(x: Tensor, scale: Tensor, shift: Tensor, points: int) -> Tensor:
    """Return values scaled and shifted by channels, which the dimensions before `points` number."""
    if not _in_kernels(points, x):
        return torch.addcmul(shift, x, scale)
    # faster than addcmul of operands that are broadcast; a view may not be an output of autograd
    shape = [*x.shape[:points], *[1] * (x.dim() - points)]
    scale, shift = (v.expand(shape).reshape(-1) for v in (scale, shift))
    zeros, ones, out = torch.zeros_like(scale), torch.ones_like(scale), torch.empty_like(x)
    rows, unused = (1, len(scale), -1), (x.new_empty(0), x.new_empty(0))
    how = scale, shift, zeros, ones, False, 0.0, 0.0
    torch.native_batch_norm(x.view(rows), *how, out=(out.view(rows), *unused))
    return out


def _sums_over_points(of: Tensor, x: Tensor, points: int) -> tuple[Tensor, Tensor]:
    """Return the sums of a gradient, and of its products with values, from a dimension on."""
    shape = [*x.shape[:points], *[1] * (x.dim() - points)]
    if not _in_kernels(points, of, x):
        return of.sum_to_size(shape), (of * x).sum_to_size(shape)
    # torch's kernel reads both once; with a mean of 0 and a deviation of 1 it returns these sums
    rows = prod(shape)
    _, products, sums = torch.ops.aten.native_batch_norm_backward(
        of.view(1, rows, -1), x.view(1, rows, -1), None, None, None,
        x.new_zeros(rows), x.new_ones(rows), True, 0.0, [False, True, True],
    )  # fmt: skip
    return sums.view(shape), products.view(shape)


def _normalised(
    x: Any, over: Sequence[int], weight: Any, bias: Any, eps: float, groups: int | None = None
) -> tuple[Any, Tensor, Tensor]:
    """Return the field with each channel scaled and shifted, and the moments used for it.

    With groups, moments are also over the channels of a group.
    """
    local, points, shape = widened(plain(x)), 2, [-1, *[1] * (x.dim() - 2)]
    of = Over.of(x, over)
    if groups is not None:
        local, points, shape = local.unflatten(1, (groups, -1)), 3, [groups, *shape]
        of = Over([*range(2, local.dim())], of.splits, of.elements * x.shape[1] // groups)
    weight, bias = (v if v is None else v.to(local.dtype).view(1, *shape) for v in (weight, bias))
    out, _, _, _, mean, var = _Norm.apply(local, weight, bias, of, points, eps)  # type: ignore[no-untyped-call]
    out = out if groups is None else out.flatten(1, 2)
    return wrap(out.to(x.dtype), x.grid_layout), mean, var


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
        scale = (widened(running_var) + eps).rsqrt()
        scale = scale if weight is None else scale * widened(weight)
        out = (widened(plain(input)) - widened(running_mean).view(shape)) * scale.view(shape)
        out = out if bias is None else out.add_(widened(bias).view(shape))
        return wrap(out.to(input.dtype), input.grid_layout)
    points = [*range(2, input.dim())]
    over = points if func is F.instance_norm else [0, *points]
    elements = prod(input.shape[dim] for dim in over)
    if elements <= 1:
        value = "spatial element" if func is F.instance_norm else "value per channel"
        raise ArgumentError(
            f"Expected more than 1 {value} when training, got input size {input.shape}"
        )
    out, mean, var = _normalised(input, over, weight, bias, eps)
    with torch.no_grad():
        if func is F.instance_norm and (running_mean is not None or running_var is not None):
            of_own = torch.stack([mean, var]).sum(1)
            mean, var = sum_over(of_own, reduced_splits(input, [0])) / input.shape[0]
        for running, new in ((running_mean, mean), (running_var, var * elements / (elements - 1))):
            if running is not None:
                running.lerp_(new.flatten().to(running.dtype), momentum)
    return out


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
    return _normalised(input, range(2, input.dim()), weight, bias, eps, num_groups)[0]


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
    centred, offset, _, var = moments(widened(plain(input)), Over.of(input, dims))
    return _by_element(input, centred - offset, var, eps, weight, bias)


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
