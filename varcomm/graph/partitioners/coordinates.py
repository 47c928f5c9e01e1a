"""Parts made of positions alone: pieces of a Hilbert curve, and boxes of a recursive bisection."""

from __future__ import annotations

import torch

from varcomm.graph.partitioners.curve import bits_of, hilbert_keys
from varcomm.graph.partitioners.shares import cuts_passed, starts_of_shares, summed
from varcomm.graph.partitioners.totals import Everyone

__all__ = ["by_bisection", "by_hilbert"]


def by_hilbert(
    pos: torch.Tensor, parts: int, everyone: Everyone, weight: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the part of each row: nodes along the Hilbert curve, cut into pieces of one weight.

    Parameters
    ----------
    pos : torch.Tensor
        This rank's positions, finite, of shape (n, D) with D in 1...63.
    parts : int
        How many pieces.
    everyone : Everyone
        Who holds positions. At least one must hold a row.
    weight : torch.Tensor, optional
        int64 of shape (n,), non-negative; None is 1 for each row. On all ranks or on none.

    Returns
    -------
    torch.Tensor
        int64 of shape (n,).
    """
    box = torch.zeros(len(pos), dtype=torch.int64, device=pos.device)
    low, high = _bounds(pos, box, 1, everyone)
    total = everyone.total(summed(box, 1, weight))
    shares = torch.arange(1, parts, device=pos.device)
    cuts = starts_of_shares(total, torch.tensor(parts, device=pos.device), shares)
    keys = hilbert_keys(pos, low[0], high[0])
    bits = bits_of(pos.shape[1]) * pos.shape[1]
    return cuts_passed(keys, bits, box, cuts, torch.zeros_like(cuts), everyone, weight)


def by_bisection(
    pos: torch.Tensor, parts: int, everyone: Everyone, weight: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the part of each row: boxes cut in two across their widest extent, again and again.

    All boxes of a level are cut at once. Arguments and result are those of :func:`by_hilbert`, for
    any number of coordinates.
    """
    device = pos.device
    owner = torch.zeros(len(pos), dtype=torch.int64, device=device)  # the first part of its box
    boxes = [(0, parts)]
    while boxes := [(first, count) for first, count in boxes if count > 1]:
        firsts, counts = torch.tensor(boxes, device=device).unbind(1)
        number = torch.full((parts,), -1, device=device)
        number[firsts] = torch.arange(len(boxes), device=device)
        box = number[owner]
        all_of_them = int(counts.sum()) == parts
        rows = slice(None) if all_of_them else (box >= 0).nonzero().view(-1)
        box, here = box[rows], None if weight is None else weight[rows]
        keys, bits = _keys_of_widest(pos[rows], box, len(boxes), everyone)
        halves = counts // 2
        total = everyone.total(summed(box, len(boxes), here))
        cuts = starts_of_shares(total, counts, halves)
        numbers = torch.arange(len(boxes), device=device)
        behind = cuts_passed(keys, bits, box, cuts, numbers, everyone, here)
        owner[rows] += behind.mul_(halves[box])
        boxes = [
            half
            for first, count in boxes
            for half in ((first, count // 2), (first + count // 2, count - count // 2))
        ]
    return owner


def _keys_of_widest(
    pos: torch.Tensor, box: torch.Tensor, boxes: int, everyone: Everyone
) -> tuple[torch.Tensor, int]:
    """Return keys, and their bits, in the order of coordinates along the widest extent of a box."""
    low, high = _bounds(pos, box, boxes, everyone)
    # Halves: the difference of two float64 can be infinite, that of their halves cannot.
    axis = (high * 0.5 - low * 0.5).argmax(1, keepdim=True)
    least, greatest = (_in_order(bound.gather(1, axis).view(-1)) for bound in (low, high))
    # A box without rows has bounds the other way round.
    extents = zip(least.tolist(), greatest.tolist(), strict=True)
    bits = max(max(end - start, 1).bit_length() for start, end in extents)
    keys = _in_order(pos.gather(1, axis[box]).view(-1).double())
    return keys.sub_(least[box]), bits


def _in_order(x: torch.Tensor) -> torch.Tensor:
    """Return float64 as int64 in the same order: their bits, those of negative ones inverted."""
    bits = (x + 0.0).view(torch.int64)  # of -0.0 makes 0.0, which is the same number
    return bits.bitwise_xor_((bits >> 63).bitwise_and_((1 << 63) - 1))


def _bounds(
    pos: torch.Tensor, box: torch.Tensor, boxes: int, everyone: Everyone
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least and the greatest coordinates in each box, float64 of shape (boxes, D)."""
    nothing = torch.full((boxes,), torch.inf, dtype=torch.float64, device=pos.device)
    least, greatest = [], []
    for column in pos.unbind(1):
        wide = column.double()
        least.append(nothing.scatter_reduce(0, box, wide, "amin"))
        greatest.append((-nothing).scatter_reduce(0, box, wide, "amax"))
    bounds = everyone.least(torch.stack([*least, *(-bound for bound in greatest)], dim=1))
    low, high = bounds.chunk(2, dim=1)
    return low, -high
