"""Owners of the elements of parameters: arithmetic, without communication."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from varcomm.data_parallel.buckets import cut, gradient_dtype
from varcomm.errors import ArgumentError
from varcomm.sizes import ShardSizes, checked_sizes

__all__ = ["WHOLE", "Segment", "Split", "splits"]

WHOLE = "whole-parameters"


@dataclass(frozen=True)
class Segment:
    """Elements ``start`` to ``stop`` of parameter `index`, in row-major order, of one rank."""

    index: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Split:
    """Parameters of one dtype in a row, cut into a piece for each rank."""

    members: tuple[int, ...]  # the parameters, in their order in the row
    places: tuple[int, ...]  # their starts
    sizes: ShardSizes  # elements of each rank's piece
    segments: tuple[tuple[Segment, ...], ...]  # contents of each rank's piece

    @classmethod
    def of(cls, members: Sequence[int], lengths: Sequence[int], sizes: Sequence[int]) -> Split:
        """Cut the row of `members`, of these `lengths`, into pieces of `sizes`.

        A parameter without elements is on the rank of the next element, or on the first.

        >>> Split.of([4, 2], [3, 4], [5, 0, 2]).segments[0]
        (Segment(index=4, start=0, stop=3), Segment(index=2, start=0, stop=2))
        """
        places = list(accumulate(lengths, initial=0))[:-1]
        pieces = [ShardSizes(sizes).range(rank) for rank in range(len(sizes))]
        segments: list[list[Segment]] = [[] for _ in pieces]
        for index, length, place in zip(members, lengths, places, strict=True):
            if not length:  # optimizers have states of these too, which one rank keeps
                home = next((r for r, piece in enumerate(pieces) if place < piece.stop), 0)
                segments[home].append(Segment(index, 0, 0))
            for piece, found in zip(pieces, segments, strict=True):
                start, stop = max(piece.start - place, 0), min(piece.stop - place, length)
                if start < stop:
                    found.append(Segment(index, start, stop))
        return cls(tuple(members), tuple(places), ShardSizes(sizes), tuple(map(tuple, segments)))


def splits(
    values: Sequence[torch.Tensor], sizes: object, ranks: int, bucket_bytes: int
) -> list[Split]:
    """Return the splits of parameters, from the last of them to the first.

    Raises
    ------
    ArgumentError
        If `sizes` are not as ``ShardedGradients`` takes them.
    """
    numbers = [value.numel() for value in values]
    kinds: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    for index in reversed(range(len(values))):
        kinds.setdefault((values[index].dtype, gradient_dtype(values[index])), []).append(index)
    lists = [members for kind in kinds.values() for members in cut(values, kind, bucket_bytes)]
    lists.sort(key=lambda members: -min(members))
    if sizes == WHOLE:
        owner = _owners(numbers, ranks)
        lists = [sorted(members, key=lambda index: owner[index]) for members in lists]
        shares = [
            [sum(numbers[i] for i in members if owner[i] == rank) for rank in range(ranks)]
            for members in lists
        ]
    else:
        lengths = [sum(numbers[i] for i in members) for members in lists]
        shares = _apportioned(lengths, _checked(sizes, sum(numbers), ranks))
    return [
        Split.of(members, [numbers[i] for i in members], share)
        for members, share in zip(lists, shares, strict=True)
    ]


def _apportioned(lengths: Iterable[int], sizes: Sequence[int]) -> list[list[int]]:
    """Split rows over ranks so that each rank gets of all rows together its size.

    Each rank gets of a row its part in proportion to the rest of its size, rounded down, and one
    element more for the largest remainders. So every message is spread over all ranks.

    >>> _apportioned([5, 4], [3, 0, 6])
    [[2, 0, 3], [1, 0, 3]]
    """
    left, found = list(sizes), []
    for length in lengths:
        total = max(sum(left), 1)
        share = [length * rest // total for rest in left]
        order = sorted(range(len(left)), key=lambda r: (-(length * left[r] % total), r))
        for rank in order[: length - sum(share)]:
            share[rank] += 1
        left = [rest - part for rest, part in zip(left, share, strict=True)]
        found.append(share)
    return found


def _owners(numbers: Sequence[int], ranks: int) -> list[int]:
    """Give parameters to ranks: the largest first, each to the rank with the fewest elements.

    No rank gets more than ``4/3 - 1/(3 P)`` of the best choice's maximum (R. L. Graham, Bounds on
    multiprocessing timing anomalies, SIAM J. Appl. Math. 17, 1969).

    >>> _owners([3, 9, 4, 4], 2)
    [1, 0, 1, 1]
    """
    load, owner = [0] * ranks, [0] * len(numbers)
    for index in sorted(range(len(numbers)), key=lambda i: (-numbers[i], i)):
        rank = min(range(ranks), key=lambda r: (load[r], r))
        owner[index] = rank
        load[rank] += numbers[index]
    return owner


def _checked(sizes: object, total: int, ranks: int) -> tuple[int, ...]:
    if sizes == "balanced":
        return ShardSizes.balanced(total, ranks)
    if isinstance(sizes, str):
        raise ArgumentError(
            f'sizes must be "balanced", "{WHOLE}" or a list of ints, one per rank; got {sizes!r}.'
        )
    wanted = checked_sizes(sizes, "sizes", ranks)  # type: ignore[arg-type]
    if sum(wanted) != total:
        raise ArgumentError(
            f"sizes sum to {sum(wanted)} ({list(wanted)}), but the parameters that are trained "
            f"have {total} elements. Use ShardSizes.balanced, or shares of {total}."
        )
    return wanted
