"""In-edges of the nodes that a rank owns, and random picks among them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from varcomm.graph.draws import Array, uniform
from varcomm.graph.loader.stored_rows import small
from varcomm.graph.ragged import spread


@dataclass(frozen=True, eq=False)
class InEdges:
    """Edges of one type, sorted by target and then by id.

    Edges into node i are at ``ends[i]:ends[i + 1]``. `source` has the global numbers of their
    sources, and `place` their positions in the shard. `weight` is None or positive.
    """

    ends: Array
    source: Array
    place: Array
    weight: Array | None

    @cached_property
    def cumulative(self) -> Array:
        """Sums of weights before each edge, in which the edges of each node weigh 1."""
        assert self.weight is not None
        degree = np.diff(self.ends)
        node = np.repeat(np.arange(len(degree)), degree)
        total = np.bincount(node, self.weight, len(degree))
        return np.append(0.0, np.cumsum(self.weight / total[node]))

    @classmethod
    def of(cls, target: Array, source: Array, nodes: int, weight: Array | None) -> InEdges:
        """Sort edges by target. Edges of weight 0 are never picked, and left out."""
        place = np.argsort(target, kind="stable")
        if weight is not None:
            place = place[weight[place] > 0]
            weight = weight[place]
        place = small(place, len(target))
        ends = np.searchsorted(target[place], np.arange(nodes + 1))
        return cls(ends, source[place], place, weight)

    def pick(self, rows: Array, fan_out: int, key: Array, replace: bool) -> tuple[Array, Array]:
        """Return the number of edges picked for each of some nodes, and the picked edges.

        Picked edges are grouped by node. `key` (R,) decides which edges are picked; -1 picks all.
        """
        start = self.ends[rows]
        degree = self.ends[rows + 1] - start
        if fan_out < 0:
            return degree, spread(start, degree)
        if replace:
            count = np.where(degree > 0, fan_out, 0)
            drawn = uniform(np.repeat(key, count), spread(np.zeros_like(count), count))
            return count, self._with_replacement(np.repeat(rows, count), drawn)
        count = np.minimum(degree, fan_out)
        picked = spread(start, count)
        full = np.flatnonzero(degree > fan_out)
        if len(full):
            choose = self._distinct if self.weight is None else self._heaviest
            place = (np.cumsum(count) - count)[full] + np.arange(fan_out)[:, None]
            picked[place] = start[full] + choose(start[full], degree[full], fan_out, key[full])
        return count, picked

    def _with_replacement(self, rows: Array, drawn: Array) -> Array:
        start, end = self.ends[rows], self.ends[rows + 1]
        picked: Array = start + (drawn * (end - start)).astype(np.int64)
        if self.weight is not None:
            least, most = self.cumulative[start], self.cumulative[end]
            wanted = least + drawn * (most - least)
            picked = np.searchsorted(self.cumulative, wanted, side="right") - 1
        return np.clip(picked, start, end - 1)

    def _distinct(self, _: Array, degree: Array, fan_out: int, key: Array) -> Array:
        """Return `fan_out` distinct positions below each degree: Floyd's algorithm.

        J. Bentley and R. Floyd, Programming pearls, CACM 30 (1987): every subset is equally likely.
        """
        chosen = np.empty((fan_out, len(degree)), np.int64)
        for turn in range(fan_out):
            last = degree - fan_out + turn
            drawn = (uniform(key, turn) * (last + 1)).astype(np.int64)
            chosen[turn] = np.where((chosen[:turn] == drawn).any(axis=0), last, drawn)
        return chosen

    def _heaviest(self, start: Array, degree: Array, fan_out: int, key: Array) -> Array:
        """Return `fan_out` distinct positions, drawn successively in proportion to the weights.

        P. Efraimidis and P. Spirakis, Weighted random sampling with a reservoir (2006): those with
        the smallest of exponential variables whose rates are the weights.
        """
        assert self.weight is not None
        row, position = np.repeat(np.arange(len(degree)), degree), spread(0 * degree, degree)
        drawn = uniform(key[row], position)
        waiting = -np.log1p(-drawn) / self.weight[start[row] + position]
        order = np.lexsort([waiting, row])
        first = np.cumsum(degree) - degree
        picked: Array = position[order[first + np.arange(fan_out)[:, None]]]
        return picked
