"""Lists of different length in one array."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Ragged:
    """Lists of different length: `ends` (L,) of each in `values`."""

    ends: Array
    values: Array

    @property
    def counts(self) -> Array:
        """The length of each list."""
        return np.diff(self.ends, prepend=0)

    @property
    def row(self) -> Array:
        """The list of each value."""
        return np.repeat(np.arange(len(self.ends)), self.counts)

    def mirrored(self, which: Array) -> Ragged:
        """Return the lists with some of them, bool of (L,), in reverse order."""
        place = np.arange(len(self.values))
        last = (2 * self.ends - self.counts - 1)[self.row]
        return Ragged(self.ends, self.values[np.where(which[self.row], last - place, place)])

    def chosen(self, rows: Array) -> Ragged:
        """Return some of the lists."""
        counts = self.counts[rows]
        place = spread(self.ends[rows] - counts, counts)
        return Ragged(np.cumsum(counts), self.values[place])


def spread(start: Array, count: Array) -> Array:
    """Return ``start[i] ... start[i] + count[i] - 1`` for each i, one after the other."""
    ends = np.cumsum(count)
    shift: Array = np.repeat(start - (ends - count), count)
    return np.arange(len(shift)) + shift
