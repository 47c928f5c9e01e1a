"""Rules of convolutions and pools: an interval of outputs reads an interval of inputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf, prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from varcomm.errors import ArgumentError
from varcomm.grid.fetch import rows, span, start_rows
from varcomm.grid.field import plain, refused, rule, wrap
from varcomm.grid.layout import Layout, Spans, Split

Func = Callable[..., Any]
Parts = list[tuple[int, int]]


def cut(split: Split, count: int, first: Callable[[int], int]) -> tuple[int, ...]:
    """Return the sizes of `count` outputs; each belongs to the owner of its first input row.

    ``first(row)`` is the first output that begins at an input row or behind it. Rows that padding
    put before the field belong to the outputs behind them.
    """
    ends = [min(count, max(0, first(end - split.lead))) for end in split.offsets]
    ends[0], ends[-1] = 0, count
    return tuple(b - a for a, b in itertools.pairwise(ends))


@dataclass(frozen=True)
class Window:
    """Windows along one dimension."""

    kernel: int
    stride: int
    before: int  # rows of padding
    behind: int
    dilation: int = 1
    ceil: bool = False

    @property
    def reach(self) -> int:
        """Rows from the first to the last of a window."""
        return self.dilation * (self.kernel - 1) + 1

    def outputs(self, rows: int) -> int:
        """Return the number of windows."""
        room = rows + self.before + self.behind - self.reach
        count = (-(-room // self.stride) if self.ceil else room // self.stride) + 1
        if self.ceil and (count - 1) * self.stride >= rows + self.before:
            count -= 1  # a window must begin before the padding behind
        return count

    def read(self, split: Split) -> tuple[Split, Spans]:
        """Return the split of the outputs, and the rows that those of each rank read."""
        count = self.outputs(split.rows)
        if count < 1:
            raise ArgumentError(
                f"windows of {self.reach} rows do not fit into {split.rows} rows and padding of "
                f"{self.before} and {self.behind}."
            )
        out = split.resized(cut(split, count, lambda row: -(-row // self.stride)))
        return out, tuple(self.reads(a, b) if b > a else (0, 0) for a, b in out.spans)

    def reads(self, first: int, last: int) -> tuple[int, int]:
        """Return the rows that outputs read, from one to behind another."""
        low = first * self.stride - self.before
        return low, low + (last - first - 1) * self.stride + self.reach


def in_parts(reach: tuple[int, int], owned: tuple[int, int], read: Iterable[int]) -> Parts:
    """Return a rank's reach in parts; rows that are neither read nor owned lie before the field.

    Such rows are zeros.
    """
    known = {*range(*owned), *read}
    runs = itertools.groupby(range(*reach), known.__contains__)
    lists = [(is_known, [*rows]) for is_known, rows in runs]
    return [(r[0], r[-1] + 1) if is_known else (-len(r), 0) for is_known, r in lists] or [(0, 0)]


@lru_cache(maxsize=512)
def _needed(
    spans: Spans, owned: Spans, outputs: Spans, taps: range, up: int = 1, down: int = 1
) -> list[Parts]:
    """Return the spans of all ranks in parts, without rows that no output reads.

    An output reads ``(output * up + tap) / down`` of each tap that divides.
    """
    if abs(taps.step) == 1 and len(taps) >= up:
        return [[one] for one in spans]
    found = []
    for reach, own, (a, b) in zip(spans, owned, outputs, strict=True):
        places = (output * up + tap for output in range(a, b) for tap in taps)
        found.append(in_parts(reach, own, (at // down for at in places if at % down == 0)))
    return found


def each(value: Any, dims: int) -> list[Any]:
    """Return a value for each dimension."""
    values = [*value] if isinstance(value, list | tuple) else [value]
    return values * dims if len(values) == 1 else values


def spatial(name: str, x: Any, dims: int) -> dict[int, Split]:
    """Return the splits along the last `dims` dimensions; channels may not be split."""
    if any(split.dim == -dims - 1 for split in x.grid_layout.splits):
        raise refused(f"{name} of split channels")
    if any(s.repeats > 1 for s in x.grid_layout.splits if s.dim >= -dims):
        raise refused(f"{name} along rows of several images in one dimension")
    return {split.dim: split for split in x.grid_layout.splits if split.dim >= -dims}


def slabs(
    name: str, x: Any, windows: Sequence[Window], fill: float = 0.0, inner: _Inner | None = None
) -> tuple[Tensor, Layout, list[int]]:
    """Return the rows that the windows of this rank read, padded along split dimensions.

    Also the layout of the outputs, and the padding that is left to the function. A rank without
    outputs gets one window of zeros, whose output :func:`kept` drops. Along the dimension of
    `inner` the rows are left as they are.
    """
    dims, local, splits = len(windows), plain(x), dict(x.grid_layout.by_dim)
    left = [0] * (2 * dims)
    for dim, split in spatial(name, x, dims).items():
        if inner is not None and dim == inner.split.dim:
            splits[dim] = inner.out
            continue
        window = windows[dim]
        splits[dim], spans = window.read(split)
        low, high = spans[split.group.rank]
        sides = [0, 0] if high > low else [0, window.reach]
        if fill:
            n = split.rows
            sides = [max(0, -low), max(0, high - n)] if high > low else sides
            spans = tuple((min(max(a, 0), n), max(0, min(b, n))) for a, b in spans)
        first, reach = -window.before, window.dilation * window.kernel
        taps = range(first, first + reach, window.dilation)
        outputs = splits[dim].spans
        local = rows(local, split, _needed(spans, split.spans, outputs, taps, up=window.stride))
        if any(sides):
            local = F.pad(local, [0, 0] * (-1 - dim) + sides, value=fill if high > low else 0.0)
    for i, window in enumerate(windows):
        if i - dims not in x.grid_layout.by_dim:
            left[2 * i : 2 * i + 2] = window.before, window.behind
    return local, x.grid_layout.having(splits, 0), left


def kept(out: Tensor, layout: Layout) -> Any:
    """Return a result without the output of a rank that has none."""
    for split in layout.splits:
        if split.repeats == 1 and out.shape[split.dim] != split.own:
            out = out.narrow(split.dim, 0, split.own)
    return wrap(out, layout)


def symmetric(x: Tensor, left: Sequence[int]) -> tuple[Tensor, list[int]]:
    """Return the tensor and padding per dimension, the same on both sides."""
    pairs = [*zip(left[::2], left[1::2], strict=True)]
    if all(a == b for a, b in pairs):
        return x, [a for a, _ in pairs]
    return _padded(x, left, 0.0), [0] * len(pairs)


def _padded(x: Tensor, left: Sequence[int], fill: float) -> Tensor:
    """Return the tensor with padding before and behind each of its last dimensions."""
    pairs = [*zip(left[::2], left[1::2], strict=True)]
    return F.pad(x, [n for pair in reversed(pairs) for n in pair], value=fill)


@rule("conv1d conv2d conv3d")
def _conv(
    func: Func,
    input: Any,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    dims = weight.dim() - 2
    reach, kernels = each(dilation, dims), weight.shape[2:]
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(reach, kernels, strict=True)]
        pads = [(n // 2, n - n // 2) for n in total]
    else:
        pads = [(n, n) for n in each(0 if padding == "valid" else padding, dims)]
    windows = [
        Window(k, s, *p, d)
        for k, s, p, d in zip(kernels, each(stride, dims), pads, reach, strict=True)
    ]
    weight, bias = plain(weight), plain(bias)
    inner = _inner(input, windows)
    local, layout, left = slabs(func.__name__, input, windows, inner=inner)
    local, own = symmetric(local, left)
    if inner is None:
        return kept(func(local, weight, bias, stride, own, dilation, groups), layout)

    def outputs(x: Tensor) -> Any:
        return func(x, weight, bias, stride, own, dilation, groups)

    return kept(inner.with_borders(local, outputs), layout)


@dataclass(frozen=True)
class _Inner:
    """Outputs of each rank that need only own rows: computed while the others' rows travel.

    Without them, a rank would copy all its rows behind its halo, and keep the copy for backward.
    """

    window: Window
    split: Split
    out: Split  # of all outputs
    inner: Spans  # those that need own rows, of each rank

    def with_borders(self, x: Tensor, outputs: Callable[[Tensor], Tensor]) -> Tensor:
        """Return all outputs of this rank from its rows; ``outputs(rows)`` computes some."""
        window, split, dim = self.window, self.split, self.split.dim
        borders = []  # of each rank, the rows for outputs before the inner ones and behind them
        for (a, b), (i, j) in zip(self.out.spans, self.inner, strict=True):
            low, high = window.reads(a, i)
            whole = low, high + (low - high) % window.stride  # windows do not cross into the others
            borders.append([whole] * (a < i) + [window.reads(j, b)] * (j < b))
        handle = start_rows(x, split, borders)
        rank = split.group.rank
        (a, b), (i, j) = self.out.spans[rank], self.inner[rank]
        low, high = window.reads(i, j)
        own = x if high - low == x.shape[dim] else x.narrow(dim, low - split.start, high - low)
        inner = outputs(own)  # narrow() of all rows copies its gradient
        rows = handle.wait()
        if not borders[rank]:  # no outputs, by which this rank takes part in backward
            nothing = rows.sum().to(inner.dtype).expand(inner.narrow(dim, 0, 0).shape)
            return torch.cat([inner, nothing], dim)
        found, behind = outputs(rows), 0
        if a < i and j < b:
            low, high = borders[rank][0]
            behind = (high - low) // window.stride
        before, after = found.narrow(dim, 0, i - a), found.narrow(dim, behind, b - j)
        return torch.cat([before, inner, after], dim)


_LARGE = 1 << 17  # elements of a rank from which on a copy of them costs more than three calls


def _inner(x: Any, windows: Sequence[Window]) -> _Inner | None:
    """Return the outputs that need only own rows along the first split dimension that has a halo.

    None on all ranks if these are few on some rank, or if the field is small.
    """
    if prod(x.shape) < _LARGE * x.grid_layout.ranks:
        return None
    for split in x.grid_layout.splits:
        if split.dim < -len(windows):
            continue
        window = windows[split.dim]
        out, spans = window.read(split)
        if spans == split.spans:
            continue
        inner = []
        for (a, b), (first, end) in zip(out.spans, split.spans, strict=True):
            i = max(a, -(-(first + window.before) // window.stride))
            j = min(b, (end + window.before - window.reach) // window.stride + 1)
            if 2 * (j - i) <= b - a:
                return None
            inner.append((i, j))
        reached = window.kernel if window.dilation == 1 else 1
        if window.stride > reached and tuple(inner) != out.spans:
            return None  # borders would have rows that no output reads
        return _Inner(window, split, out, tuple(inner))
    return None


@rule("conv_transpose1d conv_transpose2d conv_transpose3d")
def _conv_transpose(
    func: Func,
    input: Any,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    dims, weight, bias = weight.dim() - 2, plain(weight), plain(bias)
    strides, pads, more = each(stride, dims), each(padding, dims), each(output_padding, dims)
    steps = each(dilation, dims)
    reaches = [d * (k - 1) for d, k in zip(steps, weight.shape[2:], strict=True)]
    local, splits = plain(input), dict(input.grid_layout.by_dim)
    takes = []
    for dim, split in spatial(func.__name__, input, dims).items():
        s, p, step, reach = strides[dim], pads[dim], steps[dim], reaches[dim]
        n = split.rows
        count = (n - 1) * s - 2 * p + reach + more[dim] + 1
        if count < 1:
            raise ArgumentError(f"{func.__name__}: {n} rows and padding of {p} have no output.")
        out = split.resized(cut(split, count, lambda row, s=s: row * s))  # type: ignore[misc]
        spans = []
        for a, b in out.spans:
            low = min(n, max(0, -(-(a + p - reach) // s)))
            spans.append((low, max(low, min(n, (b - 1 + p) // s + 1))) if b > a else (0, 0))
        taps = range(p, p - reach - 1, -step)
        local = rows(local, split, _needed(tuple(spans), split.spans, out.spans, taps, down=s))
        (low, high), (a, b) = spans[out.group.rank], out.spans[out.group.rank]
        empty = high == low
        if empty:  # one row of zeros, so that this rank takes part
            local, high = F.pad(local, [0, 0] * (-1 - dim) + [0, 1]), low + 1
        skipped, have = a + p - low * s, (high - low - 1) * s + reach + 1
        takes.append((dim, max(0, skipped), max(0, -skipped), b - a, have))
        splits[dim], pads[dim], more[dim] = out, 0, 0
    # bias belongs to all outputs, also to those that no row reaches
    exact = all(not before and first + n <= have for _, first, before, n, have in takes)
    result = func(local, weight, bias if exact else None, strides, pads, more, groups, dilation)
    for dim, first, before, n, have in takes:
        behind = max(0, first - before + n - have)
        if before or behind:
            result = F.pad(result, [0, 0] * (-1 - dim) + [before, behind])
        result = result.narrow(dim, first, n)
    if bias is not None and not exact:
        result = result + bias.view(-1, *[1] * dims).to(result.dtype)
    return wrap(result, input.grid_layout.having(splits, 0))


def _pools(x: Any, dims: int, kernel: Any, stride: Any, padding: Any, *more: Any) -> list[Window]:
    kernels, pads = each(kernel, dims), each(padding, dims)
    strides = kernels if stride is None or stride in ([], ()) else each(stride, dims)
    dilations, ceil = each(more[0] if more else 1, dims), more[1] if len(more) > 1 else False
    return [
        Window(k, s, p, p, d, ceil)
        for k, s, p, d in zip(kernels, strides, pads, dilations, strict=True)
    ]


def _explicit(name: str, x: Any, windows: list[Window], fill: float) -> tuple[Tensor, Layout]:
    """Return a slab with all padding, also that of windows that begin late (``ceil_mode``)."""
    local, layout, left = slabs(name, x, windows, fill)
    dims = len(windows)
    for i, window in enumerate(windows):
        if i - dims not in x.grid_layout.by_dim:
            n = local.shape[i - dims]
            end = (window.outputs(n) - 1) * window.stride + window.reach
            left[2 * i + 1] = max(0, end - n - window.before)
    if any(left):
        local = _padded(local, left, fill)
    return local, layout


@rule("max_pool1d max_pool2d max_pool3d")
def _max_pool(
    func: Func,
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    name = func.__name__
    if return_indices:
        raise refused(f"{name} with return_indices=True")
    dims = int(name[8])
    windows = _pools(input, dims, kernel_size, stride, padding, dilation, ceil_mode)
    lowest = -inf if input.is_floating_point() else torch.iinfo(input.dtype).min
    local, layout = _explicit(name, input, windows, lowest)
    strides = [window.stride for window in windows]
    return kept(func(local, kernel_size, strides, 0, dilation), layout)


@rule("avg_pool1d avg_pool2d avg_pool3d")
def _avg_pool(
    func: Func,
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    name = func.__name__
    dims = int(name[8])
    windows = _pools(input, dims, kernel_size, stride, padding, 1, ceil_mode)
    kernels, strides = [w.kernel for w in windows], [w.stride for w in windows]
    local, layout = _explicit(name, input, windows, 0.0)
    out = func(local, kernels, strides)
    elements = prod(kernels)
    if divisor_override is not None:
        out = out * (elements / divisor_override)
    elif ceil_mode or (not count_include_pad and any(w.before for w in windows)):
        out = out * _inverse_counts(input, windows, layout, count_include_pad, out) * elements
    return kept(out, layout)


def _inverse_counts(
    x: Any, windows: Sequence[Window], layout: Layout, padded: bool, out: Tensor
) -> Tensor:
    """Return one over the number of elements that each window averages over."""
    found = out.new_ones(())
    for i, window in enumerate(windows):
        dim = i - len(windows)
        n, split = x.shape[dim], layout.by_dim.get(dim)
        first, count = (0, window.outputs(n)) if split is None else (split.start, split.own)
        start = torch.arange(first, first + max(count, 1), device=out.device)
        start = start * window.stride - window.before
        stop = (start + window.kernel).clamp_max(n + window.behind)
        if not padded:
            start, stop = start.clamp_min(0), stop.clamp_max(n)
        inverse = (stop - start).to(out.dtype).reciprocal()
        found = found * inverse.view(-1, *[1] * (-1 - dim))
    return found


@rule("lp_pool1d lp_pool2d lp_pool3d")
def _lp_pool(
    func: Func,
    input: Any,
    norm_type: float,
    kernel_size: Any,
    stride: Any = None,
    ceil_mode: bool = False,
) -> Any:
    dims = int(func.__name__[7])
    average = getattr(F, f"avg_pool{dims}d")
    kernels = each(kernel_size, dims)
    out = average(input.pow(norm_type), kernels, stride, 0, ceil_mode)
    out = out.sign() * out.abs().relu()
    return (out * prod(kernels)).pow(1.0 / norm_type)


_ALONG = "dimension", "size", "step"  # words of Tensor.unfold


@rule("unfold")
def _unfold(func: Func, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Return ``Tensor.unfold`` along one dimension, or the columns of ``F.unfold``."""
    if func is torch.Tensor.unfold:
        dim, size, step = (*args, *(kwargs[w] for w in _ALONG if w in kwargs))
        at = dim % x.dim() - x.dim()
        local, splits = plain(x), {d - 1: s for d, s in x.grid_layout.by_dim.items()}
        if at in x.grid_layout.by_dim:
            out, spans = Window(size, step, 0, 0).read(x.grid_layout.by_dim[at])
            local, splits[at - 1] = span(local, x.grid_layout.by_dim[at], spans), out
            if not out.own:
                local = F.pad(local, [0, 0] * (-1 - at) + [0, size])
        return kept(local.unfold(at, size, step), x.grid_layout.having(splits, 0))
    kernel, dilation, padding, stride = _four(*args, **kwargs)
    windows = [
        Window(k, s, p, p, d) for k, s, p, d in zip(kernel, stride, padding, dilation, strict=True)
    ]
    local, layout, left = slabs("unfold", x, windows)
    local, own = symmetric(local, left)
    columns = func(local, kernel, dilation, own, stride)
    if -1 in layout.by_dim:
        raise refused("unfold of split columns", "Split the rows alone.")
    split = layout.by_dim[-2]
    width = windows[1].outputs(x.shape[-1])
    joined = split.resized(n * width for n in split.sizes)
    columns = columns.narrow(-1, 0, joined.own)
    return wrap(columns, layout.having({-1: joined}, 0))


def _four(
    kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1
) -> list[list[int]]:
    return [each(value, 2) for value in (kernel_size, dilation, padding, stride)]


@rule("fold")
def _fold(
    func: Func,
    x: Any,
    output_size: Any,
    kernel_size: Any,
    dilation: Any = 1,
    padding: Any = 0,
    stride: Any = 1,
) -> Any:
    """Add columns at their places, as a transposed convolution of one kernel per entry does."""
    kernel, d, p, s = _four(kernel_size, dilation, padding, stride)
    size, each_kernel = each(output_size, 2), prod(kernel)
    reach = [a * (k - 1) + 1 for a, k in zip(d, kernel, strict=True)]
    counts = [(size[i] + 2 * p[i] - reach[i]) // s[i] + 1 for i in (0, 1)]
    more = [size[i] - ((counts[i] - 1) * s[i] - 2 * p[i] + reach[i]) for i in (0, 1)]
    if -1 not in x.grid_layout.by_dim:
        raise refused("fold of split channels or images")
    images = x.unflatten(-1, counts)
    channels = images.shape[-3] // each_kernel
    places = torch.eye(each_kernel, dtype=x.dtype, device=x.device).view(-1, 1, *kernel)
    weight = places.repeat(channels, 1, 1, 1)
    return _conv_transpose(F.conv_transpose2d, images, weight, None, s, p, more, channels, d)
