"""Cells of a mesh: edges between points, neighbours of cells, and volumes.

Points of a cell stand in meshio's order, https://github.com/nschloe/meshio/wiki/Node-ordering-in-cells:
corners first, then a point on each edge, then points inside facets and the cell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from varcomm.errors import ArgumentError

__all__ = [
    "Cells",
    "cell_edges",
    "cells_of",
    "corner_means",
    "dimension",
    "measures",
    "point_edges",
]

Array = np.ndarray[Any, Any]
Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Shape:
    """Edges and facets of a cell, by its corners; facets run counterclockwise from outside."""

    dim: int
    edges: Pairs
    facets: tuple[tuple[int, ...], ...]

    @property
    def corners(self) -> int:
        """The number of corners."""
        return 1 + max((max(facet) for facet in self.facets), default=0)


def _polygon(corners: int) -> Shape:
    ring = tuple((i, (i + 1) % corners) for i in range(corners))
    return Shape(2, ring, ring)


_SHAPES = {
    "vertex": Shape(0, (), ()),
    "line": Shape(1, ((0, 1),), ((0,), (1,))),
    "triangle": _polygon(3),
    "quad": _polygon(4),
    "tetra": Shape(
        3,
        ((0, 1), (1, 2), (2, 0), (0, 3), (1, 3), (2, 3)),
        ((0, 2, 1), (0, 1, 3), (1, 2, 3), (2, 0, 3)),
    ),
    "pyramid": Shape(
        3,
        ((0, 1), (1, 2), (2, 3), (3, 0), (0, 4), (1, 4), (2, 4), (3, 4)),
        ((0, 3, 2, 1), (0, 1, 4), (1, 2, 4), (2, 3, 4), (3, 0, 4)),
    ),
    "wedge": Shape(
        3,
        ((0, 1), (1, 2), (2, 0), (3, 4), (4, 5), (5, 3), (0, 3), (1, 4), (2, 5)),
        ((0, 2, 1), (3, 4, 5), (0, 1, 4, 3), (1, 2, 5, 4), (2, 0, 3, 5)),
    ),
    "hexahedron": Shape(
        3,
        (*_polygon(4).edges, (4, 5), (5, 6), (6, 7), (7, 4), (0, 4), (1, 5), (2, 6), (3, 7)),
        ((0, 3, 2, 1), (4, 5, 6, 7), (0, 1, 5, 4), (1, 2, 6, 5), (2, 3, 7, 6), (3, 0, 4, 7)),
    ),
}

# Quadratic cells, with a point in the middle of each edge: points inside facets or the cell, and
# the points to which they are joined. Formats order those of wedges and pyramids differently.
_INNER: dict[str, dict[int, tuple[int, ...]]] = {
    "line3": {},
    "triangle6": {},
    "quad8": {},
    "quad9": {8: (4, 5, 6, 7)},
    "tetra10": {},
    "hexahedron20": {},
    "hexahedron27": {
        20: (11, 19, 15, 16),
        21: (9, 18, 13, 17),
        22: (8, 17, 12, 16),
        23: (10, 18, 14, 19),
        24: (8, 9, 10, 11),
        25: (12, 13, 14, 15),
        26: (20, 21, 22, 23, 24, 25),
    },
}


@dataclass(frozen=True)
class Cells:
    """All cells of one kind, by meshio's name: their points, (C, K), and positions among all."""

    kind: str
    points: Array
    ids: Array

    @property
    def shape(self) -> Shape:
        """Edges and facets."""
        return _shape(self.kind, self.points.shape[1])

    @property
    def joined(self) -> Pairs:
        """Pairs of points of a cell that are joined, along its edges."""
        shape = self.shape
        if self.kind in _INNER:
            middle = [(*ends, shape.corners + i) for i, ends in enumerate(shape.edges)]
            along = [pair for a, b, m in middle for pair in ((a, m), (m, b))]
            inside = [(a, b) for a, others in _INNER[self.kind].items() for b in others]
            return (*along, *inside)
        if shape.dim and self.points.shape[1] != shape.corners:
            raise ArgumentError(
                f"points of cells of kind {self.kind!r} cannot be joined; quadratic ones that "
                f'can be: {", ".join(_INNER)}. Or let cells be the nodes: nodes="cells".'
            )
        return shape.edges


def _shape(kind: str, points: int) -> Shape:
    base = kind.rstrip("0123456789")
    if base == "polygon":
        return _polygon(points)
    if base not in _SHAPES:
        raise ArgumentError(
            f"cells of kind {kind!r} are not supported; those that are: "
            f"{', '.join([*_SHAPES, 'polygon'])}, and those of higher order."
        )
    return _SHAPES[base]


def dimension(kind: str) -> int:
    """Return the dimension of cells of a kind, or raise if the kind is not supported."""
    return _shape(kind, 3).dim


def cells_of(blocks: Sequence[tuple[str, Any]], points: int) -> list[Cells]:
    """Return the cells of a file by kind, or raise if a point is out of range.

    `blocks` are names of kinds and arrays of (C, K); a kind may have many blocks.
    """
    groups: dict[tuple[str, int], list[tuple[Array, int]]] = {}
    first = 0
    for kind, data in blocks:
        table = np.asarray(data, dtype=np.int64)
        groups.setdefault((kind, table.shape[1]), []).append((table, first))
        first += len(table)
    found = []
    for (kind, _), parts in groups.items():
        table = np.concatenate([part for part, _ in parts])
        ids = np.concatenate([np.arange(start, start + len(part)) for part, start in parts])
        if table.size and not (table.min() >= 0 and table.max() < points):
            raise ArgumentError(
                f"cells of kind {kind!r} have points {table.min()}...{table.max()}, out of range "
                f"for {points} points."
            )
        found.append(Cells(kind, table, ids))
    return found


def point_edges(cells: Sequence[Cells], points: int) -> Array:
    """Return the edges between points, (2, E): in both directions, sorted, once."""
    pairs = [group.points[:, pair] for group in cells for pair in group.joined]
    return _both_directions(np.concatenate([np.zeros((0, 2), np.int64), *pairs]).T, points)


def cell_edges(cells: Sequence[Cells], count: int, points: int) -> Array:
    """Return the edges between cells that share a facet, (2, E): in both directions, sorted, once.

    Facets are equal if their corners are. All cells at a facet are joined to each other: two, or
    more if surfaces branch. A facet that has collapsed to fewer dimensions does not count.
    """
    facets, owners = [], []
    for group in cells:
        for facet in group.shape.facets:
            corners = np.full((len(group.points), 4), points)  # beyond the last point: no corner
            corners[:, : len(facet)] = group.points[:, facet]
            facets.append(corners)
            owners.append(group.ids)
    corners = np.sort(np.concatenate(facets), axis=1)
    corners[:, 1:][corners[:, 1:] == corners[:, :-1]] = points
    corners.sort(axis=1)
    is_facet = (corners < points).sum(axis=1) >= max(group.shape.dim for group in cells)
    corners, cell = corners[is_facet], np.concatenate(owners)[is_facet]

    # two keys instead of four: (points + 1) ** 2 fits into int64
    low, high = (corners[:, i] * (points + 1) + corners[:, i + 1] for i in (0, 2))
    order = _stable_order(low)
    order = order[_stable_order(high[order])]
    low, high, cell = low[order], high[order], cell[order]
    left = np.arange(len(cell))
    step, pairs = 0, [np.zeros((2, 0), np.int64)]
    while len(left):
        # cells of one facet are consecutive; a cell without a partner at `step` has none after it
        step += 1
        left = left[left + step < len(cell)]
        left = left[(low[left] == low[left + step]) & (high[left] == high[left + step])]
        pairs.append(np.stack([cell[left], cell[left + step]]))
    return _both_directions(np.concatenate(pairs, axis=1), count)


def corner_means(cells: Sequence[Cells], points: Array, count: int) -> Array:
    """Return the mean of each cell's corners, (count, D)."""
    means = np.zeros((count, points.shape[1]), points.dtype)
    for group in cells:
        corners = group.points[:, : group.shape.corners]
        means[group.ids] = points[corners].mean(axis=1)
    return means


def measures(cells: Sequence[Cells], points: Array, count: int) -> Array:
    """Return each cell's length, area or volume, (count,), from its corners.

    A facet that is not flat counts as triangles around the mean of its corners; the area of a cell
    that is not flat is that of its largest projection onto a plane.
    """
    found = np.zeros(count, points.dtype)
    where = np.zeros((len(points), 3), points.dtype)
    where[:, : points.shape[1]] = points
    for group in cells:
        corners = where[group.points[:, : group.shape.corners]]
        if group.shape.dim == 1:
            size = np.linalg.norm(corners[:, 1] - corners[:, 0], axis=1)
        elif group.shape.dim == 2:
            size = np.linalg.norm(_area(corners), axis=1)
        else:
            corners = corners - corners.mean(axis=1, keepdims=True)
            faces = [corners[:, facet] for facet in group.shape.facets]
            size = np.abs(sum(_cone(face) for face in faces))
        found[group.ids] = size
    return found


def _area(corners: Array) -> Array:
    """Return the area vectors of polygons, (C, 3), from their corners in order, (C, K, 3)."""
    spokes = corners[:, 1:] - corners[:, :1]
    area: Array = np.cross(spokes[:, :-1], spokes[:, 1:]).sum(axis=1) / 2
    return area


def _cone(face: Array) -> Array:
    """Return the signed volumes between facets, (C, K, 3), and the origin."""
    # over its triangles, the apex at the mean: (m x a + a x b + b x m) . m is (a x b) . m
    around: Array = np.cross(face, np.roll(face, -1, axis=1)).sum(axis=1)
    size: Array = (around * face.mean(axis=1)).sum(axis=1) / 6
    return size


def _both_directions(pairs: Array, count: int) -> Array:
    low, high = pairs.min(axis=0), pairs.max(axis=0)
    keys = np.sort((low * count + high)[low != high])
    keys = keys[np.diff(keys, prepend=-1) > 0]  # np.unique takes 50 times as long
    low, high = keys // max(count, 1), keys % max(count, 1)
    keys = np.sort(np.concatenate([keys, high * count + low]))
    return np.stack([keys // max(count, 1), keys % max(count, 1)])


def _stable_order(keys: Array) -> Array:
    # three times as fast as NumPy's
    order: Array = torch.from_numpy(keys).argsort(stable=True).numpy()
    return order
