"""Read VTU files of any version, in pieces (PVTU), and as a series in time (PVD)."""

from __future__ import annotations

import lzma
import re
import zlib
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np

from varcomm.errors import ArgumentError
from varcomm.graph.mesh.cell_lists import POLYHEDRON, TYPES
from varcomm.graph.mesh.polyhedra import PolyMesh, polyhedral
from varcomm.graph.ragged import Array, Ragged, spread

Fields = dict[str, Array]

_KINDS = {number: kind for kind, number in TYPES.items()} | {2: "vertex"}
# meshio's kinds and order of points
_ORDER: dict[int, Any] = {
    8: ("quad", [0, 1, 3, 2]),
    11: ("hexahedron", [0, 1, 3, 2, 4, 5, 7, 6]),
    13: ("wedge", [0, 2, 1, 3, 5, 4]),
}
_UNPACK: dict[str, Callable[[bytes], bytes]] = {
    "vtkZLibDataCompressor": zlib.decompress,
    "vtkLZMADataCompressor": lzma.decompress,
}
# bits of vtkGhostType: a copy of another piece's cell, a refined cell, a hidden cell
_GHOST = 1 | 8 | 32


class Block(NamedTuple):
    """Cells of one kind, by meshio's name, and their points (C, K)."""

    type: str
    data: Array


class BlockMesh(NamedTuple):
    """Cells in blocks of one kind; fields of cells have an array per block."""

    points: Array
    cells: list[Block]
    point_data: Fields
    cell_data: dict[str, list[Array]]


class _Piece(NamedTuple):
    """Cells by their points; of polyhedra, the points of each face and the cell of each face."""

    points: Array
    types: Array
    corners: Ragged
    faces: Ragged
    cell_of_face: Array
    point_data: Fields
    cell_data: Fields


def read_vtu(path: Path, step: int) -> BlockMesh | PolyMesh:
    """Return a BlockMesh, or a PolyMesh if some cells are polyhedra."""
    pieces = [piece for piece in _pieces(path, step) if len(piece.types)]
    if not pieces:
        raise ArgumentError("it has no cells. Pass a mesh of lines, polygons or solids.")
    return _source(pieces[0] if len(pieces) == 1 else _merged(pieces))


def step_of(steps: int, step: int) -> int:
    """Return a step as a number from 0; negative steps count from the end."""
    if not -steps <= step < steps:
        raise ArgumentError(
            f"it has {steps} steps. Pass a step in {-steps}...{steps - 1}; got {step}."
        )
    return step % steps


def _pieces(path: Path, step: int) -> list[_Piece]:
    file = _File(path)
    root, kind = file.root, file.root.get("type")
    if kind == "Collection":
        parts = [(float(p.get("timestep", 0)), p.get("file", "")) for p in root.iter("DataSet")]
        times = sorted({time for time, _ in parts})
        chosen = times[step_of(len(times), step)]
        names = [name for time, name in parts if time == chosen]
    else:
        step_of(1, step)
        if kind == "UnstructuredGrid":
            return [file.piece(piece) for piece in root.iter("Piece")]
        if kind != "PUnstructuredGrid":
            raise ArgumentError(
                f"{path.name} holds {kind}. Pass the mesh that pyvista.read({path.name!r}) returns."
            )
        names = [piece.get("Source", "") for piece in root.iter("Piece")]
    return [piece for name in names for piece in _pieces(path.parent / name, 0)]


class _File:
    """An XML file of VTK: its elements, and the data appended to them."""

    def __init__(self, path: Path) -> None:
        content = path.read_bytes()
        begin = re.search(rb"<AppendedData\s[^>]*>\s*_", content)
        self._appended, self._is_raw = memoryview(b""), False
        if begin:
            self._appended = memoryview(content)[begin.end() :]
            self._is_raw = b"base64" not in begin[0]
            content = content[: begin.start()] + b"</VTKFile>"
        try:
            self.root = ElementTree.fromstring(content)
        except ElementTree.ParseError as error:
            fault = "is empty" if not content.strip() else "is not an XML file"
            if content.lstrip().startswith(b"<"):
                fault = f"is cut off or damaged: an error in its XML is at line {error.position[0]}"
            raise ArgumentError(
                f"{path.name} {fault}. Write the file again, or pass the file of a mesh."
            ) from error
        if self.root.tag != "VTKFile":
            raise ArgumentError(
                f"{path.name} is no file of VTK: its XML begins with <{self.root.tag}>. Pass the "
                "file of a mesh."
            )
        self._order: Any = ">" if self.root.get("byte_order") == "BigEndian" else "<"
        compressor = self.root.get("compressor")
        self._unpack = _UNPACK.get(compressor) if compressor else None
        if compressor and self._unpack is None:
            raise ArgumentError(
                f"{path.name} is compressed with {compressor}. Pass the mesh that "
                f"pyvista.read({path.name!r}) returns, or compress with zlib."
            )

    def piece(self, node: ElementTree.Element) -> _Piece:
        """Return a piece, or raise if an array has another length than its counts."""
        cells = self._fields(node, "Cells")
        (points,) = self._fields(node, "Points").values()
        point_data, cell_data = self._fields(node, "PointData"), self._fields(node, "CellData")
        types, corners = cells["types"], _ragged(cells, "offsets", "connectivity")
        empty = np.zeros(0, np.int64)
        faces, cell_of_face = Ragged(empty, empty), empty
        if "face_connectivity" in cells:
            faces = _ragged(cells, "face_offsets", "face_connectivity")
            faces_of = _ragged(cells, "polyhedron_offsets", "polyhedron_to_faces")
            faces, cell_of_face = faces.chosen(faces_of.values), faces_of.row
        elif len(cells.get("faces", empty)):
            faces, cell_of_face = _unrolled(cells["faces"], np.flatnonzero(types == POLYHEDRON))
        for count, arrays in (
            (node.get("NumberOfPoints"), [points, *point_data.values()]),
            (node.get("NumberOfCells"), [types, corners.ends, *cell_data.values()]),
        ):
            if {str(len(values)) for values in arrays} != {count}:
                raise ArgumentError("its arrays are incomplete. Write it again.")
        return _Piece(points, types, corners, faces, cell_of_face, point_data, cell_data)

    def _fields(self, node: ElementTree.Element, part: str) -> Fields:
        """Return the arrays of a part of a piece; strings too, but in the dtype of strings."""
        marks = [f"_PYVISTA_BITARRAY_{part.removesuffix('Data').upper()}_"]
        marked = [self._values(e) for e in self.root.iter("Array") if e.get("Name") in marks]
        bools = b"".join(values.tobytes() for values in marked).split(b"\0")
        rows = int(node.get("NumberOfCells" if part == "CellData" else "NumberOfPoints", 0))
        fields = {}
        for item in node.findall(f"{part}/*"):
            name, columns = item.get("Name", part), item.get("NumberOfComponents")
            values = self._values(item)
            if item.get("type") == "String":
                values = np.array(values.tobytes().decode("latin-1").split("\0")[:-1])
            if name.encode() in bools or item.get("type") == "Bit":
                values = values.astype(bool)[: rows * int(columns or 1)]  # bits fill up a byte
            fields[name] = values.reshape(-1, int(columns)) if columns else values
        return fields

    def _values(self, item: ElementTree.Element) -> Array:
        kind, text = item.get("type", ""), (item.text or "").strip()
        dtype = np.dtype("uint8" if kind in ("Bit", "String") else kind.lower())
        form = item.get("format", "ascii")
        if form == "ascii":
            return np.array(text.split(), dtype)
        is_appended = form == "appended"
        data = self._appended[int(item.attrib["offset"]) :] if is_appended else text.encode()
        content = self._content(data, is_appended and self._is_raw)
        values = np.frombuffer(content, dtype.newbyteorder(self._order)).astype(dtype)
        return np.unpackbits(values) if kind == "Bit" else values

    def _content(self, data: Any, is_raw: bool) -> bytes:
        """Return the bytes behind a header of lengths; in base64, a header may stand apart."""
        head = np.dtype(f"{self._order}u{8 if self.root.get('header_type') == 'UInt64' else 4}")

        def span(count: int) -> int:
            return count if is_raw else -(-count // 3) * 4

        def decoded(begin: int, count: int) -> bytes:
            part = data[begin : begin + span(count)]
            return (bytes(part) if is_raw else b64decode(part))[:count]

        first = int(np.frombuffer(decoded(0, head.itemsize), head)[0])
        if self._unpack is None:
            if is_raw or bytes(data[span(head.itemsize) - 1 : span(head.itemsize)]) == b"=":
                return decoded(span(head.itemsize), first)
            return decoded(0, head.itemsize + first)[head.itemsize :]
        length = head.itemsize * (3 + first)
        sizes = np.frombuffer(decoded(0, length), head)[3:].astype(np.int64)
        ends = np.cumsum(sizes)
        packed = decoded(span(length), int(sizes.sum()))
        return b"".join(
            self._unpack(packed[end - size : end]) for size, end in zip(sizes, ends, strict=True)
        )


def _ragged(arrays: Fields, ends: str, values: str) -> Ragged:
    lists = Ragged(arrays[ends].astype(np.int64), arrays[values].astype(np.int64))
    if (lists.counts < 0).any() or len(lists.values) != (lists.ends[-1] if len(lists.ends) else 0):
        raise ArgumentError("its arrays are incomplete. Write it again.")
    return lists


def _unrolled(stream: Array, cells: Array) -> tuple[Ragged, Array]:
    """Return faces, and the cell of each, from VTK's list: per cell their number, and each."""
    words, at, begins, number_of_faces = stream.tolist(), 0, [], []
    while at < len(words):
        number_of_faces.append(words[at])
        at += 1
        for _ in range(number_of_faces[-1]):
            begins.append(at + 1)
            at += 1 + words[at]
    begin = np.array(begins, np.int64)
    counts = stream[begin - 1].astype(np.int64)
    faces = Ragged(np.cumsum(counts), stream[spread(begin, counts)].astype(np.int64))
    return faces, np.repeat(cells, number_of_faces)


def _merged(pieces: list[_Piece]) -> _Piece:
    """Return one piece, in which points of two pieces at the same place are one point."""
    points = np.concatenate([piece.points for piece in pieces]) + 0.0
    counts = [len(piece.points) for piece in pieces]
    _, first, number = np.unique(points, axis=0, return_index=True, return_inverse=True)
    keep, number = np.sort(first), number.reshape(-1)
    in_piece = number * len(pieces) + np.repeat(np.arange(len(pieces)), counts)
    if len(np.unique(in_piece)) < len(points):
        raise ArgumentError(
            "a piece has several points at one place, so that pieces cannot be joined there. Join "
            "them with ParaView's filter Clean to Grid."
        )
    ids = np.split(np.searchsorted(keep, first)[number], np.cumsum(counts)[:-1])
    first_cell = np.cumsum([0, *(len(piece.types) for piece in pieces[:-1])])

    def fields(each: list[Fields]) -> Fields:
        if any(other.keys() != each[0].keys() for other in each):
            raise ArgumentError("its pieces have different fields. Write them again.")
        return {name: np.concatenate([other[name] for other in each]) for name in each[0]}

    def lists(each: list[Ragged]) -> Ragged:
        values = [new[old.values] for new, old in zip(ids, each, strict=True)]
        return Ragged(np.cumsum(np.concatenate([e.counts for e in each])), np.concatenate(values))

    _, types, corners, faces, cells, at_points, at_cells = map(list, zip(*pieces, strict=True))
    return _Piece(
        points[keep],
        np.concatenate(types),
        lists(corners),
        lists(faces),
        np.concatenate([cell + start for cell, start in zip(cells, first_cell, strict=True)]),
        {name: values[keep] for name, values in fields(at_points).items()},
        fields(at_cells),
    )


def _source(piece: _Piece) -> BlockMesh | PolyMesh:
    """Return a mesh of these cells, without copies of other pieces' cells."""
    cell_data = dict(piece.cell_data)
    ghosts = cell_data.pop("vtkGhostType", np.zeros(len(piece.types), np.uint8)) & _GHOST
    rows = np.flatnonzero((ghosts == 0) & (piece.types != 0))
    types, corners = piece.types[rows], piece.corners.chosen(rows)
    cell_data = {name: values[rows] for name, values in cell_data.items()}
    unknown = {*types.tolist()} - _KINDS.keys() - _ORDER.keys() - {POLYHEDRON}
    if unknown:
        raise ArgumentError(
            f"cells of VTK's types {sorted(unknown)} are not supported. Pass the mesh that "
            "pyvista.read(path).triangulate() returns."
        )
    # cells of one kind and number of points that follow each other are a block
    is_new = (types[1:] != types[:-1]) | (corners.counts[1:] != corners.counts[:-1])
    blocks = []
    for ids in np.split(np.arange(len(rows)), np.flatnonzero(is_new) + 1):
        if len(ids) and types[ids[0]] != POLYHEDRON:
            kind, order = _ORDER.get(types[ids[0]]) or (_KINDS[types[ids[0]]], slice(None))
            blocks.append((kind, corners.chosen(ids).values.reshape(len(ids), -1)[:, order], ids))
    if (types == POLYHEDRON).any():
        number = np.full(len(piece.types), -1)
        number[rows] = np.arange(len(rows))
        faces = np.flatnonzero(number[piece.cell_of_face] >= 0)
        cell = number[piece.cell_of_face[faces]]
        faces_of = piece.faces.chosen(faces)
        return polyhedral(piece.points, blocks, faces_of, cell, piece.point_data, cell_data)
    return BlockMesh(
        piece.points,
        [Block(kind, ids) for kind, ids, _ in blocks],
        piece.point_data,
        {name: [values[ids] for *_, ids in blocks] for name, values in cell_data.items()},
    )
