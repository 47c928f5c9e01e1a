"""Rules of reductions, cumulative sums and softmax; along a split dimension over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from varcomm.grid.fetch import span
from varcomm.grid.field import (
    by_body,
    dims_of,
    filled,
    place_of,
    plain,
    refused,
    rule,
    split_of,
    wrap,
)
from varcomm.grid.layout import Layout, Split
from varcomm.ops.all_gather_v import all_gather_v
from varcomm.ops.all_reduce import all_reduce

Func = Callable[..., Any]


def without(layout: Layout, dims: int, gone: Sequence[int], keepdim: bool) -> Layout:
    """Return the layout after a reduction over the dimensions `gone` of `dims`."""
    left = {dim: split for dim, split in layout.at(dims).items() if dim not in gone}
    if keepdim:
        return layout.having(left, dims)
    moved = {dim - sum(g < dim for g in gone): split for dim, split in left.items()}
    return layout.having(moved, dims - len({*gone}))


def reduced_splits(x: Any, dims: Sequence[int]) -> list[Split]:
    """Return the splits along some dimensions."""
    return [split for dim, split in x.grid_layout.at(x.dim()).items() if dim in dims]


def sum_over(x: Tensor, splits: Sequence[Split]) -> Tensor:
    """Sum a local result over the ranks of these splits."""
    for split in splits:
        x = all_reduce(x, group=split.group.process_group)
    return x


def widened(x: Tensor) -> Tensor:
    """Return floats narrower than 4 bytes in fp32."""
    return x.float() if x.is_floating_point() and x.dtype.itemsize < 4 else x


@rule("sum count_nonzero nansum")
def _sum(func: Func, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    dims, local = dims_of(dim, x), plain(x)
    more = {"keepdim": keepdim} if keepdim else {}
    if func.__name__ == "count_nonzero":
        out = func(local, dims)
    else:
        narrow = dtype is None and local.is_floating_point() and local.dtype.itemsize < 4
        wide = torch.float32 if narrow else dtype
        out = func(local, dims, dtype=wide, **more)
    out = sum_over(out, reduced_splits(x, dims))
    out = out.to(local.dtype) if dtype is None and local.is_floating_point() else out
    return wrap(out, without(x.grid_layout, x.dim(), dims, keepdim))


@rule("mean")
def mean(func: Func, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Divide the sum over all ranks by the number of elements."""
    dims = dims_of(dim, x)
    wide = x if dtype is None else x.to(dtype)
    out = wide.to(widened(plain(wide)).dtype).sum(dims, keepdim=keepdim)
    return (out / prod(x.shape[d] for d in dims)).to(wide.dtype)


@rule("any all")
def _any(func: Func, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    dtype = torch.uint8 if x.dtype == torch.uint8 else torch.bool
    if dim is not None and dim in ((), []):
        return x.bool().to(dtype)  # torch reduces nothing here
    holds = x.bool() if func.__name__ == "any" else ~x.bool()
    found = _sum(torch.sum, holds, dim, keepdim, dtype=torch.int64) > 0
    return (found if func.__name__ == "any" else ~found).to(dtype)


@rule("prod")
def _prod(func: Func, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    dims = dims_of(dim, x)
    out = plain(x)
    for at in sorted(dims, reverse=True):
        out = func(out, at, keepdim=True, dtype=dtype)
    for split in reduced_splits(x, dims):
        out = _of_ranks(out, split).prod(0)
    return _unkept(out, x, dims, keepdim)


def _of_ranks(x: Tensor, split: Split) -> Tensor:
    """Gather a local result along a new first dimension, of each rank that has rows."""
    group = split.group
    x = all_gather_v(x.unsqueeze(0), [1] * group.size, group=group.process_group)
    having = [rank for rank, n in enumerate(split.sizes) if n]
    return x if len(having) == group.size else x[having]


def _unkept(out: Tensor, x: Any, dims: Sequence[int], keepdim: bool) -> Any:
    if not keepdim:
        shape = [n for at, n in enumerate(out.shape) if at not in dims]
        out = out.reshape(shape)
    return wrap(out, without(x.grid_layout, x.dim(), dims, keepdim))


_EXTREMES = torch.amin, torch.amax


@rule("amax amin max min aminmax", several=True)
def extreme(func: Func, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """Take the extreme of this rank's rows, and of those of all ranks."""
    name, pair = func.__name__, func.__name__ in ("max", "min")
    if isinstance(dim, Tensor):
        return torch.maximum(x, dim) if name == "max" else torch.minimum(x, dim)
    if name == "aminmax":
        return torch.return_types.aminmax(tuple([extreme(f, x, dim, keepdim) for f in _EXTREMES]))
    if pair and dim is not None:
        at, place, split = place_of(dim, x.dim()), _place(x, dim, True, name), split_of(x, dim)
        first = split.start if split is not None else 0
        rows = torch.arange(plain(x).shape[at], device=x.device) + first
        chosen = rows.view(-1, *[1] * (x.dim() - at - 1)) == plain(place)
        picked = wrap(plain(x).masked_fill(~chosen, 0), x.grid_layout)
        summed = torch.uint8 if x.dtype == torch.bool else x.dtype
        values = picked.sum(at, keepdim=keepdim, dtype=summed)  # all to the index, as torch does
        index = _unkept(plain(place), x, [at], keepdim)
        kind = torch.return_types.max if name == "max" else torch.return_types.min
        return kind((values.to(x.dtype), index))
    dims, largest = dims_of(dim, x), name in ("max", "amax")
    splits, of = reduced_splits(x, dims), torch.amax if name in ("max", "amax") else torch.amin
    out = of(plain(x), dims, True) if not splits else _extreme_of_all(x, dims, largest)
    if splits and x.is_floating_point():
        # the gradient is shared evenly among all elements with the extreme, on all ranks
        equal = (plain(x).detach() == out) | plain(x).detach().isnan()
        count = sum_over(equal.sum(dims, keepdim=True), splits)
        share = plain(x).masked_fill(~equal, 0).sum(dims, keepdim=True) / count
        near = sum_over(share, splits)
        out = near + torch.where(near.isfinite(), out - near, 0).detach()
    return _unkept(out, x, dims, keepdim)


def _extreme_of_all(x: Any, dims: Sequence[int], largest: bool) -> Tensor:
    """Return the extreme over some dimensions, which are kept, without a gradient."""
    of, splits = torch.amax if largest else torch.amin, reduced_splits(x, dims)
    out = of(filled(plain(x).detach(), [split.dim for split in splits]), [*dims], keepdim=True)
    for split in splits:
        out = of(_of_ranks(out, split), 0)
    return out


@rule("argmax argmin")
def _arg(func: Func, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    if dim is None:
        found = _place(x.flatten(), 0, False, func.__name__[3:])
        return found.reshape([1] * x.dim()) if keepdim else found
    return _place(x, dim, keepdim, func.__name__[3:])


def _place(x: Any, dim: int, keepdim: bool, kind: str) -> Any:
    """Return where the first extreme along a dimension is."""
    at, split = place_of(dim, x.dim()), split_of(x, dim, f"arg{kind}")
    of, local = (torch.max if kind == "max" else torch.min), plain(x).detach()
    if split is None:
        return _unkept(of(local, at, keepdim=True)[1], x, [at], keepdim)
    values, index = of(filled(local, [split.dim]), at, keepdim=True)
    values, index = _of_ranks(values, split), _of_ranks(index + split.start, split)
    best = of(values, 0, keepdim=True)[1]
    return _unkept(index.gather(0, best).squeeze(0), x, [at], keepdim)


class Over(NamedTuple):
    """Dimensions that are reduced, the splits among them, and the elements on all ranks."""

    dims: Sequence[int]
    splits: Sequence[Split]
    elements: int

    @classmethod
    def of(cls, x: Any, dims: Sequence[int]) -> Over:
        """Return the reduction of a field over dimensions that are counted from the first."""
        return cls([*dims], reduced_splits(x, dims), prod(x.shape[dim] for dim in dims))


class Moments(NamedTuple):
    """Mean and variance over some dimensions, which are kept, of all ranks; in fp32 at least.

    Values are used as distances from a centre, a constant: the mean of some of this rank's rows.
    Products with a large mean would lose the digits of a variance and of a norm.
    """

    centred: Tensor  # this rank's values less the centre
    offset: Tensor  # the mean less the centre
    mean: Tensor
    var: Tensor


def moments(local: Tensor, over: Over) -> Moments:
    """Return the moments of values of which this rank has a part."""
    if not local.is_floating_point():
        raise refused(f"a variance of {local.dtype}")
    sample, dims = local.detach(), [*over.dims]
    if local.dim() - 2 in dims:
        sample = sample[..., ::8, :]
    counts = [max(prod(part.shape[dim] for dim in dims), 1) for part in (sample, local)]
    centre = reference = sample.sum(dims, keepdim=True) / counts[0]
    centred = local - centre
    sums: Callable[..., Any] = _Sums.apply if centred.requires_grad else _sums
    offset, squares = (s / counts[1] for s in sums(centred, dims))
    var = (squares - offset.square()).clamp_min(0)
    for split in over.splits:
        reference, offset, var = _of_all_ranks(reference, offset, var, split)
    return Moments(centred, (reference - centre) + offset, reference + offset, var)


def _sums(x: Tensor, dims: list[int]) -> tuple[Tensor, Tensor]:
    """Return the sum of a local tensor and of its squares."""
    distance = torch.linalg.vector_norm(x, dim=dims, keepdim=True)
    return x.sum(dims, keepdim=True), distance.square()


class _Sums(torch.autograd.Function):
    """Sums whose derivative is faster than torch's derivative of a norm."""

    @staticmethod
    def forward(x: Tensor, dims: list[int]) -> tuple[Tensor, Tensor]:
        return _sums(x, dims)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, list[int]], _: Any) -> None:
        x, ctx.dims = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx: Any, of_sum: Tensor, of_squares: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return (x * (2 * of_squares)).add_(of_sum), None

    @staticmethod
    def jvp(ctx: Any, of_x: Tensor, _: None) -> tuple[Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        one, other = (v.sum(ctx.dims, keepdim=True) for v in (of_x, x * of_x))
        return one, 2 * other


def _of_all_ranks(
    reference: Tensor, offset: Tensor, var: Tensor, split: Split
) -> tuple[Tensor, Tensor, Tensor]:
    """Combine the moments of the ranks of a split: one message, with each rank's share.

    A mean is `offset` from a `reference`, which is then that of the rank with the most rows.
    """
    group, shape = split.group, var.shape
    share = var.new_full((1,), split.own / max(split.rows, 1))
    own = torch.cat([reference.flatten(), offset.flatten(), var.flatten(), share])
    parts = all_gather_v(own[None], [1] * group.size, group=group.process_group)
    references, offsets, variances = parts[:, :-1].unflatten(1, (3, -1)).unbind(1)
    shares, reference = parts[:, -1:], references[split.sizes.index(max(split.sizes))].detach()
    offsets = (references - reference) + offsets
    offset = (shares * offsets).sum(0)
    var = (shares * (variances + (offsets - offset).square())).sum(0)
    return reference.view(shape), offset.view(shape), var.view(shape)


@rule("var std var_mean std_mean")
def _var(
    func: Func,
    x: Any,
    dim: Any = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: Any = None,
) -> Any:
    name = func.__name__
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    if correction is None:
        correction = 0 if unbiased is False else 1
    dims = dims_of(dim, x)
    over = Over.of(x, dims)
    _, _, mean, found = moments(widened(plain(x)), over)
    count = over.elements
    if correction:
        found = found * (count / (count - correction) if count > correction else inf)
    found = _root(found, 0.5) if name.startswith("std") else found
    parts = [_unkept(one.to(x.dtype), x, dims, keepdim) for one in (found, mean)]
    return tuple(parts) if name.endswith("mean") else parts[0]


@rule("norm linalg_vector_norm")
def _norm(
    func: Func, x: Any, p: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Any:
    if p in ("fro", None):
        p = 2
    if dtype is not None:
        x = x.to(dtype)
    if p in (inf, -inf):
        return (x.abs().amax if p > 0 else x.abs().amin)(dims_of(dim, x), keepdim=keepdim)
    dims = dims_of(dim, x)
    if not reduced_splits(x, dims):
        out = torch.linalg.vector_norm(plain(x), p, dims, keepdim)
        return wrap(out, without(x.grid_layout, x.dim(), dims, keepdim))
    if p == 0:
        return (x != 0).sum(dims, keepdim=keepdim).to(x.dtype)
    return _root(x.abs().pow(p).sum(dims, keepdim=keepdim), 1 / p)


def _root(x: Any, power: float) -> Any:
    """Return a power below one, whose derivative at 0 is 0, as torch takes it for norms."""
    zero = x == 0
    return x.masked_fill(zero, 1).pow(power).masked_fill(zero, 0)


@rule("logsumexp")
def _logsumexp(func: Func, x: Any, dim: Any, keepdim: bool = False) -> Any:
    dims = dims_of(dim, x)
    top = _extreme_of_all(x, dims, True)
    top = wrap(top.masked_fill(top.isinf(), 0), without(x.grid_layout, x.dim(), dims, True))
    out = (x - top).exp().sum(dims, keepdim=True).log() + top
    return out if keepdim else _unkept(plain(out), x, dims, False)


@rule("softmax log_softmax")
def _softmax(func: Func, x: Any, dim: Any = None, *args: Any, dtype: Any = None, **_: Any) -> Any:
    old = int(x.dim() not in (0, 1, 3))  # torch's default
    at = old if dim is None else place_of(dim, x.dim())
    dtype = next((each for each in args if isinstance(each, torch.dtype)), dtype)
    if not reduced_splits(x, [at]):
        return wrap(func(plain(x), at, dtype=dtype), x.grid_layout)
    wide = x.to(widened(plain(x)).dtype if dtype is None else dtype)
    out = wide - _logsumexp(torch.logsumexp, wide, at, True)
    out = out if func.__name__ == "log_softmax" else out.exp()
    return out.to(x.dtype if dtype is None else dtype)


@rule("cumsum")
def _cumsum(func: Func, x: Any, dim: int, *, dtype: Any = None) -> Any:
    split, out = split_of(x, dim, "cumsum"), func(plain(x), dim, dtype=dtype)
    if split is not None:
        own, ranks = plain(x).sum(dim, keepdim=True, dtype=out.dtype), split.group.size
        before = span(own, split.resized([1] * ranks), [(0, rank) for rank in range(ranks)])
        out = out + before.sum(dim, keepdim=True, dtype=out.dtype)
    return wrap(out, x.grid_layout)


rule("normalize")(by_body)

# the place of the dimension behind the first argument, and the dimension if none is passed
_ALONG: dict[str, tuple[int, Any]] = {
    "cumprod": (0, None), "cummax": (0, None), "cummin": (0, None), "sort": (0, -1),
    "argsort": (0, -1), "topk": (1, -1), "kthvalue": (1, -1), "median": (0, None),
    "nanmedian": (0, None), "glu": (0, -1), "index_select": (0, None),
    "prelu": (1, 1), "local_response_norm": (4, 1), "channel_shuffle": (1, -3),
}  # fmt: skip


@rule(*_ALONG)
def _along(func: Func, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply a function along a dimension that is not split."""
    name = func.__name__.strip("_")
    place, default = _ALONG[name]
    dims = dims_of(kwargs.get("dim", args[place] if len(args) > place else default), x)
    if splits := reduced_splits(x, dims):
        raise refused(f"{name} along the split dimension {splits[0].dim}")
    out = func(plain(x), *args, **kwargs)
    first = out if isinstance(out, Tensor) else out[0]
    return wrap(out, without(x.grid_layout, x.dim(), dims, first.dim() == x.dim()))
