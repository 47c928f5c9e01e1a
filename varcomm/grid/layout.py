"""How a field is split: along some dimensions, each over the ranks of a group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod

from varcomm.transport.group import Group

Span = tuple[int, int]  # of rows: from the first to behind the last
Spans = tuple[Span, ...]  # one per rank


@dataclass(frozen=True)
class Split:
    """One dimension of a field, and the rows along it that each rank of a group has."""

    dim: int  # counted from the last, which is -1
    sizes: tuple[int, ...]
    group: Group
    repeats: int = 1  # of all rows, one after the other: images times rows in one dimension
    lead: int = 0  # rows that padding has put before the first, which a window will use up

    @property
    def rows(self) -> int:
        """Rows of all ranks, without repeats."""
        return sum(self.sizes)

    @property
    def total(self) -> int:
        """The length of the dimension on one process."""
        return self.rows * self.repeats

    @property
    def own(self) -> int:
        """Rows of this rank, without repeats."""
        return self.sizes[self.group.rank]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The first row of each rank, and the number of rows."""
        return (0, *accumulate(self.sizes))

    @property
    def start(self) -> int:
        """The first row of this rank."""
        return self.offsets[self.group.rank]

    @property
    def spans(self) -> Spans:
        """The rows of each rank."""
        return tuple(pairwise(self.offsets))

    def resized(self, sizes: Iterable[int]) -> Split:
        """Return the split of another number of rows."""
        return replace(self, sizes=tuple(sizes), lead=0)

    def ending(self, ends: Iterable[int]) -> Split:
        """Return the split in which the rows of each rank are those from one end to the next."""
        return self.resized(b - a for a, b in pairwise(ends))


@dataclass(frozen=True)
class Layout:
    """The splits of a field, and the groups of its grid; a replicated value has no split."""

    groups: tuple[Group, ...]
    splits: tuple[Split, ...] = ()

    @cached_property
    def by_dim(self) -> dict[int, Split]:
        """The splits by their dimensions, which are negative."""
        return {split.dim: split for split in self.splits}

    @property
    def ranks(self) -> int:
        """The number of ranks that the field is split over."""
        return prod(group.size for group in self.groups)

    def at(self, dims: int) -> dict[int, Split]:
        """Return the splits by dimensions that are counted from the first of `dims`."""
        return {split.dim + dims: split for split in self.splits}

    def having(self, splits: Mapping[int, Split], dims: int) -> Layout:
        """Return the layout with these splits of a tensor of `dims` dimensions."""
        placed = [replace(s, dim=dim - dims) for dim, s in splits.items()]
        return Layout(self.groups, tuple(sorted(placed, key=lambda split: split.dim)))

    def replacing(self, split: Split) -> Layout:
        """Return the layout with this split of its dimension."""
        return self.having(self.by_dim | {split.dim: split}, 0)

    def unsplit(self, dim: int) -> Layout:
        """Return the layout in which each rank has a dimension whole."""
        return Layout(self.groups, tuple(split for split in self.splits if split.dim != dim))

    def shape(self, local: Sequence[int]) -> list[int]:
        """Return the shape on one process of a field with this local shape."""
        whole = list(local)
        for split in self.splits:
            whole[split.dim] = split.total
        return whole
