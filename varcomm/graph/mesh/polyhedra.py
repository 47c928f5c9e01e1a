"""Meshes of polyhedra by their faces, as OpenFOAM stores them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from varcomm.errors import ArgumentError
from varcomm.graph.mesh.cells import cells_of, facets_of, numbered
from varcomm.graph.ragged import Array, Ragged


@dataclass(frozen=True, eq=False)
class PolyMesh:
    """A mesh of polyhedra, with the fields that were read.

    `faces` are the rows of `points` (P, 3) of each face. Its normal points from the cell in `owner`
    (F,) to `neighbour`, the other cell of an inner face; inner faces are first. `patches` are
    ranges of faces. `lines` (2, L) joins points along cells that are not polyhedra.
    """

    points: Array
    faces: Ragged
    owner: Array
    neighbour: Array
    patches: Mapping[str, range] = field(default_factory=dict)
    cell_data: dict[str, Array] = field(default_factory=dict)
    point_data: dict[str, Array] = field(default_factory=dict)
    lines: Array = field(default_factory=lambda: np.zeros((2, 0), np.int64))

    @cached_property
    def num_cells(self) -> int:
        """Number of cells."""
        return int(max(self.owner.max(initial=-1), self.neighbour.max(initial=-1))) + 1

    def faces_of_cells(self) -> tuple[Array, Array]:
        """Return (cell, face) pairs, ordered by cell: an inner face belongs to two cells."""
        cell = np.concatenate([self.owner, self.neighbour])
        face = np.concatenate([np.arange(len(self.owner)), np.arange(len(self.neighbour))])
        order = np.argsort(cell, kind="stable")
        return cell[order], face[order]

    def corners_of_cells(self) -> Ragged:
        """Return the points of each cell, each once, ascending."""
        cell, face = self.faces_of_cells()
        corners = self.faces.chosen(face)
        pairs = np.unique(cell[corners.row] * len(self.points) + corners.values)
        ends = np.cumsum(np.bincount(pairs // len(self.points), minlength=self.num_cells))
        return Ragged(ends, pairs % len(self.points))

    def edges(self) -> Array:
        """Return the pairs of points along edges of faces, (2, E), with repetitions."""
        following = np.arange(1, len(self.faces.values) + 1)
        following[self.faces.ends - 1] = self.faces.ends - self.faces.counts
        pairs: Array = np.stack([self.faces.values, self.faces.values[following]])
        return pairs

    @cached_property
    def _centres_and_areas(self) -> tuple[Array, Array]:
        """Centres and area vectors of faces, (F, 3), as openfoam.com has them.

        A face is cut into triangles around the mean of its points. Its area vector is their sum,
        and its centre the mean of their centres, weighted by the lengths of their area vectors.
        """
        first = self.faces.ends - self.faces.counts
        where = self.points - self.points.mean(axis=0)  # around the origin, for precision
        start, end = where[self.edges()].astype(np.float64)
        middle = np.add.reduceat(start, first, axis=0) / self.faces.counts[:, None]
        apex = middle[self.faces.row]
        normal = np.cross(end - start, apex - start)
        weight = np.linalg.norm(normal, axis=1, keepdims=True)
        total = np.add.reduceat(weight, first, axis=0)
        moment = np.add.reduceat(weight * (start + end + apex) / 3, first, axis=0)
        centre = np.divide(moment, total, out=middle, where=total > 0)
        return centre, np.add.reduceat(normal, first, axis=0) / 2

    @property
    def area(self) -> Array:
        """The area vector of each face, (F, 3)."""
        return self._centres_and_areas[1].astype(self.points.dtype)

    def geometry(self) -> tuple[Array, Array]:
        """Return the mean of each cell's corners, (C, 3), and its volume, (C,).

        The volume is the sum of pyramids over the faces, as OpenFOAM has it.
        """
        corners = self.corners_of_cells()
        means = _means(corners.row, self.points[corners.values], self.num_cells)
        cell, volume = self._pyramids()
        volume = np.bincount(cell, volume, self.num_cells)
        return means.astype(self.points.dtype), volume.astype(self.points.dtype)

    def _pyramids(self) -> tuple[Array, Array]:
        """Return the cell and the volume of each face's pyramids: of owners, then of neighbours.

        The apex is the mean of the centres of the cell's faces.
        """
        centre, area = self._centres_and_areas
        cell, face = np.r_[self.owner, self.neighbour], np.r_[: len(centre), : len(self.neighbour)]
        apex = _means(cell, centre[face], self.num_cells)
        volume = (area[face] * (centre[face] - apex[cell])).sum(axis=1) / 3
        volume[len(centre) :] *= -1
        return cell, volume

    def on_patches(self, nodes: str) -> Array:
        """Return whether each cell, or point, has a face on each patch; bool of (N, B)."""
        count = self.num_cells if nodes == "cells" else len(self.points)
        found = np.zeros((count, len(self.patches)), bool)
        for column, faces in enumerate(self.patches.values()):
            chosen = np.arange(faces.start, faces.stop)
            ids = self.owner[chosen] if nodes == "cells" else self.faces.chosen(chosen).values
            found[ids, column] = True
        return found


def _means(row: Array, values: Array, count: int) -> Array:
    sums = [np.bincount(row, values[:, k], count) for k in range(3)]
    means: Array = np.stack(sums, axis=1) / np.bincount(row, minlength=count)[:, None]
    return means


def polyhedral(
    points: Array,
    blocks: Sequence[tuple[str, Any, Array]],
    faces: Ragged,
    cell: Array,
    point_data: Mapping[str, Array],
    cell_data: Mapping[str, Array],
) -> PolyMesh:
    """Return a mesh of polyhedra and of other cells, by their faces.

    `faces` belong to the polyhedra in `cell` (F,). `blocks` are other cells: the name of their
    kind, their points, and their ids. Cells in fewer dimensions only join points.
    """
    none, groups = len(points), cells_of(blocks, len(points))
    solid = [group for group in groups if group.shape.dim == 3]
    flat = [group for group in groups if group.shape.dim < 3]
    lines = [group.points[:, pair].T for group in flat for pair in group.joined]
    corners, owner = facets_of(solid, none)
    counts = np.r_[faces.counts, (corners < none).sum(axis=1)]
    faces = Ragged(np.cumsum(counts), np.r_[faces.values, corners[corners < none]])
    if faces.values.size and not 0 <= faces.values.min() <= faces.values.max() < none:
        raise ArgumentError(
            f"faces refer to points out of range for {none} points. Write it again."
        )
    ids, cell = np.unique(np.r_[cell, owner], return_inverse=True)
    order = np.argsort(cell, kind="stable")
    faces, cell = faces.chosen(order), cell[order]

    table = np.full((len(cell), faces.counts.max()), none)
    place = np.arange(len(faces.values)) - (faces.ends - faces.counts)[faces.row]
    table[faces.row, place] = faces.values
    number = numbered(np.sort(table, axis=1))
    shared = np.bincount(number)
    if shared.max() > 2:
        raise ArgumentError("more than two polyhedra have the same face. Remove repeated cells.")
    first, last = np.empty_like(shared), np.empty_like(shared)
    first[number[::-1]], last[number] = np.arange(len(cell))[::-1], np.arange(len(cell))
    rows = np.r_[np.flatnonzero(shared == 2), np.flatnonzero(shared == 1)]
    first, neighbour = first[rows], cell[last[np.flatnonzero(shared == 2)]]
    mesh = PolyMesh(points, faces.chosen(first), cell[first], neighbour)
    # files may have the points of a face in either order
    inward = mesh._pyramids()[1][: len(rows)] < 0
    return replace(
        mesh,
        faces=mesh.faces.mirrored(inward),
        cell_data={name: values[ids] for name, values in cell_data.items()},
        point_data=dict(point_data),
        lines=np.concatenate([mesh.lines, *lines], axis=1),
    )
