"""Hilbert curve: cells of a cube in an order in which consecutive cells are neighbours."""

from __future__ import annotations

from itertools import pairwise

import torch

__all__ = ["MOST_COORDINATES", "bits_of", "hilbert_index", "hilbert_keys"]

# A position on the curve has 63 bits, at least one per coordinate.
MOST_COORDINATES = 63

# Rows at a time, so that the hundreds of steps read from a core's cache: five times as fast.
_ROWS = 1 << 15


def bits_of(coordinates: int) -> int:
    """Return the bits per coordinate of a position on the curve."""
    # 52: the precision of a float64
    return min(63 // coordinates, 52)


def hilbert_keys(pos: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return the place of each position along the Hilbert curve.

    The curve fills the smallest cube at `low` that holds all finite positions, (n, D) with D in
    1...63, in ``2 ** bits_of(D)`` steps per side. `low` and `high` are the bounds of all positions,
    float64 of shape (D,). A key depends on the row, `low` and `high` alone.
    """
    bits = bits_of(pos.shape[1])
    # halves, because the difference of two float64 can be infinite
    low = low * 0.5
    side = (high * 0.5 - low).amax().clamp(min=torch.finfo(torch.float64).tiny)
    dtype = torch.int32 if bits < 32 else torch.int64
    keys = torch.empty(len(pos), dtype=torch.int64, device=pos.device)
    for rows, key in zip(pos.split(_ROWS), keys.split(_ROWS), strict=True):
        cells = ((rows.double() * 0.5 - low) / side).mul_(2.0**bits)
        key.copy_(hilbert_index(cells.clamp_(max=2.0**bits - 1).to(dtype), bits))
    return keys


def hilbert_index(cells: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the place along the curve of cells of a cube with ``2 ** bits`` cells per side.

    `cells` holds integers in ``0...2 ** bits - 1``, int32 or int64, (n, D), and ``bits * D``
    is at most 63. The places ``0...2 ** (bits * D) - 1`` are int64 of shape (n,); consecutive cells
    share a face. J. Skilling's algorithm, "Programming the Hilbert curve", AIP Conference
    Proceedings 707 (2004), vectorized over cells.
    """
    axes = list(cells.T.clone(memory_format=torch.contiguous_format))
    first, last = axes[0], axes[-1]
    top = 31 if cells.dtype == torch.int32 else 63
    for bit in range(bits - 1, 0, -1):
        lower = (1 << bit) - 1
        for axis in axes:
            # a set bit inverts the lower bits of the first axis, a zero swaps them with this axis
            is_set = (axis << (top - bit)).bitwise_right_shift_(top)
            change = (first ^ axis).bitwise_or_(is_set).bitwise_and_(lower)
            first.bitwise_xor_(change)
            axis.bitwise_xor_(change.bitwise_and_(is_set.bitwise_not_()))
    for before, axis in pairwise(axes):  # a Gray code
        axis.bitwise_xor_(before)
    parity = last >> 1  # of all higher bits of the last axis
    step = 1
    while step < bits:
        parity.bitwise_xor_(parity >> step)
        step *= 2
    number = torch.zeros(len(cells), dtype=torch.int64, device=cells.device)
    for axis in axes:
        number <<= 1
        number |= _spread(axis.bitwise_xor_(parity).to(torch.int64), bits, len(axes))
    return number


def _spread(x: torch.Tensor, bits: int, stride: int) -> torch.Tensor:
    """Move bit i of each value to bit ``i * stride``, in halves of halves."""
    width = 1 << (bits - 1).bit_length()
    while width > 1:
        width //= 2
        mask = sum(((1 << width) - 1) << (at * stride) for at in range(0, bits, width))
        x = (x | (x << (width * (stride - 1)))).bitwise_and_(mask & ((1 << 63) - 1))
    return x
