"""Rules of Fourier transforms: rows are transposed to another dimension, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from varcomm.grid.field import dims_of, filled, place_of, plain, refused, rule, split_of, wrap
from varcomm.grid.shapes import roll
from varcomm.ops.all_to_all_v import transpose_v
from varcomm.sizes import ShardSizes

Func = Callable[..., Any]


@rule("fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft")
def _fft(func: Func, input: Any, n: int | None = None, dim: int = -1, norm: Any = None) -> Any:
    at = place_of(dim, input.dim())
    if n is not None:  # rows behind those that are read do not travel
        half = func.__name__ in ("fft_irfft", "fft_hfft")
        input = input.narrow(at, 0, min(input.shape[at], n // 2 + 1 if half else n))
    x, split = plain(input), split_of(input, at, func.__name__)
    if split is None:
        return wrap(_some(func, x, n, at, norm), input.grid_layout)
    group, others = split.group, [d for d in range(x.dim()) if split_of(input, d) is None]
    if not others:
        raise refused(f"{func.__name__} of a field without another dimension", "unsqueeze(0) it.")
    other = max(others, key=lambda d: x.shape[d])
    parts = ShardSizes.balanced(x.shape[other], group.size)
    x = transpose_v(x, other, parts, at, split.sizes, group.process_group)
    x = _some(func, x, n, at, norm)
    count = x.shape[at]
    out = split.ending(end * count // max(split.rows, 1) for end in split.offsets)
    x = transpose_v(x, at, out.sizes, other, parts, group.process_group)
    return wrap(x, input.grid_layout.replacing(out))


def _some(func: Func, x: Tensor, n: int | None, dim: int, norm: Any) -> Tensor:
    """Transform also a tensor without elements, which torch refuses."""
    if x.numel() or not x.shape[dim]:
        transformed: Tensor = func(x, n, dim, norm)
        return transformed
    out: Tensor = func(filled(x, range(-x.dim(), 0)), n, dim, norm)
    for at, size in enumerate(x.shape):
        out = out.narrow(at, 0, 0) if size == 0 else out
    return out


@rule("fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_fftn fft_ifftn fft_rfftn fft_irfftn")
def _fftn(func: Func, input: Any, s: Any = None, dim: Any = None, norm: Any = None) -> Any:
    name = func.__name__.removeprefix("fft_")
    if dim is None:
        dim = range(-(2 if name.endswith("2") else input.dim() if s is None else len(s)), 0)
    if not isinstance(dim, int) and not len(dim):
        raise refused(f"{func.__name__} of no dimension")
    dims = dims_of(dim, input)
    lengths = [*s] if s is not None else [None] * len(dims)
    lengths = [None if n == -1 else n for n in lengths]
    steps = [*zip(dims, lengths, strict=True)]
    inverse, real = "i" in name[:2], "r" in name[:2]
    one = torch.fft.ifft if inverse else torch.fft.fft
    if real and not inverse:
        input = _fft(torch.fft.rfft, input, steps[-1][1], steps[-1][0], norm)
    for at, n in steps[: len(steps) - real]:
        input = _fft(one, input, n, at, norm)
    if real and inverse:
        input = _fft(torch.fft.irfft, input, steps[-1][1], steps[-1][0], norm)
    return input


@rule("fft_fftshift fft_ifftshift")
def _fftshift(func: Func, input: Any, dim: Any = None) -> Any:
    dims = range(input.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    sign = -1 if func.__name__ == "fft_ifftshift" else 1
    shifts = [sign * (input.shape[d] // 2) for d in dims]
    return roll(torch.roll, input, shifts, [*dims])
