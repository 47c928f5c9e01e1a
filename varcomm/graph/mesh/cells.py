"""Cells of a mesh by their kinds: their edges and facets, geometry, and neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch_geometric.utils import remove_self_loops, to_undirected

from varcomm.errors import ArgumentError
from varcomm.graph.ragged import Array

# Points of a cell stand in meshio's order,
# https://github.com/nschloe/meshio/wiki/Node-ordering-in-cells:
# corners first, then a point on each edge, then points inside facets and the cell.


class Shape(NamedTuple):
    """Edges and facets of a cell, by its corners; facets run counterclockwise from outside."""

    dim: int
    corners: int
    edges: list[tuple[int, int]]
    facets: list[list[int]]


def _solid(corners: int, edges: str, facets: str) -> Shape:
    pairs = [(int(pair[0]), int(pair[1])) for pair in edges.split()]
    return Shape(3, corners, pairs, [[*map(int, facet)] for facet in facets.split()])


def _polygon(corners: int) -> Shape:
    edges = [(i, (i + 1) % corners) for i in range(corners)]
    return Shape(2, corners, edges, [list(edge) for edge in edges])


_SHAPES = {
    "vertex": Shape(0, 1, [], []),
    "line": Shape(1, 2, [(0, 1)], [[0], [1]]),
    "triangle": _polygon(3),
    "quad": _polygon(4),
    "tetra": _solid(4, "01 12 20 03 13 23", "021 013 123 203"),
    "pyramid": _solid(5, "01 12 23 30 04 14 24 34", "0321 014 124 234 304"),
    "wedge": _solid(6, "01 12 20 34 45 53 03 14 25", "021 345 0143 1254 2035"),
    "hexahedron": _solid(8, "01 12 23 30 45 56 67 74 04 15 26 37", "0321 4567 0154 1265 2376 3047"),
}

# The facets in which points stand behind those of edges, one each; None is the cell itself.
_MIDDLES: dict[str, list[int | None]] = {
    **{"line3": [], "triangle6": [], "quad8": [], "tetra10": [], "pyramid13": []},
    **{"wedge15": [], "hexahedron20": [], "triangle7": [None], "quad9": [None], "pyramid14": [0]},
    **{"wedge18": [2, 3, 4], "hexahedron27": [5, 3, 2, 4, 0, 1, None]},
}


class Cells(NamedTuple):
    """All cells of one kind, by meshio's name: their points, (C, K), and positions among all."""

    kind: str
    shape: Shape
    points: Array
    ids: Array

    @property
    def joined(self) -> list[tuple[int, int]]:
        """Pairs of points of a cell that are joined, along its edges.

        A point on an edge is between its ends. A point in a facet is joined to the points on the
        facet's edges, and a point in the cell to those in facets, or else to those on edges.
        """
        corners, edges, count = self.shape.corners, self.shape.edges, self.points.shape[1]
        if self.shape.dim == 0 or count == corners:
            return edges
        if self.kind not in _MIDDLES:
            raise ArgumentError(
                f"points of cells of kind {self.kind!r} cannot be joined. Keep their corners, "
                'or let cells be the nodes: nodes="cells".'
            )
        on_edge = range(corners, corners + len(edges))
        pairs = [(end, middle) for middle, edge in zip(on_edge, edges, strict=True) for end in edge]
        inner = [*zip(_MIDDLES[self.kind], range(on_edge.stop, count), strict=True)]
        of_cell = [middle for facet, middle in inner if facet is not None] or on_edge
        for facet, middle in inner:
            around = (
                of_cell
                if facet is None
                else [
                    m
                    for m, edge in zip(on_edge, edges, strict=True)
                    if {*edge} <= {*self.shape.facets[facet]}
                ]
            )
            pairs += [(middle, other) for other in around]
        return pairs


def shape_of(kind: str, points: int = 3) -> Shape:
    """Return the shape of cells of a kind with this number of points, or raise if unsupported."""
    base = kind.rstrip("0123456789")
    if base == "polygon":
        return _polygon(points)
    if base not in _SHAPES:
        raise ArgumentError(
            f"cells of kind {kind!r} are not supported; those that are: "
            f"{', '.join([*_SHAPES, 'polygon', 'polyhedron'])}, and those of higher order. "
            "Split the others, as pyvista.read(path).triangulate() does, and pass its mesh."
        )
    return _SHAPES[base]


def cells_of(blocks: Sequence[tuple[Any, ...]], points: int) -> list[Cells]:
    """Return the cells of a file by kind, or raise if a point is out of range.

    `blocks` are names of kinds, arrays of (C, K), and ids (C,); without ids, cells are numbered.
    A kind may have many blocks.
    """
    groups: dict[tuple[str, int], list[tuple[Array, Array]]] = {}
    first = 0
    for kind, data, *given in blocks:
        table = np.asarray(data, dtype=np.int64)
        if table.size and not (table.min() >= 0 and table.max() < points):
            raise ArgumentError(
                f"cells of kind {kind!r} have points {table.min()}...{table.max()}, out of range "
                f"for {points} points. Write the mesh again."
            )
        ids = given[0] if given else np.arange(first, first + len(table))
        groups.setdefault((kind, table.shape[1]), []).append((table, ids))
        first += len(table)
    return [
        Cells(kind, shape_of(kind, width), *map(np.concatenate, zip(*tables, strict=True)))
        for (kind, width), tables in groups.items()
    ]


def facets_of(cells: Sequence[Cells], points: int) -> tuple[Array, Array]:
    """Return the corners of all facets, (F, 4), and the cell of each, (F,).

    A facet of fewer than four corners is filled up with `points`, which is no corner.
    """
    facets, owners = [np.zeros((0, 4), np.int64)], [np.zeros(0, np.int64)]
    for group in cells:
        for facet in group.shape.facets:
            corners = np.full((len(group.points), 4), points)
            corners[:, : len(facet)] = group.points[:, facet]
            facets.append(corners)
            owners.append(group.ids)
    return np.concatenate(facets), np.concatenate(owners)


def numbered(rows: Array) -> Array:
    """Return the number of each row, (R,), among the distinct rows."""
    order = np.lexsort(rows.T)
    number = np.empty(len(rows), np.int64)
    number[order] = np.cumsum(np.r_[0, (rows[order][1:] != rows[order][:-1]).any(axis=1)])
    return number


def cell_edges(cells: Sequence[Cells], count: int, points: int) -> torch.Tensor:
    """Return the edges between cells that share a facet, (2, E): in both directions, sorted, once.

    Facets are equal if their corners are. All cells at a facet are joined to each other: two, or
    more if surfaces branch. A facet that has collapsed to fewer dimensions does not count.
    """
    facets, cell = facets_of(cells, points)
    corners = np.sort(facets, axis=1)
    corners[:, 1:][corners[:, 1:] == corners[:, :-1]] = points
    corners.sort(axis=1)
    is_facet = (corners < points).sum(axis=1) >= max(group.shape.dim for group in cells)
    corners, cell = corners[is_facet], cell[is_facet]

    # two keys instead of four: (points + 1) ** 2 fits into int64; torch sorts faster than NumPy
    low, high = (torch.from_numpy(corners[:, i] * (points + 1) + corners[:, i + 1]) for i in (0, 2))
    order = low.argsort(stable=True)
    order = order[high[order].argsort(stable=True)]
    rows, cell = torch.stack([low, high])[:, order].numpy(), cell[order.numpy()]
    left = np.arange(len(cell))
    step, pairs = 0, [np.zeros((2, 0), np.int64)]
    while len(left):
        # cells of one facet are consecutive; a cell without a partner at `step` has none after it
        step += 1
        left = left[left + step < len(cell)]
        left = left[(rows[:, left] == rows[:, left + step]).all(axis=0)]
        pairs.append(np.stack([cell[left], cell[left + step]]))
    return both_directions(np.concatenate(pairs, axis=1), count)


def geometry(cells: Sequence[Cells], points: Array, count: int) -> tuple[Array, Array]:
    """Return each cell's mean of corners, (count, D), and its length, area or volume, (count,).

    A facet that is not flat counts as triangles around the mean of its corners. The area of a cell
    that is not flat is the area of its largest projection onto a plane.
    """
    means, sizes = np.zeros((count, 3), points.dtype), np.zeros(count, points.dtype)
    where = np.zeros((len(points), 3), points.dtype)
    where[:, : points.shape[1]] = points
    for group in cells:
        corners = where[group.points[:, : group.shape.corners]]
        means[group.ids] = mean = corners.mean(axis=1)
        corners = corners - mean[:, None]
        if group.shape.dim == 1:
            size = np.linalg.norm(corners[:, 1] - corners[:, 0], axis=1)
        elif group.shape.dim == 2:
            size = np.linalg.norm(_area(corners), axis=1)
        else:
            faces = [corners[:, facet] for facet in group.shape.facets]
            # cones over triangles around m: (m x a + a x b + b x m) . m is (a x b) . m
            cones = [(_area(face) * face.mean(axis=1)).sum(axis=1) / 3 for face in faces]
            size = np.abs(sum(cones))
        sizes[group.ids] = size
    return means[:, : points.shape[1]], sizes


def _area(polygon: Array) -> Array:
    """Return the area vectors of polygons, (C, K, 3), around the origin."""
    area: Array = np.cross(polygon, np.roll(polygon, -1, axis=1)).sum(axis=1) / 2
    return area


def both_directions(pairs: Array, count: int) -> torch.Tensor:
    """Return both directions of each pair, sorted, once, without loops."""
    edges, _ = remove_self_loops(torch.from_numpy(pairs))
    both: torch.Tensor = to_undirected(edges, num_nodes=count)
    return both
