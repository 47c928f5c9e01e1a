"""A series in time as an XDMF file, with the pieces of ranks in HDF5 files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

import numpy as np

from varcomm.errors import ArgumentError
from varcomm.graph.libraries import package
from varcomm.graph.mesh.vtu import Fields, Piece, Step, replace, replacing
from varcomm.graph.ragged import Array

# XDMF's numbers of kinds of cells by VTK's; up to 3, the number of points follows the kind
_KINDS = {1: 1, 3: 2, 5: 4, 7: 3, 9: 5, 10: 6, 12: 9, 13: 8, 14: 7, 42: 16}
# ASCII, without slash, colon, outer spaces and a dot at the beginning. VTK 9.7.2 crashes at "." and
# at letters outside ASCII, and leaves out a field whose name has a colon or ends with a space.
_NAME = re.compile(r"(?!\.)[!-.0-9;-~]([ -.0-9;-~]*[!-.0-9;-~])?")


def check_series(path: Path) -> None:
    """Raise if h5py is not installed, or a series cannot have this name."""
    if not _NAME.fullmatch(path.stem):
        raise ArgumentError(
            "the name of an XDMF series must be ASCII without ':' or a dot in front; got "
            f"{path.name!r}. Pass another name or a path that ends in .pvd."
        )
    package("h5py", str(path))


def check_field(name: str, values: Array) -> None:
    """Raise ArgumentError if XDMF cannot have a field of this name or dtype."""
    if not _NAME.fullmatch(name):
        raise ArgumentError(
            f"{name!r} cannot be the name of a field in XDMF. Pass a name in ASCII without '/' "
            "and ':' that does not begin with a dot or end with a space."
        )
    if values.dtype == np.uint64:  # VTK would read 32 bits
        raise ArgumentError(f"{name} must not be of uint64 in XDMF. Pass int64.")


class XdmfSeries:
    """A spatial collection of the pieces of ranks for each step, in a temporal collection.

    `outline` holds the numbers of cells, entries of the topology and points of this rank's piece.
    """

    def __init__(self, path: Path, rank: int, piece: Piece) -> None:
        self._path, self._folder, self._rank = path, path.with_suffix(""), rank
        self._cells, self._points = _topology(piece), piece.points
        self.outline = [len(piece.types), len(self._cells), len(piece.points)]
        self._steps: list[str] = []

    @staticmethod
    def remove(path: Path) -> None:
        """Remove an earlier series, which would list new pieces beside old ones."""
        path.unlink(missing_ok=True)

    def write(self, step: Step) -> None:
        """Write the piece of this rank."""
        if self.outline[0]:
            if step.number == 0:
                self._save("mesh", {"cells": self._cells, "points": self._points})
            self._save(f"{step.number:05}", {**step.point_data, **step.cell_data})

    def _save(self, name: str, arrays: Fields) -> None:
        h5py = package("h5py", str(self._path))
        path = self._folder / f"{name}_{self._rank}.h5"
        with replacing(path) as half, h5py.File(half, "w") as file:
            for key, values in arrays.items():
                file[key] = values

    def index(self, outlines: Sequence[Sequence[int]], step: Step) -> None:
        """Write the series up to a step."""
        grids = [
            self._grid(outline, rank, step) for rank, outline in enumerate(outlines) if outline[0]
        ]
        head = f'<Grid Name="step {step.number}" GridType="Collection" CollectionType="Spatial">\n'
        steps = [*self._steps, head, f'<Time Value="{step.time!r}"/>\n', *grids, "</Grid>\n"]
        begin = '<Grid Name="series" GridType="Collection" CollectionType="Temporal">\n'
        lines = ['<?xml version="1.0"?>\n<Xdmf Version="3.0">\n<Domain>\n', begin, *steps]
        replace(self._path, [*lines, "</Grid>\n</Domain>\n</Xdmf>\n"])
        self._steps = steps

    def _grid(self, outline: Sequence[int], rank: int, step: Step) -> str:
        cells, entries, points = outline

        def item(name: str, key: str, values: Array, rows: int) -> str:
            shape = " ".join(map(str, (rows, *values.shape[1:])))
            kind = {"f": "Float", "i": "Int", "u": "UInt"}[values.dtype.kind]
            where = escape(f"{self._folder.name}/{name}_{rank}.h5:/{key}")
            return (
                f'<DataItem Format="HDF" NumberType="{kind}" Precision="{values.dtype.itemsize}" '
                f'Dimensions="{shape}">{where}</DataItem>'
            )

        def attribute(key: str, center: str, values: Array, rows: int) -> str:
            # VTK reads a Vector of any length, and no Matrix
            kind = "Scalar" if values.shape[1:] in ((), (1,)) else "Vector"
            data = item(f"{step.number:05}", key, values, rows)
            return (
                f'<Attribute Name={quoteattr(key)} AttributeType="{kind}" Center="{center}">'
                f"{data}</Attribute>\n"
            )

        topology = item("mesh", "cells", self._cells, entries)
        geometry = item("mesh", "points", self._points, points)
        attributes = [attribute(key, "Node", v, points) for key, v in step.point_data.items()]
        attributes += [attribute(key, "Cell", v, cells) for key, v in step.cell_data.items()]
        return (
            f'<Grid Name="rank {rank}" GridType="Uniform">\n'
            f'<Topology TopologyType="Mixed" NumberOfElements="{cells}">{topology}</Topology>\n'
            f'<Geometry GeometryType="XYZ">{geometry}</Geometry>\n{"".join(attributes)}</Grid>\n'
        )


def _topology(piece: Piece) -> Array:
    """Return for each cell its kind, its number of points if the kind has none, and its points."""
    cells = piece.corners if piece.faces is None else piece.faces
    kinds = np.array([_KINDS[kind] for kind in piece.types.tolist()], np.int64)
    heads = np.stack([kinds, cells.counts], axis=1)
    shown = np.stack([kinds > 0, kinds <= 3], axis=1)
    begins = np.repeat(cells.ends - cells.counts, shown.sum(axis=1))
    return np.insert(cells.values, begins, heads[shown]).astype(np.int64)
