"""Pieces of a mesh as VTU files, their index as PVTU, and a series in time as PVD."""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import quoteattr

import numpy as np
import torch

from varcomm.graph.mesh.cell_lists import CellLists
from varcomm.graph.ragged import Array, Ragged

Fields = Mapping[str, Array]

_NAMES = {"f": "Float", "i": "Int", "u": "UInt"}


class Step(NamedTuple):
    """Fields of a rank's piece at one time; an index needs only their dtypes and columns."""

    number: int
    time: float
    point_data: Fields
    cell_data: Fields


@dataclass(frozen=True, eq=False)
class Piece:
    """Some cells of a mesh, with the points that they need.

    `corners` and `faces` refer to rows of `points`; only polyhedra have `faces`.
    """

    points: Array
    types: Array
    corners: Ragged
    faces: Ragged | None

    @classmethod
    def of(cls, lists: CellLists, rows: Array, points: Array) -> Piece:
        """Return chosen cells, with chosen points, among which are all of their corners."""
        number = np.full(len(lists.points), -1)
        number[points] = np.arange(len(points))
        corners = lists.corners.chosen(rows)
        return cls(
            lists.points[points],
            lists.types[rows],
            Ragged(corners.ends, number[corners.values]),
            lists.faces_of(rows, number),
        )


def stored(given: Any) -> Array | None:
    """Return values as rows of numbers, as VTU stores them; None for other values."""
    if isinstance(given, torch.Tensor):
        given = (given.float() if given.dtype == torch.bfloat16 else given).detach().cpu()
    values: Array = np.asarray(given)
    if values.dtype.kind not in "fiub" or values.itemsize > 8 or values.ndim == 0:
        return None
    kinds = {np.dtype(np.bool_): np.uint8, np.dtype(np.float16): np.float32}
    values = values.astype(values.dtype.newbyteorder("="), copy=False)
    values = values.astype(kinds.get(values.dtype, values.dtype), copy=False)
    return values.reshape(len(values), prod(values.shape[1:])) if values.ndim > 2 else values


def write_piece(
    path: Path,
    piece: Piece,
    point_data: Mapping[str, Array | None],
    cell_data: Mapping[str, Array | None],
) -> None:
    """Write a VTU file; fields are rows of numbers, by name, and None is left out."""
    cells: dict[str, Array | None] = {
        "connectivity": piece.corners.values.astype(np.int64),
        "offsets": piece.corners.ends.astype(np.int64),
        "types": piece.types.astype(np.uint8),
    }
    if piece.faces is not None:
        cells |= {"faces": piece.faces.values.astype(np.int64), "faceoffsets": piece.faces.ends}
    parts: dict[str, Mapping[str, Array | None]] = {
        "PointData": point_data,
        "CellData": cell_data,
        "Points": {"Points": piece.points},
        "Cells": cells,
    }
    with path.open("w", encoding="utf-8") as file:
        file.write(_head("UnstructuredGrid"))
        file.write(
            f'<Piece NumberOfPoints="{len(piece.points)}" NumberOfCells="{len(piece.types)}">\n'
        )
        for part, fields in parts.items():
            file.write(f"<{part}>\n")
            for name, values in fields.items():
                if values is not None:
                    file.write(f'<DataArray {_described(name, values)} format="binary">\n')
                    content = np.ascontiguousarray(values)
                    size = np.array([content.nbytes], np.uint64)
                    file.write(base64.b64encode(size.tobytes() + content.tobytes()).decode())
                    file.write("\n</DataArray>\n")
            file.write(f"</{part}>\n")
        file.write("</Piece>\n</UnstructuredGrid>\n</VTKFile>\n")


class VtuSeries:
    """A PVD file of times, an index PVTU for each, and a VTU file for each and each rank.

    `outline` holds the number of cells of this rank's piece.
    """

    def __init__(self, path: Path, rank: int, piece: Piece) -> None:
        self._path, self._folder, self._rank = path, path.with_suffix(""), rank
        self._piece, self.outline = piece, [len(piece.types)]
        self._steps: list[str] = []

    @staticmethod
    def remove(path: Path) -> None:
        """Remove the indexes of an earlier series, which would list new pieces beside old ones."""
        for index in (path, *path.with_suffix("").glob("[0-9]*.pvtu")):
            index.unlink(missing_ok=True)

    def write(self, step: Step) -> None:
        """Write the piece of this rank."""
        if self.outline[0]:
            path = self._folder / f"{step.number:05}_{self._rank}.vtu"
            with replacing(path) as half:
                write_piece(half, self._piece, step.point_data, step.cell_data)

    def index(self, outlines: Sequence[Sequence[int]], step: Step) -> None:
        """Write the index of a step and the series up to it."""
        lines = [_head("PUnstructuredGrid", ' GhostLevel="0"')]
        parts = {
            "PPointData": step.point_data,
            "PCellData": step.cell_data,
            "PPoints": {"Points": self._piece.points},
        }
        for part, fields in parts.items():
            arrays = [f"<PDataArray {_described(name, v)}/>\n" for name, v in fields.items()]
            lines += [f"<{part}>\n", *arrays, f"</{part}>\n"]
        ranks = [rank for rank, outline in enumerate(outlines) if outline[0]]
        lines += [f'<Piece Source="{step.number:05}_{rank}.vtu"/>\n' for rank in ranks]
        index = self._folder / f"{step.number:05}.pvtu"
        replace(index, [*lines, "</PUnstructuredGrid>\n</VTKFile>\n"])
        name = quoteattr(f"{self._folder.name}/{index.name}")
        line = f'<DataSet timestep="{step.time!r}" group="" part="0" file={name}/>\n'
        steps = [*self._steps, line]
        replace(self._path, [_head("Collection"), *steps, "</Collection>\n</VTKFile>\n"])
        self._steps = steps


def _head(kind: str, more: str = "") -> str:
    order = "LittleEndian" if sys.byteorder == "little" else "BigEndian"
    return (
        f'<?xml version="1.0"?>\n<VTKFile type="{kind}" version="1.0" byte_order="{order}" '
        f'header_type="UInt64">\n<{kind}{more}>\n'
    )


def _described(name: str, values: Array) -> str:
    kind = f"{_NAMES[values.dtype.kind]}{8 * values.dtype.itemsize}"
    columns = f' NumberOfComponents="{values.shape[1]}"' if values.ndim > 1 else ""
    return f'type="{kind}" Name={quoteattr(name)}{columns}'


def replace(path: Path, lines: Sequence[str]) -> None:
    """Write a text file at once."""
    with replacing(path) as half:
        half.write_text("".join(lines), encoding="utf-8")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a new path, which is renamed at the end: a reader never sees half of a file."""
    half = path.with_name(path.name + ".part")
    yield half
    os.replace(half, path)
