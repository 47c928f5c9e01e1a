"""All cells of a mesh, of any kind, as lists of points; their surface."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from varcomm.graph.mesh.cells import Cells, facets_of
from varcomm.graph.mesh.openfoam import PolyMesh
from varcomm.graph.mesh.ragged import Ragged

__all__ = ["CellLists"]

Array = np.ndarray[Any, Any]

# VTK's numbers of kinds
_TYPES = {
    **{"vertex": 1, "line": 3, "triangle": 5, "polygon": 7, "quad": 9},
    **{"tetra": 10, "hexahedron": 12, "wedge": 13, "pyramid": 14},
}
_POLYHEDRON = 42
_WEDGE = (0, 2, 1, 3, 5, 4)  # meshio has another order of its corners


@dataclass(frozen=True, eq=False)
class CellLists:
    """Cells by their corners, which are rows of `points` (P, 3), in VTK's order.

    `types` (C,) are VTK's numbers of the cells' kinds, and `dims` (C,) their dimensions. `groups`
    are the same cells by kind, or else `source` has the faces of polyhedra.
    """

    points: Array
    types: Array
    corners: Ragged
    dims: Array
    groups: Sequence[Cells] = ()
    source: PolyMesh | None = None

    @classmethod
    def of_groups(cls, groups: Sequence[Cells], points: Array) -> CellLists:
        """Return cells that are given by kind; of higher order, their corners."""
        count = sum(len(group.ids) for group in groups)
        counts, types, dims = (np.zeros(count, np.int64) for _ in range(3))
        for group in groups:
            counts[group.ids] = group.shape.corners
            types[group.ids] = _TYPES[group.kind.rstrip("0123456789")]
            dims[group.ids] = group.shape.dim
        ends = np.cumsum(counts)
        values = np.zeros(counts.sum(), np.int64)
        for group in groups:
            first = ends[group.ids] - group.shape.corners
            order = _WEDGE if types[group.ids[:1]].tolist() == [13] else range(group.shape.corners)
            places = first[:, None] + np.arange(group.shape.corners)
            values[places] = group.points[:, [*order]]
        where = np.zeros((len(points), 3), points.dtype)
        where[:, : points.shape[1]] = points
        return cls(where, types, Ragged(ends, values), dims, groups)

    @classmethod
    def of_case(cls, mesh: PolyMesh) -> CellLists:
        """Return the cells of an OpenFOAM mesh, as polyhedra."""
        count = mesh.num_cells
        types, dims = np.full(count, _POLYHEDRON), np.full(count, 3)
        return cls(mesh.points, types, mesh.corners_of_cells(), dims, (), mesh)

    @property
    def dim(self) -> int:
        """The highest dimension of a cell."""
        return int(self.dims.max())

    def faces_of(self, rows: Array, number: Array) -> Ragged | None:
        """Return VTK's list of faces of some polyhedra: their number, and each with its length.

        `number` (P,) replaces the ids of points.
        """
        if self.source is None:
            return None
        cell, face = self.source.faces_of_cells()
        ends = np.cumsum(np.bincount(cell, minlength=len(self.types)))
        faces = Ragged(ends, face).chosen(rows)
        corners = self.source.faces.chosen(faces.values)
        begins = corners.ends - corners.counts
        stream = np.insert(number[corners.values], begins, corners.counts)
        # the end of each cell's faces in the stream
        long = np.cumsum(corners.counts + 1)[faces.ends - 1] if len(rows) else faces.ends
        begins = np.concatenate([[0], long[:-1]])[: len(rows)]
        return Ragged(long + np.arange(1, len(rows) + 1), np.insert(stream, begins, faces.counts))

    def surface(self, chosen: Array) -> tuple[Ragged, Array]:
        """Return the outline of some cells, bool of (C,): polygons, and the cell of each.

        Cells of a surface are polygons themselves; polygons around volumes are the facets that one
        of the chosen cells has.
        """
        chosen = chosen & (self.dims == self.dim)
        if self.dim == 2:
            rows = np.flatnonzero(chosen)
            return self.corners.chosen(rows), rows
        if self.source is not None:
            other = np.zeros(len(self.source.owner), bool)
            inner = len(self.source.neighbour)
            other[:inner] = chosen[self.source.neighbour]
            own = chosen[self.source.owner]
            faces = np.flatnonzero(own != other)
            cell = self.source.owner[faces]
            cell[other[faces]] = self.source.neighbour[faces[other[faces]]]
            return self.source.faces.chosen(faces), cell
        return self._outer(chosen)

    def _outer(self, chosen: Array) -> tuple[Ragged, Array]:
        none = len(self.points)
        corners, cell = facets_of([each for each in self.groups if each.shape.dim == 3], none)
        corners, cell = corners[chosen[cell]], cell[chosen[cell]]
        key = np.sort(corners, axis=1)
        order = np.lexsort(key.T)
        same = (key[order][1:] == key[order][:-1]).all(axis=1)
        shared = np.zeros(len(key), bool)
        shared[order[1:][same]] = shared[order[:-1][same]] = True
        corners, cell = corners[~shared], cell[~shared]
        counts = (corners < none).sum(axis=1)
        return Ragged(np.cumsum(counts), corners[corners < none]), cell
