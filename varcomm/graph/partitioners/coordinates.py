"""Parts from positions and weights: pieces of a Hilbert curve, and boxes of a bisection."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from varcomm.errors import ArgumentError
from varcomm.graph.node_shard import as_tensor, described
from varcomm.ops.all_gather_v import all_gather_v
from varcomm.ops.all_reduce import all_reduce
from varcomm.ops.all_to_all_v import all_to_all_v
from varcomm.sizes import ShardSizes, holds_integers
from varcomm.transport.group import Group

# A position on the curve has 63 bits, at least one per coordinate, at most those of a float64.
_MOST_COORDINATES, _MOST_BITS = 63, 52

# Rows at a time, so that the hundreds of steps read from a core's cache: five times as fast.
_ROWS = 1 << 15

# Bits of a key per round of the radix selection: more bits are fewer rounds of more counts.
_DIGIT = 8


def checked_positions(pos: object, name: str, method: str, rows: int | None = None) -> torch.Tensor:
    """Return `pos` as (n, D) if it holds finite positions; `rows` is the expected n, if known."""
    if (
        not isinstance(pos, torch.Tensor)
        or pos.is_complex()
        or pos.dtype == torch.bool
        or pos.dim() not in (1, 2)
        or rows not in (None, len(pos))
        or pos.shape[1:].numel() == 0
    ):
        raise ArgumentError(
            f'method="{method}" needs {name}, a tensor of real numbers of shape '
            f"({'n' if rows is None else rows}, D), a row for each node; got {described(pos)}."
        )
    pos = pos.detach().view(len(pos), pos.shape[1:].numel())
    if method == "hilbert" and pos.shape[1] > _MOST_COORDINATES:
        raise ArgumentError(
            f'method="hilbert" accepts at most {_MOST_COORDINATES} coordinates; got '
            f'{pos.shape[1]}. Choose method="rcb".'
        )
    # a NaN makes both bounds NaN
    if pos.numel() and not bool(torch.stack(pos.aminmax()).isfinite().all()):
        row = int((~pos.isfinite()).any(1).nonzero()[0])
        raise ArgumentError(f"{name} must be finite; row {row} is {pos[row].tolist()}.")
    return pos


def checked_weight(weight: torch.Tensor, name: str, rows: int, row: str) -> torch.Tensor:
    """Return `weight` as int64, if it holds a non-negative integer per row: sums are exact."""
    weight = as_tensor(weight)
    if not (
        isinstance(weight, torch.Tensor)
        and holds_integers(weight)
        and weight.shape == (rows,)
        and (rows == 0 or int(weight.min()) >= 0)
    ):
        raise ArgumentError(
            f"{name} must be a tensor with a non-negative integer for each of the {rows} {row}; "
            f"got {described(weight)}. Scale and round it."
        )
    return weight.detach().to(torch.int64)


def check_sum(total: float, limit: float, name: str, least: float = 0.0) -> None:
    """Raise ArgumentError if a sum, possibly rounded, is out of range."""
    if not least <= total < limit:
        raise ArgumentError(
            f"{name} adds up to {total:.3g}, which must be at least {least:g} and below "
            f"{limit:.3g}. Scale all weights."
        )


@dataclass(frozen=True)
class AllRows:
    """Totals over the rows of all ranks, in rank order, or of one process that has all rows.

    All ranks pass tensors of one shape and dtype, and receive about twice their bytes.
    """

    group: Group | None = None

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks."""
        return x if self.group is None else all_reduce(x, group=self.group.process_group)

    def least(self, x: torch.Tensor) -> torch.Tensor:
        """Return the elementwise minimum over all ranks."""
        if self.group is None:
            return x
        size, pg = self.group.size, self.group.process_group
        columns = ShardSizes.balanced(x.numel(), size)
        mine = [columns[self.group.rank]] * size
        ranks = all_to_all_v(x.reshape(-1), columns, mine, group=pg).view(size, -1)
        return all_gather_v(ranks.amin(0), columns, group=pg).view(x.shape)

    def span(self, count: int) -> tuple[int, int]:
        """Return the number of rows on lower ranks, and on all ranks."""
        if self.group is None:
            return 0, count
        sizes = ShardSizes.from_local(count, self.group.process_group)
        return sizes.offsets[self.group.rank], sizes.total


def by_order(nodes: int, parts: int, weight: torch.Tensor | None) -> torch.Tensor:
    """Return the part of each node in the given order, on one process."""
    return _pieces(torch.zeros(nodes, dtype=torch.int64), 0, parts, AllRows(), weight)


def by_hilbert(
    pos: torch.Tensor, parts: int, rows: AllRows, weight: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the part of each row: pieces of equal weight along the Hilbert curve.

    `pos` holds finite positions, (n, D) with D in 1...63; `weight` non-negative int64 of
    shape (n,), on all ranks or on none. At least one rank has a row.
    """
    box = torch.zeros(len(pos), dtype=torch.int64, device=pos.device)
    low, high = _bounds(pos, box, 1, rows)
    keys = _hilbert_keys(pos, low[0], high[0])
    return _pieces(keys, min(63 // pos.shape[1], _MOST_BITS) * pos.shape[1], parts, rows, weight)


def _pieces(
    keys: torch.Tensor, bits: int, parts: int, rows: AllRows, weight: torch.Tensor | None
) -> torch.Tensor:
    """Return the part of each row: equal shares of the rows in the order of their keys."""
    first = torch.arange(1, parts, device=keys.device)
    cuts = torch.zeros_like(first), first.new_tensor(parts), first
    return _cuts_passed(keys, bits, torch.zeros_like(keys), cuts, rows, weight)


def by_bisection(
    pos: torch.Tensor, parts: int, rows: AllRows, weight: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the part of each row: boxes, cut repeatedly across their widest extent.

    All boxes of a level are cut at once. Arguments and result are as in :func:`by_hilbert`, for any
    number of coordinates.
    """
    owner = torch.zeros(len(pos), dtype=torch.int64, device=pos.device)  # first part of its box
    firsts, counts = owner.new_zeros(1), owner.new_tensor([parts])
    while bool((is_cut := counts > 1).any()):
        firsts, counts = firsts[is_cut], counts[is_cut]
        halves, numbers = counts // 2, torch.arange(len(firsts), device=pos.device)
        number = owner.new_full((parts,), -1)
        number[firsts] = numbers
        box = number[owner]
        all_of_them = int(counts.sum()) == parts
        kept = slice(None) if all_of_them else (box >= 0).nonzero().view(-1)
        box, here = box[kept], None if weight is None else weight[kept]
        keys, bits = _keys_of_widest(pos[kept], box, len(firsts), rows)
        behind = _cuts_passed(keys, bits, box, (numbers, counts, halves), rows, here)
        owner[kept] += behind.mul_(halves[box])
        firsts = torch.cat([firsts, firsts + halves])
        counts = torch.cat([halves, counts - halves])
    return owner


def _keys_of_widest(
    pos: torch.Tensor, box: torch.Tensor, boxes: int, rows: AllRows
) -> tuple[torch.Tensor, int]:
    """Return keys, and their bits, in the order of coordinates along the widest extent of a box."""
    low, high = _bounds(pos, box, boxes, rows)
    # halves, because the difference of two float64 can be infinite
    axis = (high * 0.5 - low * 0.5).argmax(1, keepdim=True)
    least, greatest = (_in_order(bound.gather(1, axis).view(-1)) for bound in (low, high))
    # a box without rows has reversed bounds
    extents = zip(least.tolist(), greatest.tolist(), strict=True)
    bits = max(max(end - start, 1).bit_length() for start, end in extents)
    keys = _in_order(pos.gather(1, axis[box]).view(-1).double())
    return keys.sub_(least[box]), bits


def _in_order(x: torch.Tensor) -> torch.Tensor:
    """Return float64 as int64 in the same order: the bits, inverted for negative numbers."""
    bits = (x + 0.0).view(torch.int64)  # adding 0.0 turns -0.0 into 0.0
    return bits.bitwise_xor_((bits >> 63).bitwise_and_((1 << 63) - 1))


def _bounds(
    pos: torch.Tensor, box: torch.Tensor, boxes: int, rows: AllRows
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least and the greatest coordinates in each box, float64 of shape (boxes, D)."""
    wide, index = pos.double(), box[:, None].expand_as(pos)
    nothing = wide.new_full((boxes, pos.shape[1]), torch.inf)
    low = nothing.scatter_reduce(0, index, wide, "amin")
    high = (-nothing).scatter_reduce(0, index, wide, "amax")
    low, high = rows.least(torch.cat([low, -high], dim=1)).chunk(2, dim=1)
    return low, -high


def _summed(index: torch.Tensor, bins: int, weight: torch.Tensor | None) -> torch.Tensor:
    """Return the exact sum of weights per index; without weights, the count per index."""
    if weight is None:
        return torch.bincount(index, minlength=bins)
    sums = torch.zeros(bins, dtype=torch.int64, device=index.device)
    return sums.scatter_add_(0, index, weight)


def _cuts_passed(
    keys: torch.Tensor,
    bits: int,
    box: torch.Tensor,
    cuts_of_boxes: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rows: AllRows,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the number of cuts of its box that each row lies behind, as if rows were sorted.

    In each box, rows stand by the lowest `bits` bits of their keys; equal keys by rank, then by
    position. Their weights are laid end to end from 0. `cuts_of_boxes` holds the box of each cut, a
    number of parts, and the part at whose start the cut lies, if the box is split as by
    :meth:`ShardSizes.balanced`. A row of weight w that starts at s is behind the cuts up
    to ``s + (w - 1) // 2``, its middle.

    A radix selection finds all cuts at once, and rows do not move. Each round splits the ranges
    that hold a cut by the next 8 bits of the keys, then of the rows' numbers, and keeps the slots
    that hold a cut as ranges of the next round. In the end, each range has one row.
    Communication: 256 int64 per cut and round.
    """
    range_of_cut, parts, first = cuts_of_boxes
    if len(range_of_cut) == 0:
        return torch.zeros_like(keys)
    total = rows.total(_summed(box, int(range_of_cut[-1]) + 1, weight))[range_of_cut]
    cuts = total // parts * first + torch.minimum(first, total % parts)  # from a range's start
    range_of_row, passed = box, torch.zeros_like(keys)
    left: slice | torch.Tensor = slice(None)  # rows in a range that holds a cut
    before, count = rows.span(len(keys))
    for by_number in (False, True):
        if by_number:
            keys = torch.arange(len(passed), device=keys.device)[left] + before
            bits = max(count - 1, 0).bit_length()
        while bits > 0:
            width = min(bits, _DIGIT)
            bits -= width
            digits = (keys >> bits).bitwise_and_((1 << width) - 1)
            slot = digits.add_(range_of_row, alpha=1 << width)
            slots = (int(range_of_cut[-1]) + 1) << width
            sums = rows.total(_summed(slot, slots, weight)).view(-1, 1 << width)
            slot_of_cut, cuts = _slots_with_cuts(sums, range_of_cut, cuts)
            passed[left] += _cuts_before(slot_of_cut, sums.shape)[slot]
            chosen, range_of_cut = torch.unique(slot_of_cut, return_inverse=True)
            range_of_slot = slot.new_full((slots,), -1)
            range_of_slot[chosen] = torch.arange(len(chosen), device=keys.device)
            range_of_row = range_of_slot[slot]
            del slot, digits  # as large as the keys
            kept = (range_of_row >= 0).nonzero().view(-1)
            range_of_row, keys = range_of_row[kept], keys[kept]
            left = kept if isinstance(left, slice) else left[kept]
            weight = None if weight is None else weight[kept]
    middle = torch.full_like(cuts, -1)  # of the row in each range, if it is on this rank
    middle[range_of_row] = 0 if weight is None else (weight - 1) // 2
    is_passed = cuts <= middle[range_of_cut]
    passed[left] += torch.bincount(range_of_cut[is_passed], minlength=len(cuts))[range_of_row]
    return passed


def _slots_with_cuts(
    sums: torch.Tensor, range_of_cut: torch.Tensor, cuts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the slot of each cut, and the cut from the slot's start, both (cuts,).

    `sums` are the weights of the slots of each range, (ranges, digits). A cut behind all rows is in
    the last slot of its range.
    """
    ends, digits = sums.cumsum(1), sums.shape[1]
    digit = (ends[range_of_cut] <= cuts[:, None]).sum(1).clamp_(max=digits - 1)
    slot = range_of_cut * digits + digit
    return slot, cuts - (ends - sums).view(-1)[slot]


def _cuts_before(slot_of_cut: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return the number of cuts of its range in slots before each slot, (ranges * digits,)."""
    held = torch.bincount(slot_of_cut, minlength=shape.numel()).view(shape)
    return (held.cumsum(1) - held).view(-1)


def _hilbert_keys(pos: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return the place of each position along the Hilbert curve.

    The curve fills the smallest cube at `low` that holds all finite positions, (n, D) with D in
    1...63, in ``2 ** bits`` steps per side. `low` and `high` are bounds of all positions,
    float64 of shape (D,). A key depends on the row, `low` and `high` alone.
    """
    bits = min(63 // pos.shape[1], _MOST_BITS)
    # halves, because the difference of two float64 can be infinite
    low = low * 0.5
    side = (high * 0.5 - low).amax().clamp(min=torch.finfo(torch.float64).tiny)
    dtype = torch.int32 if bits < 32 else torch.int64
    keys = torch.empty(len(pos), dtype=torch.int64, device=pos.device)
    for rows, key in zip(pos.split(_ROWS), keys.split(_ROWS), strict=True):
        cells = ((rows.double() * 0.5 - low) / side).mul_(2.0**bits)
        key.copy_(_hilbert_index(cells.clamp_(max=2.0**bits - 1).to(dtype), bits))
    return keys


def _hilbert_index(cells: torch.Tensor, bits: int) -> torch.Tensor:
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
