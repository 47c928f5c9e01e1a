"""Lists of different length in one array."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Ragged"]

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

    def chosen(self, rows: Array) -> Ragged:
        """Return some of the lists."""
        counts = self.counts[rows]
        ends = np.cumsum(counts)
        place = np.arange(counts.sum()) + np.repeat((self.ends - self.counts)[rows], counts)
        place -= np.repeat(ends - counts, counts)
        return Ragged(ends, self.values[place])
