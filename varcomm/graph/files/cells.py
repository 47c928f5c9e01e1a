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


class _Shape:
    """Edges and facets of a cell, by its corners; facets run counterclockwise from outside."""

    def __init__(self, dim: int, edges: str, facets: str) -> None:
        self.dim = dim
        self.edges = [(int(a), int(b)) for a, b in edges.split()]
        self.facets = [[int(corner) for corner in facet] for facet in facets.split()]
        self.corners = 1 + max((max(facet) for facet in self.facets), default=0)


_SHAPES = {
    "vertex": _Shape(0, "", ""),
    "line": _Shape(1, "01", "0 1"),
    "triangle": _Shape(2, "01 12 20", "01 12 20"),
    "quad": _Shape(2, "01 12 23 30", "01 12 23 30"),
    "tetra": _Shape(3, "01 12 20 03 13 23", "021 013 123 203"),
    "pyramid": _Shape(3, "01 12 23 30 04 14 24 34", "0321 014 124 234 304"),
    "wedge": _Shape(3, "01 12 20 34 45 53 03 14 25", "021 345 0143 1254 2035"),
    "hexahedron": _Shape(3, "01 12 23 30 45 56 67 74 04 15 26 37", "0321 4567 0154 1265 2376 3047"),
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
    def shape(self) -> _Shape:
        """Edges and facets."""
        shape = _shape(self.kind)
        if shape is None:
            shape = _Shape(2, "", "")
            shape.corners = self.points.shape[1]
            shape.edges = [(i, (i + 1) % shape.corners) for i in range(shape.corners)]
            shape.facets = [list(edge) for edge in shape.edges]
        return shape

    @property
    def corners(self) -> Array:
        """The points that are corners."""
        return self.points[:, : self.shape.corners]

    @property
    def joined(self) -> list[tuple[int, int]]:
        """Pairs of points of a cell that are joined, along its edges."""
        shape = self.shape
        if self.kind in _INNER:
            middle = [(*ends, shape.corners + i) for i, ends in enumerate(shape.edges)]
            along = [pair for a, b, m in middle for pair in ((a, m), (m, b))]
            return along + [(a, b) for a, others in _INNER[self.kind].items() for b in others]
        if shape.dim and self.points.shape[1] != shape.corners:
            raise ArgumentError(
                f"points of cells of kind {self.kind!r} cannot be joined; quadratic ones that "
                f'can be: {", ".join(_INNER)}. Or let cells be the nodes: nodes="cells".'
            )
        return shape.edges


def _shape(kind: str) -> _Shape | None:
    """Return the shape of a kind, None for a polygon, or raise if it is not supported."""
    base = kind.rstrip("0123456789")
    if base not in (*_SHAPES, "polygon"):
        raise ArgumentError(
            f"cells of kind {kind!r} are not supported; those that are: "
            f"{', '.join([*_SHAPES, 'polygon'])}, and those of higher order."
        )
    return _SHAPES.get(base)


def dimension(kind: str) -> int:
    """Return the dimension of cells of a kind, or raise if the kind is not supported."""
    shape = _shape(kind)
    return 2 if shape is None else shape.dim


def cells_of(blocks: Sequence[tuple[str, Any]], points: int) -> list[Cells]:
    """Return the cells of a file by kind, or raise if a point is out of range.

    `blocks` are names of kinds and arrays of (C, K); a kind may have many blocks.
    """
    groups: dict[tuple[str, int], list[tuple[Array, Array]]] = {}
    first = 0
    for kind, data in blocks:
        table = np.asarray(data, dtype=np.int64)
        if table.size and not (table.min() >= 0 and table.max() < points):
            raise ArgumentError(
                f"cells of kind {kind!r} have points {table.min()}...{table.max()}, out of range "
                f"for {points} points."
            )
        ids = np.arange(first, first + len(table))
        groups.setdefault((kind, table.shape[1]), []).append((table, ids))
        first += len(table)
    return [
        Cells(kind, *(np.concatenate(parts) for parts in zip(*tables, strict=True)))
        for (kind, _), tables in groups.items()
    ]


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

    # two keys instead of four: (points + 1) ** 2 fits into int64; torch sorts faster than NumPy
    low, high = (torch.from_numpy(corners[:, i] * (points + 1) + corners[:, i + 1]) for i in (0, 2))
    order = low.argsort(stable=True)
    order = order[high[order].argsort(stable=True)]
    low, high, cell = low[order].numpy(), high[order].numpy(), cell[order.numpy()]
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
        means[group.ids] = points[group.corners].mean(axis=1)
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
        corners = where[group.corners]
        if group.shape.dim == 1:
            size = np.linalg.norm(corners[:, 1] - corners[:, 0], axis=1)
        elif group.shape.dim == 2:
            spokes = corners[:, 1:] - corners[:, :1]
            areas = np.cross(spokes[:, :-1], spokes[:, 1:]).sum(axis=1) / 2
            size = np.linalg.norm(areas, axis=1)
        else:
            corners = corners - corners.mean(axis=1, keepdims=True)
            faces = [corners[:, facet] for facet in group.shape.facets]
            size = np.abs(sum(_cone(face) for face in faces))
        found[group.ids] = size
    return found


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
    low, high = np.divmod(keys, max(count, 1))
    keys = np.sort(np.concatenate([keys, high * count + low]))
    return np.stack(np.divmod(keys, max(count, 1)))
