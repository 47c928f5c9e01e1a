"""Parts of equal weight: where a sequence of weighted rows is cut, though no rank sees it whole."""

from __future__ import annotations

import torch

from varcomm.graph.partitioners.totals import Everyone

__all__ = ["by_order", "cuts_passed", "starts_of_shares", "summed"]

# Bits of a key that a round looks at. More of them are fewer rounds, of more counts.
_DIGIT = 8


def starts_of_shares(total: torch.Tensor, parts: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Return where share `first` starts if `total` is split into `parts` shares.

    Shares differ by one, larger ones first: they are those of :meth:`ShardSizes.balanced`. All
    arguments are int64, and broadcast.

    >>> starts_of_shares(torch.tensor(7), torch.tensor(3), torch.arange(4))
    tensor([0, 3, 5, 7])
    """
    base = total // parts
    return base * first + torch.minimum(first, total - base * parts)


def by_order(nodes: int, weight: torch.Tensor | None, parts: int) -> torch.Tensor:
    """Return the part of each node if nodes stay in order: that in whose share its middle lies.

    >>> by_order(7, None, 3), by_order(4, torch.tensor([1, 4, 1, 0]), 3)
    (tensor([0, 0, 0, 1, 1, 2, 2]), tensor([0, 1, 2, 2]))
    """
    if weight is None:
        total, middles = torch.tensor(nodes), torch.arange(nodes)
    else:
        total, middles = weight.sum(), weight.cumsum(0).sub_(weight).add_((weight - 1) // 2)
    cuts = starts_of_shares(total, torch.tensor(parts), torch.arange(1, parts))
    return torch.searchsorted(cuts, middles, right=True)


def summed(index: torch.Tensor, bins: int, weight: torch.Tensor | None) -> torch.Tensor:
    """Return the exact sum of the weights of each index; without weights, how many there are.

    >>> index = torch.tensor([0, 2, 2])
    >>> summed(index, 4, None), summed(index, 4, torch.tensor([5, 6, 7]))
    (tensor([1, 0, 2, 0]), tensor([ 5,  0, 13,  0]))
    """
    if weight is None:
        return torch.bincount(index, minlength=bins)
    sums = torch.zeros(bins, dtype=torch.int64, device=index.device)
    return sums.scatter_add_(0, index, weight)


def cuts_passed(
    keys: torch.Tensor,
    bits: int,
    box: torch.Tensor,
    cuts: torch.Tensor,
    box_of_cut: torch.Tensor,
    everyone: Everyone,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return how many cuts of its box each row lies behind, had the rows of all been sorted.

    In each box, rows are ordered by key, and rows of one key as they come: those of lower ranks
    first, then by position. Their weights are laid end to end from 0 and cut at `cuts`; a row is
    behind a cut if its middle is. To be exact: a row of weight w that starts at s is behind the
    cuts up to ``s + (w - 1) // 2``. Without weights, a cut is how many rows come before it.

    Parameters
    ----------
    keys : torch.Tensor
        int64 of shape (n,): this rank's rows. Only the lowest `bits` bits count, without a sign.
    bits : int
        1...64; the same on all ranks, as are `cuts` and `box_of_cut`.
    box : torch.Tensor
        int64 of shape (n,): the box of each row, one that has cuts.
    cuts : torch.Tensor
        int64 of shape (Q,): ascending in each box, and at most its weight.
    box_of_cut : torch.Tensor
        int64 of shape (Q,): ascending from 0, and none left out.
    everyone : Everyone
        Who holds rows.
    weight : torch.Tensor, optional
        int64 of shape (n,), non-negative; None is 1 for each row. On all ranks or on none.

    Returns
    -------
    torch.Tensor
        int64 of shape (n,).

    Notes
    -----
    Rows are not sorted and do not move: a radix selection finds all cuts at once. Each round adds
    up weights by the next 8 bits of the keys, in those ranges of keys that hold a cut; all other
    rows are done. Rows of equal keys are told apart at the end, by what lower ranks have of them.

    Communication: ``bits / 8`` sums of 256 int64 a cut, rounded up, and two of one int64 a cut.
    """
    if len(cuts) == 0:
        return torch.zeros_like(keys)
    at, place = box, box_of_cut  # the range of keys in which each row is, and each cut
    passed = torch.zeros_like(keys)
    rows: slice | torch.Tensor = slice(None)  # those in a range that holds a cut
    while bits > 0:
        width = min(bits, _DIGIT)
        bits -= width
        places, digits = int(place[-1]) + 1, 1 << width
        slot = (keys >> bits).bitwise_and_(digits - 1).add_(at, alpha=digits)
        sums = everyone.total(summed(slot, places * digits, weight)).view(places, digits)
        ends = sums.cumsum(1)
        # The digit at which a cut is. A cut behind everything is at the last.
        digit = (ends[place] <= cuts[:, None]).sum(1).clamp_(max=digits - 1)
        chosen = place * digits + digit
        cuts = cuts - (ends - sums).view(-1)[chosen]
        held = torch.bincount(chosen, minlength=places * digits).view(places, digits)
        passed[rows] += (held.cumsum(1) - held).view(-1)[slot]
        ranges, place = torch.unique(chosen, return_inverse=True)
        number = torch.full((places * digits,), -1, device=keys.device)
        number[ranges] = torch.arange(len(ranges), device=keys.device)
        at = number[slot]
        del slot  # as large as the keys
        kept = (at >= 0).nonzero().view(-1)
        at, keys = at[kept], keys[kept]
        rows = kept if isinstance(rows, slice) else rows[kept]
        weight = None if weight is None else weight[kept]
    passed[rows] += _passed_by_equals(at, cuts, place, everyone, weight)
    return passed


def _passed_by_equals(
    at: torch.Tensor,
    cuts: torch.Tensor,
    place: torch.Tensor,
    everyone: Everyone,
    weight: torch.Tensor | None,
) -> torch.Tensor:
    """Return how many cuts of its range each row is behind, rows being in the order of ranks."""
    places = int(place[-1]) + 1
    mine = summed(at, places, weight)
    sums = everyone.total(mine)
    before = everyone.before(mine)
    # Ranges are laid end to end, so that one ascending sequence holds the cuts of all.
    offset = sums.cumsum(0) - sums
    order = at.sort(stable=True).indices
    at = at[order]
    each = torch.ones_like(at) if weight is None else weight[order]
    start = each.cumsum(0) - each + (offset + before - (mine.cumsum(0) - mine))[at]
    behind = torch.searchsorted(offset[place] + cuts, start + (each - 1) // 2, right=True)
    # A row without weight at the very start lies before its range, and before earlier cuts.
    held = torch.bincount(place, minlength=places)
    behind = (behind - (held.cumsum(0) - held)[at]).clamp_(min=0)
    return torch.empty_like(behind).scatter_(0, order, behind)
