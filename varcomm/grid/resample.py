"""Rules of functions that change the number of rows: interpolation, adaptive pools, shuffles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from varcomm.grid.fetch import rows
from varcomm.grid.field import by_body, filled, plain, refused, rule, wrap
from varcomm.grid.layout import Split
from varcomm.grid.windows import cut, each, in_parts, kept, spatial

Func = Callable[..., Any]

_CUBIC = -0.75


def _taps(
    out: Tensor, rows: int, count: int, ratio: float, mode: str, align: bool
) -> tuple[Tensor, Tensor]:
    """Return the rows that outputs read, and the weights of these: (outputs, taps).

    `out` has some of `count` outputs in fp64, and `ratio` is the distance in rows between two of
    them. As torch's ``upsample`` kernels, and its adaptive pools: averages ("avg") and "max".
    """
    if mode in ("avg", "max"):
        first, end = (out * rows / count).floor(), ((out + 1) * rows / count).ceil()
        longest = -(-rows // count) + (rows % count > 0)
        at = first[:, None] + torch.arange(longest, device=out.device)
        weights = (at < end[:, None]) / (end - first)[:, None]
        return at.minimum(end[:, None] - 1).long(), weights
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
def _interpolate(func: Func, x: Any, *args: Any, antialias: bool = False, **kwargs: Any) -> Any:
    if antialias:
        raise refused("interpolate with antialias=True")
    return by_body(func, x, *args, **kwargs)


@rule(
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_nearest_exact1d",
    "upsample_nearest_exact2d upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d",
    "upsample_trilinear3d upsample_bicubic2d",
)
def _upsample(func: Func, x: Any, size: Any, *how: Any) -> Any:
    """Interpolate along split dimensions by weights of rows, along the others by torch."""
    *align, scales = how
    dims, name, old = x.dim() - 2, func.__name__, x.shape[2:]
    kinds = {"nearest_exact": "nearest-exact", "nearest": "nearest", "linear": "linear"}
    kind = next((kind for word, kind in kinds.items() if word in name), "cubic")
    scales = [None] * dims if scales is None else [*map(float, scales)]
    new = [int(n * s) for n, s in zip(old, scales, strict=True)] if size is None else [*size]
    for at, (n, m, scale) in enumerate(zip(old, new, scales, strict=True)):
        if n == m and scale not in (None, 1):
            if kind not in ("linear", "nearest"):
                raise refused(f"interpolate with mode {kind!r} and a scale that keeps {n} rows")
            scales[at] = 1.0  # torch copies rows then
    if [*old] == new:
        return x.clone()
    local, layout, later = plain(x), x.grid_layout, []
    splits = spatial("interpolate", x, dims)
    for dim, split in splits.items():
        n, m, scale = old[dim], new[dim], scales[dim]
        if n == m:
            continue
        if any(align):
            ratio = (n - 1) / (m - 1) if m > 1 else 0.0
        else:
            ratio = n / m if scale is None else 1.0 / scale
        local, out, combined = _fetched(local, split, m, ratio, kind, any(align))
        layout = layout.replacing(out)
        if m <= n:
            local = combined(local)
        else:  # after the rows of other dimensions have travelled
            later.append(combined)
    for combined in later:
        local = combined(local)
    left = [dim for dim in range(-dims, 0) if dim not in splits]
    if any(new[dim] != old[dim] or scales[dim] not in (None, 1) for dim in left):
        local = filled(local, range(-dims, 0))
        if size is None:
            factors = [1.0 if dim in splits else scales[dim] or 1.0 for dim in range(-dims, 0)]
            local = func(local, None, *align, factors)
        else:
            target = [local.shape[d] if d in splits else new[d] for d in range(-dims, 0)]
            local = func(local, target, *align, None)
    return kept(local, layout)


def _fetched(
    x: Tensor, split: Split, count: int, ratio: float, mode: str, align: bool
) -> tuple[Tensor, Split, Callable[[Tensor], Tensor]]:
    """Return the rows that outputs read, the split of outputs, and how these are computed."""
    out = cut(split, count, lambda row: -(-row * count // max(split.rows, 1)))
    how = split.rows, count, ratio, mode, align
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

    def combined(local: Tensor) -> Tensor:
        found: Any = None
        for tap in range(places.shape[1]):
            read = local.index_select(dim, places[:, tap] - low)
            if mode == "max":
                larger = read.isnan() if found is None else (read > found) | read.isnan()
                found = read if found is None else torch.where(larger, read, found)
                continue
            if places.shape[1] > 1:
                weight = weights[:, tap].to(read.dtype).view(-1, *[1] * (-1 - split.dim))
                read = read * weight
                read = read.masked_fill(weight == 0, 0) if mode == "avg" else read  # of infinity
            found = read if found is None else found + read
        return found  # type: ignore[no-any-return]

    return local, out, combined


@rule(
    "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d",
    "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d",
)
def _adaptive_pool(func: Func, input: Any, output_size: Any, return_indices: bool = False) -> Any:
    """Average, or take the largest, over the rows of each output."""
    name = func.__name__
    if return_indices:
        raise refused(f"{name} with return_indices=True")
    dims, kind = int(name[-2]), name[9:12]
    x, old = input, input.shape[-dims:]
    new = [n if m is None else m for n, m in zip(old, each(output_size, dims), strict=True)]
    for dim, split in spatial(name, input, dims).items():
        if new[dim] == 1:  # whole on every rank, as a classifier behind it needs
            of = torch.mean if kind == "avg" else torch.amax
            x = of(x, dim, True)
            continue
        how = new[dim], split.rows / new[dim], kind, False
        local, out, combined = _fetched(plain(x), split, *how)
        x = wrap(combined(local), x.grid_layout.replacing(out))
    local, splits = plain(x), x.grid_layout.by_dim
    target = [local.shape[dim] if dim in splits else new[dim] for dim in range(-dims, 0)]
    if target == [*local.shape[-dims:]]:
        return x
    pooled = func(filled(local, range(-dims, 0)), [max(n, 1) for n in target])
    return kept(pooled, x.grid_layout)


@rule("pixel_shuffle pixel_unshuffle")
def _shuffle(func: Func, x: Any, factor: int) -> Any:
    """Exchange channels for rows, which stay on their rank."""
    name = func.__name__
    spatial(name, x, 2)
    lead = [*range(x.dim() - 3)]
    at = len(lead)
    if name == "pixel_shuffle":
        parts = x.unflatten(-3, (-1, factor, factor))
        order = [*lead, at, at + 3, at + 1, at + 4, at + 2]
        return parts.permute(order).flatten(-4, -3).flatten(-2)
    parts = x.unflatten(-1, (-1, factor)).unflatten(-3, (-1, factor))
    order = [*lead, at, at + 2, at + 4, at + 1, at + 3]
    return parts.permute(order).flatten(-5, -3)
