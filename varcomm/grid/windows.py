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
from varcomm.grid.fetch import rows, start_rows
from varcomm.grid.field import by_body, filled, place_of, plain, refused, rule, split_of, wrap
from varcomm.grid.layout import Layout, Span, Spans, Split
from varcomm.ops.handle import Handle

Func = Callable[..., Any]
Parts = list[Span]


def cut(split: Split, count: int, first: Callable[[int], int]) -> Split:
    """Return the split of `count` outputs; each belongs to the owner of its first input row.

    ``first(row)`` is the first output that begins at an input row or behind it. Rows that padding
    put before the field belong to the outputs behind them.
    """
    ends = [min(count, max(0, first(end - split.lead))) for end in split.offsets]
    ends[0], ends[-1] = 0, count
    return split.ending(ends)


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
        out = cut(split, count, lambda row: -(-row // self.stride))
        return out, tuple(self.reads(a, b) if b > a else (0, 0) for a, b in out.spans)

    def reads(self, first: int, last: int) -> Span:
        """Return the rows that outputs read, from one to behind another."""
        low = first * self.stride - self.before
        return low, low + (last - first - 1) * self.stride + self.reach


def in_parts(reach: Span, owned: Span, read: Iterable[int]) -> Parts:
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
    if abs(taps.step) == 1 and len(taps) >= max(up, down):
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
    splits = (split_of(x, split.dim, name) for split in x.grid_layout.splits if split.dim >= -dims)
    return {split.dim: split for split in splits if split is not None}


def windows_of(
    dims: int, kernel: Any, stride: Any, padding: Any, dilation: Any = 1, ceil: bool = False
) -> list[Window]:
    """Return the windows along each dimension; padding may differ before and behind, in pairs."""
    kernels = each(kernel, dims)
    pads = [p if isinstance(p, tuple) else (p, p) for p in each(padding, dims)]
    strides = kernels if stride is None or stride in ([], ()) else each(stride, dims)
    return [
        Window(k, s, before, behind, d, ceil)
        for k, s, (before, behind), d in zip(
            kernels, strides, pads, each(dilation, dims), strict=True
        )
    ]


def slab(x: Tensor, window: Window, split: Split, fill: float = 0.0) -> tuple[Tensor, Split]:
    """Return the rows that windows of this rank read, with padding, and the split of outputs.

    A rank without outputs gets one window of zeros, whose output :func:`kept` drops.
    """
    out, spans = window.read(split)
    low, high = spans[split.group.rank]
    sides = [0, 0] if high > low else [0, window.reach]
    if fill:  # rows outside of the field are zeros
        n = split.rows
        sides = [max(0, -low), max(0, high - n)] if high > low else sides
        spans = tuple((min(max(a, 0), n), max(0, min(b, n))) for a, b in spans)
    first, reach = -window.before, window.dilation * window.kernel
    taps = range(first, first + reach, window.dilation)
    x = rows(x, split, _needed(spans, split.spans, out.spans, taps, up=window.stride))
    if any(sides):
        x = F.pad(x, [0, 0] * (-1 - split.dim) + sides, value=fill if high > low else 0.0)
    return x, out


def slabs(
    name: str, x: Any, windows: Sequence[Window], fill: float = 0.0, halo: _Halo | None = None
) -> tuple[Tensor, Layout, list[tuple[int, int]]]:
    """Return the slab along each split dimension, and the layout of the outputs.

    Also the padding that is left to torch's function, along the other dimensions. Along the
    dimension of `halo` the rows are left as they are.
    """
    local, layout = plain(x), x.grid_layout
    left = [(window.before, window.behind) for window in windows]
    for dim, split in spatial(name, x, len(windows)).items():
        if halo is not None and halo.split.dim == dim:
            left[dim], out = (halo.zeros, halo.zeros), halo.out
        else:
            left[dim] = (0, 0)
            local, out = slab(local, windows[dim], split, fill)
        layout = layout.replacing(out)
    return local, layout, left


def kept(out: Tensor, layout: Layout) -> Any:
    """Return a result without the output of a rank that has none."""
    for split in layout.splits:
        if split.repeats == 1 and out.shape[split.dim] != split.own:
            out = out.narrow(split.dim, 0, split.own)
    return wrap(out, layout)


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
    dims, kernels = weight.dim() - 2, [*weight.shape[2:]]
    if padding == "same":
        if any(s != 1 for s in each(stride, dims)):
            raise ArgumentError(f"{func.__name__}: padding='same' needs stride=1.")
        more = [d * (k - 1) for d, k in zip(each(dilation, dims), kernels, strict=True)]
        padding = [(n // 2, n - n // 2) for n in more]
    windows = windows_of(dims, kernels, stride, 0 if padding == "valid" else padding, dilation)
    weight, bias = plain(weight), plain(bias)
    halo = _halo(input, windows)
    local, layout, left = slabs(func.__name__, input, windows, halo=halo)
    handle = None if halo is None or not any(halo.spans) else halo.start(local)
    sides = [before for before, _ in left]
    if sides != [behind for _, behind in left]:
        local = F.pad(local, [n for pair in reversed(left) for n in pair])
        sides = [0] * dims

    def outputs(x: Tensor, weight: Tensor, bias: Tensor | None, sides: list[int]) -> Any:
        return func(x, weight, bias, stride, sides, dilation, groups)

    out = outputs(local, weight, bias, sides)
    if halo is not None and handle is not None:
        sides[halo.split.dim] = 0
        out = halo.added(out, handle.wait(), weight, lambda x, w: outputs(x, w, None, sides))
    return kept(out, layout)


@dataclass(frozen=True)
class _Halo:
    """A convolution of own rows, which zeros follow, and one of the other ranks' rows.

    The first runs while the rows of other ranks travel; the second is added to its outputs at the
    borders. Otherwise a rank would copy all its rows behind its halo, and keep the copy for
    backward.
    """

    window: Window
    split: Split
    out: Split
    zeros: int  # before and behind this rank's rows
    spans: tuple[tuple[Span, ...], ...]  # of each rank, before and behind its rows

    def start(self, x: Tensor) -> Handle:
        """Start to fetch the rows of other ranks."""
        return start_rows(x, self.split, self.spans)

    def added(
        self, out: Tensor, rows: Tensor, weight: Tensor, outputs: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Add what other ranks' rows contribute; ``outputs(rows, weight)`` computes some."""
        window, dim, spans = self.window, self.split.dim, self.spans[self.split.group.rank]
        parts, places = [], []
        for part, (first, _) in zip(rows.split([b - a for a, b in spans], dim), spans, strict=True):
            before, reached = first < self.split.start, part.shape[dim] - 1
            taps = min(reached // window.dilation + 1, window.kernel)
            count = min(reached // window.stride + 1, self.out.own)
            last = (count - 1) * window.stride + (taps - 1) * window.dilation
            more = [0, last - reached] if before else [last - reached, 0]
            taps_from = 0 if before else window.kernel - taps
            part = F.pad(part, [0, 0] * (-1 - dim) + more) if last != reached else part
            parts.append(outputs(part, weight.narrow(dim, taps_from, taps)))
            places.append(0 if before else self.out.own - count)
        if not parts:  # by which this rank takes part in backward
            parts, places = [rows.sum().to(out.dtype).expand(out.narrow(dim, 0, 0).shape)], [0]
        return _Added.apply(out, dim, places, *parts)  # type: ignore[no-untyped-call, no-any-return]


class _Added(torch.autograd.Function):
    """Rows added in place. Torch's own function would copy the whole gradient in backward."""

    @staticmethod
    def forward(out: Tensor, dim: int, places: list[int], *parts: Tensor) -> Tensor:
        for at, part in zip(places, parts, strict=True):
            out.narrow(dim, at, part.shape[dim]).add_(part)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _: Tensor) -> None:
        out, dim, places, *parts = inputs
        ctx.spans = [(dim, at, part.shape[dim]) for at, part in zip(places, parts, strict=True)]
        ctx.mark_dirty(out)

    @staticmethod
    def backward(ctx: Any, of: Tensor) -> tuple[Tensor | None, ...]:
        return of, None, None, *[of.narrow(*span) for span in ctx.spans]

    @staticmethod
    def jvp(ctx: Any, of: Tensor, _: None, __: None, *of_parts: Tensor) -> Tensor:
        for span, part in zip(ctx.spans, of_parts, strict=True):
            of.narrow(*span).add_(part)
        return of


_LARGE = 1 << 17  # elements of a rank from which on a copy of them costs more than three calls


def _halo(x: Any, windows: Sequence[Window]) -> _Halo | None:
    """Return the halo along the first split dimension that has one.

    None on all ranks if some rank has few outputs, if own rows would need other numbers of zeros
    before and behind them, if another dimension has other padding before than behind, if the field
    is small, or if outputs are narrow: the sum of two parts would be rounded twice.
    """
    is_narrow = x.dtype.itemsize < 4 or torch.is_autocast_enabled(x.device.type)
    if is_narrow or prod(x.shape) < _LARGE * x.grid_layout.ranks:
        return None
    for split in x.grid_layout.splits:
        if split.dim < -len(windows):
            continue
        window = windows[split.dim]
        out, reads = window.read(split)
        if reads == split.spans:
            continue
        if any(w.before != w.behind for w in windows if w is not window):
            return None
        zeros, spans = [], []
        for (a, b), (low, high), (first, end) in zip(out.spans, reads, split.spans, strict=True):
            own = Window(window.kernel, window.stride, first - low, first - low, window.dilation)
            if b - a < window.reach or low > first or own.outputs(end - first) < b - a:
                return None
            zeros.append(first - low)
            # rows outside of the field are zeros, as those that own rows have beside them
            before = low, min(first, high) if first > 0 else low
            behind = max(low, end), high if end < split.rows else 0
            spans.append(tuple((i, j) for i, j in (before, behind) if i < j))
        reached = window.kernel if window.dilation == 1 else 1
        if window.stride > reached and any(spans):
            return None  # rows that no output reads would travel
        return _Halo(window, split, out, zeros[split.group.rank], tuple(spans))
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
    local, layout, takes = plain(input), input.grid_layout, []
    for dim, split in spatial(func.__name__, input, dims).items():
        s, p, n = strides[dim], pads[dim], split.rows
        reach = steps[dim] * (weight.shape[dim] - 1)
        count = (n - 1) * s - 2 * p + reach + more[dim] + 1
        if count < 1:
            raise ArgumentError(f"{func.__name__}: {n} rows and padding of {p} have no output.")
        out = cut(split, count, lambda row, s=s: row * s)  # type: ignore[misc]
        spans = tuple(
            (min(-(-(a + p - reach) // s), (a + p) // s), (b - 1 + p) // s + 1) if b > a else (0, 0)
            for a, b in out.spans
        )
        taps = range(p, p - reach - 1, -steps[dim])
        local = rows(local, split, _needed(spans, split.spans, out.spans, taps, down=s))
        low, high = spans[out.group.rank]
        pads[dim] = more[dim] = 0
        skipped, have = out.start + p - low * s, (high - low - 1) * s + reach + 1
        if out.own:
            more[dim] = max(0, skipped + out.own - have)
        takes.append((dim, skipped if out.own else 0, out.own))
        layout = layout.replacing(out)
    local = filled(local, [dim for dim, *_ in takes])
    result = func(local, weight, bias, strides, pads, more, groups, dilation)
    for take in takes:
        result = result.narrow(*take)
    return wrap(result, layout)


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
    windows = windows_of(int(name[8]), kernel_size, stride, padding, dilation, ceil_mode)
    lowest = -inf if input.is_floating_point() else torch.iinfo(input.dtype).min
    local, layout, left = slabs(name, input, windows, lowest)
    strides, pads = [w.stride for w in windows], [before for before, _ in left]
    return kept(func(local, kernel_size, strides, pads, dilation, ceil_mode), layout)


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
    windows = windows_of(int(name[8]), kernel_size, stride, padding, 1, ceil_mode)
    local, layout, left = slabs(name, input, windows)
    strides, pads = [w.stride for w in windows], [before for before, _ in left]
    divisor = [] if divisor_override is None else [divisor_override]
    out = func(local, kernel_size, strides, pads, ceil_mode, count_include_pad, *divisor)
    if not divisor and (ceil_mode or not count_include_pad):
        for dim, split in spatial(name, input, len(windows)).items():
            window, own = windows[dim], layout.by_dim[dim]
            start = torch.arange(own.start, own.start + max(own.own, 1), device=out.device)
            start = start * window.stride - window.before
            stop = (start + window.kernel).clamp_max(split.rows + window.behind)
            if not count_include_pad:
                start, stop = start.clamp_min(0), stop.clamp_max(split.rows)
            inverse = (stop - start).to(out.dtype).reciprocal() * window.kernel
            out = out * inverse.view(-1, *[1] * (-1 - dim))
    return kept(out, layout)


rule("lp_pool1d lp_pool2d lp_pool3d")(by_body)


def _unfolded(x: Any, dim: int, window: Window) -> Any:
    """Return the rows of each window along a dimension, as a further dimension."""
    local, splits = plain(x), {d - 1: s for d, s in x.grid_layout.by_dim.items()}
    if (split := split_of(x, dim, "unfold")) is not None:
        local, splits[dim - 1] = slab(local, window, split)
    elif window.before or window.behind:
        local = F.pad(local, [0, 0] * (-1 - dim) + [window.before, window.behind])
    windows = local.unfold(dim, window.reach, window.stride)[..., :: window.dilation]
    return kept(windows, x.grid_layout.having(splits, 0))


@rule("unfold")
def _unfold(func: Func, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Return ``Tensor.unfold`` along one dimension, or the columns of ``F.unfold``."""
    if func is torch.Tensor.unfold:
        along = ("dimension", "size", "step")
        dim, size, step = (*args, *(kwargs[word] for word in along if word in kwargs))
        return _unfolded(x, place_of(dim, x.dim()) - x.dim(), Window(size, step, 0, 0))
    kernel, dilation, padding, stride = _four(*args, **kwargs)
    for window in windows_of(2, kernel, stride, padding, dilation):
        x = _unfolded(x, -2, window)
    return x.movedim((-2, -1), (-4, -3)).flatten(-5, -3).flatten(-2)


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
