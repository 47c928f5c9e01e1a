"""Owners of the elements of parameters: arithmetic, without communication."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from varcomm.data_parallel.buckets import cut, gradient_dtype
from varcomm.errors import ArgumentError
from varcomm.sizes import ShardSizes, checked_sizes

__all__ = ["WHOLE", "Segment", "Split", "splits"]

WHOLE = "whole-parameters"

Segment = tuple[str, range]  # elements of a parameter, in row-major order


@dataclass(frozen=True)
class Split:
    """Parameters of one dtype in a row, cut into a piece for each rank."""

    members: tuple[str, ...]  # in their order in the row
    sizes: ShardSizes  # elements of each rank's piece
    segments: tuple[tuple[Segment, ...], ...]  # contents of each rank's piece

    @classmethod
    def of(cls, lengths: Mapping[str, int], sizes: Iterable[int]) -> Split:
        """Cut the row of parameters of these `lengths` into pieces of `sizes`.

        A parameter without elements is on the rank of the next element, or on the first.

        >>> Split.of({"b": 3, "a": 4}, [5, 0, 2]).segments
        ((('b', range(0, 3)), ('a', range(0, 2))), (), (('a', range(2, 4)),))
        """
        sizes = ShardSizes(sizes)
        pieces = [sizes.range(rank) for rank in range(len(sizes))]
        segments: list[list[Segment]] = [[] for _ in pieces]
        place = 0
        for name, length in lengths.items():
            if not length:  # optimizers have states of these too, which one rank keeps
                home = next((r for r, piece in enumerate(pieces) if place < piece.stop), 0)
                segments[home].append((name, range(0)))
            for piece, found in zip(pieces, segments, strict=True):
                start, stop = max(piece.start - place, 0), min(piece.stop - place, length)
                if start < stop:
                    found.append((name, range(start, stop)))
            place += length
        return cls(tuple(lengths), sizes, tuple(map(tuple, segments)))


def splits(
    parameters: Mapping[str, torch.Tensor], sizes: object, ranks: int, bucket_bytes: int
) -> list[Split]:
    """Return the splits of parameters, from the last of them to the first.

    Raises
    ------
    ArgumentError
        If `sizes` are not as ``ShardedGradients`` takes them.
    """
    numbers = {name: value.numel() for name, value in parameters.items()}
    place = {name: number for number, name in enumerate(parameters)}
    kinds: dict[tuple[torch.dtype, torch.dtype], list[str]] = {}
    for name in reversed(place):
        value = parameters[name]
        kinds.setdefault((value.dtype, gradient_dtype(value)), []).append(name)
    lists = [members for kind in kinds.values() for members in cut(parameters, kind, bucket_bytes)]
    lists.sort(key=lambda members: -min(place[name] for name in members))
    rows: list[dict[str, int]]
    if sizes == WHOLE:
        owner = _owners(numbers, ranks)
        rows = [
            {n: numbers[n] for n in sorted(members, key=owner.__getitem__)} for members in lists
        ]
        each = [
            [sum(row[n] for n in row if owner[n] == rank) for rank in range(ranks)] for row in rows
        ]
    else:
        rows = [{n: numbers[n] for n in members} for members in lists]
        wanted = _checked(sizes, sum(numbers.values()), ranks)
        each = _apportioned([sum(row.values()) for row in rows], wanted)
    return [Split.of(row, share) for row, share in zip(rows, each, strict=True)]


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


def _owners(numbers: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Give parameters to ranks: the largest first, each to the rank with the fewest elements.

    No rank gets more than ``4/3 - 1/(3 P)`` of the best choice's maximum (R. L. Graham, Bounds on
    multiprocessing timing anomalies, SIAM J. Appl. Math. 17, 1969).

    >>> _owners({"a": 3, "b": 9, "c": 4, "d": 4}, 2)
    {'b': 0, 'c': 1, 'd': 1, 'a': 1}
    """
    load, owner = [0] * ranks, {}
    for name in sorted(numbers, key=lambda name: -numbers[name]):
        rank = owner[name] = load.index(min(load))
        load[rank] += numbers[name]
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
