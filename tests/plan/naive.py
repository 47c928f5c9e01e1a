"""Who needs which rows, and what arrives then: numpy, one row after the other."""

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from varcomm import ExchangePlan


@dataclass(frozen=True)
class Needs:
    """``indices[i][j]``: rows of rank i, which has ``sizes[i]``, that rank j needs, in order."""

    sizes: tuple[int, ...]
    indices: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def ranks(self):
        return len(self.sizes)

    def counts_to(self, j):
        return tuple(len(row[j]) for row in self.indices)

    def counts_from(self, i):
        return tuple(len(index) for index in self.indices[i])

    @property
    def matrix(self):
        return [self.counts_from(i) for i in range(self.ranks)]

    def neighbours(self, rank):
        pairs = zip(self.counts_to(rank), self.counts_from(rank), strict=True)
        return tuple(r for r, pair in enumerate(pairs) if r != rank and pair != (0, 0))

    def index_of(self, rank, dtype=torch.int64):
        return [torch.tensor(index, dtype=dtype) for index in self.indices[rank]]

    def needed(self, rank, dtype=torch.int64):
        """Global rows that `rank` needs."""
        first = np.cumsum((0, *self.sizes))
        ids = [first[i] + row for i in range(self.ranks) for row in self.indices[i][rank]]
        return torch.tensor(ids, dtype=dtype)

    def plan_of_indices(self, rank, group=None):
        return ExchangePlan.from_indices(self.index_of(rank), self.sizes[rank], group=group)

    def plan_of_needed(self, rank, group=None):
        return ExchangePlan.from_needed(self.needed(rank), self.sizes, group)

    def received(self, xs, rank):
        """Take what `rank` receives from the rows `xs` of all ranks."""
        rows = [xs[i][row] for i in range(self.ranks) for row in self.indices[i][rank]]
        return np.stack(rows) if rows else xs[rank][:0]

    def summed(self, ys, rank):
        """Add up, for each row of `rank`, what all ranks hold in `ys` for their copies of it."""
        total = np.zeros((self.sizes[rank], *ys[rank].shape[1:]), ys[rank].dtype)
        for j in range(self.ranks):
            start = sum(self.counts_to(j)[:rank])
            for k, row in enumerate(self.indices[rank][j]):
                total[row] += ys[j][start + k]
        return total

    def own_rows(self, *rest):
        """Draw the rows of all ranks, alike on every rank; small integers, so sums are exact."""
        return _whole_numbers([(n, *rest) for n in self.sizes])

    def copies(self, *rest):
        """Draw something for what each rank receives."""
        return _whole_numbers([(sum(self.counts_to(j)), *rest) for j in range(self.ranks)])


def _whole_numbers(shapes):
    generator = np.random.default_rng(1)
    return [generator.integers(-50, 50, shape).astype(np.float64) for shape in shapes]


@st.composite
def some_needs(draw, ranks):
    """Draw any needs: empty ranks, none at all, own rows, rows that many need many times."""
    sizes = tuple(draw(st.integers(0, 4)) for _ in range(ranks))
    indices = tuple(
        tuple(
            tuple(draw(st.lists(st.integers(0, n - 1), max_size=4))) if n else ()
            for _ in range(ranks)
        )
        for n in sizes
    )
    return Needs(sizes, indices)


def all_to_all_needs(ranks):
    """Every rank needs every row of every rank, own ones too."""
    sizes = tuple(2 + rank % 2 for rank in range(ranks))
    return Needs(sizes, tuple((tuple(range(n)),) * ranks for n in sizes))


def of_first_rank(ranks):
    """All rows are on rank 0, and each rank needs each of them twice."""
    rows = (2, 0, 1, 1, 0, 2)
    nothing = ((),) * ranks
    return Needs((3,) + (0,) * (ranks - 1), ((rows,) * ranks, *(nothing,) * (ranks - 1)))


def in_a_ring(ranks):
    """Each rank needs the last row of the one before, and gives its own to the one after."""
    indices = [[()] * ranks for _ in range(ranks)]
    for rank in range(ranks):
        indices[rank][(rank + 1) % ranks] = (rank,)
    sizes = tuple(rank + 1 for rank in range(ranks))
    return Needs(sizes, tuple(tuple(row) for row in indices))


def many_copies(ranks, copies=7):
    """Each rank has many copies of the one row of rank 0."""
    nothing = ((),) * ranks
    return Needs((1,) + (0,) * (ranks - 1), (((0,) * copies,) * ranks, *(nothing,) * (ranks - 1)))


def three_still_exchange(rank):
    """Exchange once more among three ranks: what an error leaves behind must not be in the way."""
    row = torch.full((rank + 1,), float(rank))
    return in_a_ring(3).plan_of_needed(rank)(row).tolist() == [(rank - 1) % 3]
