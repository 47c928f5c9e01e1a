"""Rules of functions that change the number of rows: interpolation, adaptive pools, shuffles."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from varcomm.grid.fetch import rows, span
from varcomm.grid.field import plain, refused, rule, wrap
from varcomm.grid.layout import Split
from varcomm.grid.reductions import extreme, mean
from varcomm.grid.windows import cut, each, in_parts, kept, spatial

Func = Callable[..., Any]

_CUBIC = -0.75


def _taps(out: Tensor, rows: int, ratio: float, mode: str, align: bool) -> tuple[Tensor, Tensor]:
    """Return the rows that outputs read, and the weights of these: (outputs, taps).

    `out` has the outputs in fp64, and `ratio` is the distance in rows between two of them. As
    torch's ``upsample`` kernels.
    """
    if mode.startswith("nearest"):  # torch has a scale of fp32 for all dtypes
        ratio = torch.tensor(ratio, dtype=torch.float32, device="cpu").item()
        at = out.float() * ratio if mode == "nearest" else ((out + 0.5) * ratio).float()
        return at.long().clamp_max(rows - 1)[:, None], torch.ones_like(out)[:, None]
    at = out * ratio if align else (out + 0.5) * ratio - 0.5
    if mode == "linear":
        at = at.clamp_min(0)
        low = at.floor().clamp_max(rows - 1)
        t = at - low
        places = torch.stack([low, (low + 1).clamp_max(rows - 1)], 1)
        return places.long(), torch.stack([1 - t, t], 1)
    low = at.floor()
    t = at - low

    def near(d: Tensor) -> Tensor:
        return ((_CUBIC + 2) * d - (_CUBIC + 3)) * d * d + 1

    def far(d: Tensor) -> Tensor:
        return ((_CUBIC * d - 5 * _CUBIC) * d + 8 * _CUBIC) * d - 4 * _CUBIC

    places = torch.stack([low - 1, low, low + 1, low + 2], 1).long().clamp(0, rows - 1)
    return places, torch.stack([far(t + 1), near(t), near(1 - t), far(2 - t)], 1)


@rule("interpolate")
def _interpolate(
    func: Func,
    input: Any,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Any:
    """Interpolate along split dimensions by weights of rows, along the others by torch."""
    name = func.__name__
    if antialias:
        raise refused("interpolate with antialias=True")
    dims = input.dim() - 2
    old = input.shape[-dims:]
    scales = each(scale_factor, dims) if scale_factor is not None else [None] * dims
    new = (
        [math.floor(n * float(s)) for n, s in zip(old, scales, strict=True)]
        if size is None
        else [*each(size, dims)]
    )
    if recompute_scale_factor:
        scales = [None] * dims
    if mode == "area":
        return _adaptive(input, new, "avg")
    kind = {"bilinear": "linear", "trilinear": "linear", "bicubic": "cubic"}.get(mode, mode)
    for at, (n, m, scale) in enumerate(zip(old, new, scales, strict=True)):
        if n == m and scale not in (None, 1):
            if kind not in ("linear", "nearest"):
                raise refused(f"interpolate with mode {mode!r} and a scale that keeps {n} rows")
            scales[at] = 1  # torch copies rows then
    if [*old] == new:
        return input.clone()
    align = bool(align_corners)
    local, splits = plain(input), dict(input.grid_layout.by_dim)
    later: list[Callable[[Tensor], Tensor]] = []
    for dim, split in spatial(name, input, dims).items():
        n, m, scale = old[dim], new[dim], scales[dim]
        if n == m:
            continue
        if align and kind in ("linear", "cubic"):
            ratio = (n - 1) / (m - 1) if m > 1 else 0.0
        else:
            ratio = n / m if scale is None else 1.0 / float(scale)
        local, splits[dim], weighted = _fetched(local, split, m, ratio, kind, align)
        if m <= n:
            local = weighted(local)
        else:  # after the rows of other dimensions have travelled
            later.append(weighted)
    for weighted in later:
        local = weighted(local)
    left = [dim for dim in range(-dims, 0) if dim not in input.grid_layout.by_dim]
    if any(new[dim] != old[dim] or scales[dim] not in (None, 1) for dim in left):
        target = [
            local.shape[d] if d in input.grid_layout.by_dim else new[d] for d in range(-dims, 0)
        ]
        how = {} if align_corners is None else {"align_corners": align_corners}
        if size is None and not recompute_scale_factor:
            factors = tuple(
                1.0 if d in input.grid_layout.by_dim else float(scales[d] or 1)
                for d in range(-dims, 0)
            )
            out = F.interpolate(_one(local, dims), scale_factor=factors, mode=mode, **how)
        else:
            target = [max(n, 1) for n in target]
            out = F.interpolate(_one(local, dims), size=target, mode=mode, **how)
        local = out
    return kept(local, input.grid_layout.having(splits, 0))


def _one(x: Tensor, dims: int) -> Tensor:
    """Return a tensor that has a row along the last dimensions, which torch's kernels ask for."""
    if x.numel():
        return x
    return F.pad(x, [n for size in reversed(x.shape[-dims:]) for n in (0, int(size == 0))])


def _fetched(
    x: Tensor, split: Split, count: int, ratio: float, mode: str, align: bool
) -> tuple[Tensor, Split, Callable[[Tensor], Tensor]]:
    """Return the rows that outputs read, the split of outputs, and how these are computed."""
    out = split.resized(cut(split, count, lambda row: -(-row * count // max(split.rows, 1))))
    how = split.rows, ratio, mode, align
    ends = torch.tensor(
        [(a, max(a, b - 1)) for a, b in out.spans], dtype=torch.float64, device="cpu"
    )
    at_ends = _taps(ends.flatten(), *how)[0]
    reads = at_ends[:, [0, -1]].view(-1, 4).tolist()
    spans = [(r[0], r[3] + 1) if n else (0, 0) for r, n in zip(reads, out.sizes, strict=True)]
    parts = [[reach] for reach in spans]
    if ratio > at_ends.shape[1]:  # some rows are not read
        every = _taps(torch.arange(count, dtype=torch.float64, device="cpu"), *how)[0]
        parts = [
            in_parts(reach, own, every[a:b].flatten().tolist())
            for reach, own, (a, b) in zip(spans, split.spans, out.spans, strict=True)
        ]
    local, (low, _) = rows(x, split, parts), spans[out.group.rank]
    own = torch.arange(out.own, dtype=torch.float64, device=x.device)
    places, weights = _taps(own + out.start, *how)
    dim = x.dim() + split.dim

    def weighted(local: Tensor) -> Tensor:
        found = None
        for tap in range(places.shape[1]):
            read = local.index_select(dim, places[:, tap] - low)
            if places.shape[1] > 1:
                read = read * weights[:, tap].to(read.dtype).view(-1, *[1] * (-1 - split.dim))
            found = read if found is None else found + read
        assert found is not None
        return found

    return local, out, weighted


@rule(
    "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d",
    "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d",
)
def _adaptive_pool(func: Func, input: Any, output_size: Any, return_indices: bool = False) -> Any:
    name = func.__name__
    if return_indices:
        raise refused(f"{name} with return_indices=True")
    dims, kind = int(name[-2]), name[9:12]
    sizes = [*each(output_size, dims)]
    old = input.shape[-dims:]
    return _adaptive(input, [o if n is None else n for n, o in zip(sizes, old, strict=True)], kind)


def _adaptive(x: Any, new: list[int], kind: str) -> Any:
    """Average, or take the largest, over the rows of each of `new` bins."""
    dims = len(new)
    for dim, split in spatial("adaptive pooling", x, dims).items():
        count = new[dim]
        if count == 1:  # whole on every rank, as a classifier behind it needs
            average = kind == "avg"
            x = mean(torch.mean, x, dim, True) if average else extreme(torch.amax, x, dim, True)
            continue
        n = split.rows
        bins = [(i * n // count, -(-(i + 1) * n // count)) for i in range(count)]
        firsts = [low for low, _ in bins]
        out = split.resized(cut(split, count, lambda row, at=firsts: sum(f < row for f in at)))  # type: ignore[misc]
        spans = tuple((bins[a][0], bins[b - 1][1]) if b > a else (0, 0) for a, b in out.spans)
        local = span(plain(x), split, spans)
        (a, b), (start, _) = out.spans[out.group.rank], spans[out.group.rank]
        parts = [local.narrow(dim, low - start, high - low) for low, high in bins[a:b]]
        if kind == "avg":
            parts = [part.mean(dim, keepdim=True) for part in parts]
        else:
            parts = [part.max(dim, keepdim=True).values for part in parts]
        joined = torch.cat(parts, dim) if parts else local.narrow(dim, 0, 0)
        x = wrap(joined, x.grid_layout.having(x.grid_layout.by_dim | {dim: out}, 0))
    pool = getattr(F, f"adaptive_{kind}_pool{dims}d")
    local = plain(x)
    split_dims = x.grid_layout.by_dim
    target = [local.shape[d] if d in split_dims else new[d] for d in range(-dims, 0)]
    if target == [*local.shape[-dims:]]:
        return x
    out_ = pool(_one(local, dims), [max(n, 1) for n in target])
    return kept(out_, x.grid_layout)


@rule("pixel_shuffle pixel_unshuffle channel_shuffle")
def _shuffle(func: Func, x: Any, factor: int) -> Any:
    """Exchange channels for rows, which stay on their rank."""
    name = func.__name__
    spatial(name, x, 2)
    if name == "channel_shuffle":
        return wrap(func(plain(x), factor), x.grid_layout)
    lead = [*range(x.dim() - 3)]
    at = len(lead)
    if name == "pixel_shuffle":
        parts = x.unflatten(-3, (-1, factor, factor))
        order = [*lead, at, at + 3, at + 1, at + 4, at + 2]
        return parts.permute(order).flatten(-4, -3).flatten(-2)
    parts = x.unflatten(-1, (-1, factor)).unflatten(-3, (-1, factor))
    order = [*lead, at, at + 2, at + 4, at + 1, at + 3]
    return parts.permute(order).flatten(-5, -3)
