"""All cells of a mesh, of any kind, as lists of points; their surface."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from varcomm.graph.mesh.cells import Cells, facets_of, numbered
from varcomm.graph.mesh.polyhedra import PolyMesh
from varcomm.graph.ragged import Array, Ragged

# VTK's numbers of kinds
TYPES = {
    **{"vertex": 1, "line": 3, "triangle": 5, "polygon": 7, "quad": 9, "tetra": 10},
    **{"hexahedron": 12, "wedge": 13, "pyramid": 14, "line3": 21, "triangle6": 22},
    **{"quad8": 23, "tetra10": 24, "hexahedron20": 25, "wedge15": 26, "pyramid13": 27},
    **{"quad9": 28, "hexahedron27": 29, "wedge18": 32, "triangle7": 34},
}
POLYHEDRON = 42
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
    def of_groups(
        cls, groups: Sequence[Cells], points: Array, second_order: bool = False
    ) -> CellLists:
        """Return cells that are given by kind; of higher order, their corners, or else all."""
        count = sum(len(group.ids) for group in groups)
        counts, types, dims = (np.zeros(count, np.int64) for _ in range(3))
        shown = []
        for group in groups:
            kind, width = group.kind.rstrip("0123456789"), group.shape.corners
            if second_order and group.kind in TYPES:
                kind, width = group.kind, group.points.shape[1]
            order = _WEDGE if kind == "wedge" else range(width)
            shown.append(group.points[:, [*order]])
            counts[group.ids], types[group.ids], dims[group.ids] = (
                width,
                TYPES[kind],
                group.shape.dim,
            )
        ends = np.cumsum(counts)
        values = np.zeros(counts.sum(), np.int64)
        for group, table in zip(groups, shown, strict=True):
            width = table.shape[1]
            values[(ends[group.ids] - width)[:, None] + np.arange(width)] = table
        where = np.zeros((len(points), 3), points.dtype)
        where[:, : points.shape[1]] = points
        return cls(where, types, Ragged(ends, values), dims, groups)

    @classmethod
    def of_case(cls, mesh: PolyMesh) -> CellLists:
        """Return the cells of a mesh of polyhedra."""
        count = mesh.num_cells
        types, dims = np.full(count, POLYHEDRON), np.full(count, 3)
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
        number = numbered(np.sort(corners, axis=1))
        outer = np.bincount(number)[number] == 1
        corners, cell = corners[outer], cell[outer]
        counts = (corners < none).sum(axis=1)
        return Ragged(np.cumsum(counts), corners[corners < none]), cell
