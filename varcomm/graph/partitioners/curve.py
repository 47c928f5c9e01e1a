"""The Hilbert curve: numbers for cells of a cube, so that consecutive numbers are neighbours."""

from __future__ import annotations

from itertools import pairwise

import torch

__all__ = ["MOST_COORDINATES", "bits_of", "hilbert_index", "hilbert_keys"]

# A number must fit into the 63 bits of a non-negative int64, with one bit a coordinate at least.
MOST_COORDINATES = 63

# Rows at a time: what a step works on then stays in a core's own cache, which is five times as fast
# as reading all rows from memory at each of the hundreds of steps.
_ROWS = 1 << 15


def bits_of(coordinates: int) -> int:
    """Return how many bits of each coordinate a number holds.

    >>> [bits_of(coordinates) for coordinates in (1, 2, 3, 4)]
    [52, 31, 21, 15]
    """
    # one coordinate: what a float64 distinguishes
    return min(63 // coordinates, 52)


def hilbert_keys(pos: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return where along the Hilbert curve each position lies.

    The curve fills the smallest cube at `low` that holds all positions, in ``2 ** bits_of(D)``
    steps along each side.

    Parameters
    ----------
    pos : torch.Tensor
        Finite positions, of shape (n, D) with D in 1...63; any dtype of real numbers.
    low, high : torch.Tensor
        The least and the greatest of each coordinate, of all positions, float64 of shape (D,).

    Returns
    -------
    torch.Tensor
        int64 of shape (n,), non-negative, exact. It depends on nothing but the row, `low` and
        `high`, bit for bit.

    Examples
    --------
    >>> pos = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, 0.0]])
    >>> keys = hilbert_keys(pos, torch.zeros(2).double(), torch.ones(2).double())
    >>> keys.argsort()
    tensor([0, 1, 2, 3])
    """
    bits = bits_of(pos.shape[1])
    # Halves: the difference of two float64 can be infinite, that of their halves cannot.
    low = low * 0.5
    side = (high * 0.5 - low).amax().clamp(min=torch.finfo(torch.float64).tiny)
    dtype = torch.int32 if bits < 32 else torch.int64
    keys = torch.empty(len(pos), dtype=torch.int64, device=pos.device)
    for rows, key in zip(pos.split(_ROWS), keys.split(_ROWS), strict=True):
        cells = ((rows.double() * 0.5 - low) / side).mul_(2.0**bits)
        key.copy_(hilbert_index(cells.clamp_(max=2.0**bits - 1).to(dtype), bits))
    return keys


def hilbert_index(cells: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the number of each cell of a cube of ``2 ** bits`` cells a side along the curve.

    Parameters
    ----------
    cells : torch.Tensor
        Integers in ``0...2 ** bits - 1``, int32 or int64 of shape (n, D).
    bits : int
        At least 1, and ``bits * D`` at most 63.

    Returns
    -------
    torch.Tensor
        int64 of shape (n,): each of ``0...2 ** (bits * D) - 1`` for one cell, and cells of
        consecutive numbers share a face.

    Notes
    -----
    J. Skilling's algorithm [1]_, on all cells at once. The parity of higher bits is taken by
    doubling, and bits are interleaved by doubling as well.

    References
    ----------
    .. [1] J. Skilling, "Programming the Hilbert curve", AIP Conference Proceedings 707 (2004),
       381-387.

    Examples
    --------
    >>> hilbert_index(torch.tensor([[0, 0], [0, 1], [1, 1], [1, 0]]), bits=1)
    tensor([0, 1, 2, 3])
    """
    axes = list(cells.T.clone(memory_format=torch.contiguous_format))
    first, last = axes[0], axes[-1]
    top = 31 if cells.dtype == torch.int32 else 63
    for bit in range(bits - 1, 0, -1):
        lower = (1 << bit) - 1
        for axis in axes:
            # Where the bit is set, the lower bits of the first axis are inverted; where it is not,
            # they change places with those of this axis.
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
