"""Who owns which elements of which parameter: arithmetic, without communication."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch

from varcomm.data_parallel.buckets import cut, gradient_dtype
from varcomm.errors import ArgumentError
from varcomm.sizes import ShardSizes, checked_sizes

__all__ = ["WHOLE", "Segment", "Split", "apportion", "owners", "splits"]

WHOLE = "whole-parameters"


@dataclass(frozen=True)
class Segment:
    """Elements ``start`` to ``stop`` of a parameter, in row-major order, that one rank owns.

    Attributes
    ----------
    index : int
        What the parameter is known by.
    start, stop : int
    """

    index: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Split:
    """Parameters of one dtype in a row, cut into a piece for each rank.

    Attributes
    ----------
    members : tuple of int
        The parameters, in their order in the row.
    places : tuple of int
        Where each of them starts.
    sizes : ShardSizes
        Elements of each rank's piece.
    segments : tuple of tuple of Segment
        What is in the piece of each rank.
    """

    members: tuple[int, ...]
    places: tuple[int, ...]
    sizes: ShardSizes
    segments: tuple[tuple[Segment, ...], ...]

    @classmethod
    def of(cls, members: Sequence[int], lengths: Sequence[int], sizes: Sequence[int]) -> Split:
        """Cut the row of `members`, of these `lengths`, where one rank's piece ends.

        One without elements is on the rank that has what comes next, or else on the first.

        >>> Split.of([4, 2], [3, 4], [5, 0, 2]).segments[0]
        (Segment(index=4, start=0, stop=3), Segment(index=2, start=0, stop=2))
        """
        places = list(accumulate(lengths, initial=0))[:-1]
        rows = list(zip(members, lengths, places, strict=True))
        pieces = [ShardSizes(sizes).range(rank) for rank in range(len(sizes))]
        segments: list[list[Segment]] = [[] for _ in pieces]
        for index, length, place in rows:
            if not length:  # optimizers have states of these too, which somebody is to keep
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
    """Return how `values` are split, from the last of them to the first.

    Parameters
    ----------
    values : sequence of torch.Tensor
        The parameters. Those whose values or gradients are of another dtype are in other rows.
    sizes : "balanced", "whole-parameters" or sequence of int
        As of ``ShardedGradients``.
    ranks, bucket_bytes : int

    Raises
    ------
    ArgumentError
        If `sizes` are not what they should be.
    """
    numbers = [value.numel() for value in values]
    lists = _rows(values, bucket_bytes)
    if sizes == WHOLE:
        owner = owners(numbers, ranks)
        found = []
        for members in lists:
            own = [[index for index in members if owner[index] == rank] for rank in range(ranks)]
            lengths = [[numbers[index] for index in some] for some in own]
            shares = [sum(row) for row in lengths]
            found.append(Split.of([*chain(*own)], [*chain(*lengths)], shares))
        return found
    total = sum(numbers)
    wanted = _checked(sizes, total, ranks)
    rows = [[numbers[i] for i in members] for members in lists]
    each = apportion([sum(row) for row in rows], wanted)
    return [
        Split.of(members, row, share) for members, row, share in zip(lists, rows, each, strict=True)
    ]


def apportion(lengths: Iterable[int], sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Split rows of `lengths` over ranks, so that each rank gets of all rows together its size.

    Of each row a rank gets its part in proportion to what it is still to get, rounded down, and
    one element more where most has been cut off (the method of the largest remainder). So every
    message is spread over all ranks, and the sums come out exactly.

    >>> apportion([5, 4], [3, 0, 6])
    [(2, 0, 3), (1, 0, 3)]
    """
    left, found = list(sizes), []
    for length in lengths:
        total = max(sum(left), 1)
        share = [length * rest // total for rest in left]
        order = sorted(range(len(left)), key=lambda r: (-(length * left[r] % total), r))
        for rank in order[: length - sum(share)]:
            share[rank] += 1
        left = [rest - part for rest, part in zip(left, share, strict=True)]
        found.append(tuple(share))
    return found


def owners(numbers: Sequence[int], ranks: int) -> list[int]:
    """Give whole parameters to ranks: the largest first, each to whoever has least.

    No rank gets more than ``4/3 - 1/(3 P)`` of what the best choice would give the one that gets
    most (R. L. Graham, Bounds on multiprocessing timing anomalies, SIAM J. Appl. Math. 17, 1969).

    >>> owners([3, 9, 4, 4], 2)
    [1, 0, 1, 1]
    """
    load, owner = [0] * ranks, [0] * len(numbers)
    for index in sorted(range(len(numbers)), key=lambda i: (-numbers[i], i)):
        rank = min(range(ranks), key=lambda r: (load[r], r))
        owner[index] = rank
        load[rank] += numbers[index]
    return owner


def _rows(values: Sequence[torch.Tensor], bucket_bytes: int) -> list[list[int]]:
    kinds: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    for index in reversed(range(len(values))):
        kinds.setdefault((values[index].dtype, gradient_dtype(values[index])), []).append(index)
    lists = [members for alike in kinds.values() for members in cut(values, alike, bucket_bytes)]
    return sorted(lists, key=lambda members: -min(members))


def _checked(sizes: object, total: int, ranks: int) -> tuple[int, ...]:
    if sizes == "balanced":
        return ShardSizes.balanced(total, ranks)
    if isinstance(sizes, str):
        raise ArgumentError(
            f'sizes must be "balanced", "{WHOLE}" or a list of ints, one a rank; got {sizes!r}.'
        )
    wanted = checked_sizes(sizes, "sizes", ranks)  # type: ignore[arg-type]
    if sum(wanted) != total:
        raise ArgumentError(
            f"sizes sum to {sum(wanted)} ({list(wanted)}), but the parameters that are trained "
            f"have {total} elements. Take ShardSizes.balanced, or shares of {total}."
        )
    return wanted
