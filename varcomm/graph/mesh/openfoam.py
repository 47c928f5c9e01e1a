"""The mesh of an OpenFOAM case, and the fields of one of its times.

The files are the files of ``polyMesh``: points, faces, owner, neighbour and boundary. They are
ascii or binary, with labels of 32 or 64 bits, scalars of 4 or 8 bytes, plain or ``.gz``.
"""

from __future__ import annotations

import gzip
import logging
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from varcomm.errors import ArgumentError
from varcomm.graph.mesh.polyhedra import PolyMesh
from varcomm.graph.ragged import Array, Ragged

logger = logging.getLogger("varcomm")

_COLUMNS = {"Scalar": 1, "SphericalTensor": 1, "Vector": 3, "SymmTensor": 6, "Tensor": 9}
_COMMENT = re.compile(rb"//[^\n]*|/\*.*?\*/", re.DOTALL)
_SPACE = rb"(?:\s|//[^\n]*\n|/\*.*?\*/)*+"
_WORD = r'("[^"]*"|[^\s;{}()"]+)'


def read_case(path: Path) -> PolyMesh:
    """Read an OpenFOAM case.

    `path` is a case, its ``.foam`` file, its ``polyMesh`` folder, or the folder of a time, whose
    fields are read.
    """
    folders = _mesh_folders(path)
    points = _list(_file(folders, "points"), "vectorField", 3)
    faces = _faces(_file(folders, "faces"))
    owner = _list(_file(folders, "owner"), "labelList", 1)
    neighbour = _list(_file(folders, "neighbour"), "labelList", 1)
    patches = _patches(_file(folders, "boundary"))
    mesh = PolyMesh(points, faces, owner, neighbour, patches)
    _check(mesh, folders[-1])
    if path.is_dir() and _is_time(path):
        files = sorted(each for each in path.iterdir() if each.is_file())
        left_out = [*filter(None, (_read_field(file, mesh) for file in files))]
        if left_out:
            logger.warning("read_mesh: %s: fields left out: %s", path, ", ".join(left_out))
    return mesh


def is_case(path: Path) -> bool:
    """Return whether :func:`read_case` reads this path."""
    return bool(_mesh_folders(path))


def _is_time(path: Path) -> bool:
    return (
        re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", path.name) is not None
        and (path.parent / "constant" / "polyMesh").is_dir()
    )


def _mesh_folders(path: Path) -> list[Path]:
    """Return the folders in which files of the mesh may stand, the first one first."""
    if path.suffix == ".foam":
        path = path.absolute().parent
    if not path.is_dir():
        return []
    if path.name == "polyMesh":
        return [path]
    if _is_time(path):
        return [path / "polyMesh", path.parent / "constant" / "polyMesh"]
    if (path / "constant" / "polyMesh").is_dir():
        return [path / "constant" / "polyMesh"]
    if (path / "processor0").is_dir():
        raise ArgumentError(
            f"read_mesh: {path} is decomposed and has no constant/polyMesh. Run reconstructParMesh "
            "-constant first, or read a folder processorN alone."
        )
    return []


class _File:
    """The content of a file of OpenFOAM, and the place up to which it has been read.

    The class in its header is `kind`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.data = path.read_bytes()
            if path.suffix == ".gz":
                self.data = gzip.decompress(self.data)
        except (OSError, EOFError, zlib.error) as error:
            raise self.error(f"it cannot be read: {error}") from error
        header = re.search(rb"FoamFile\s*\{(.*?)\}", self.data, re.DOTALL)
        if header is None:
            raise self.error("it has no header FoamFile { ... }")
        entries = re.findall(rf"(\w+)\s+{_WORD}\s*;", header[1].decode("latin-1"))
        self.header = {name: value.strip('"') for name, value in entries}
        self.is_binary = self.header.get("format", "ascii") == "binary"
        arch = self.header.get("arch", "LSB;label=32;scalar=64")
        order = ">" if "MSB" in arch else "<"
        label, scalar = re.search(r"label=(\d+)", arch), re.search(r"scalar=(\d+)", arch)
        self.label = np.dtype(f"{order}i{int(label[1] if label else 32) // 8}")
        self.scalar = np.dtype(f"{order}f{int(scalar[1] if scalar else 64) // 8}")
        self.place = header.end()
        self.kind = self.header.get("class", "")
        if self.kind == "decomposedBlockData":
            raise self.error("it is in OpenFOAM's collated format", "Run reconstructParMesh")

    def error(self, reason: str, cure: str = "Write the file again") -> ArgumentError:
        return ArgumentError(f"read_mesh: {self.path}: {reason}. {cure}.")

    def match(self, pattern: bytes) -> re.Match[bytes] | None:
        """Pass a pattern, if it comes next after white space and comments."""
        found = re.compile(_SPACE + pattern, re.DOTALL).match(self.data, self.place)
        if found:
            self.place = found.end()
        return found

    def numbers(self, dtype: np.dtype[Any], columns: int) -> Array:
        """Return the list that comes next, (N,) or (N, columns)."""
        size = self.match(rb"(\d+)")
        if size is None:
            raise self.error("a list must begin with its length")
        count = int(size[1])
        if self.match(rb"\{"):
            row = self.match(rb"([^}]*)\}")
            values = self.parsed(row[1] if row else b"", dtype, columns)
            return np.repeat(values, count, axis=0)
        if count == 0:
            self.match(rb"\(\s*\)")
            return self.shaped(np.zeros(0, dtype), columns)
        if not self.match(rb"\("):
            raise self.error(f"a list of {count} has no opening parenthesis")
        if self.is_binary:
            end = self.place + count * columns * dtype.itemsize
            if self.data[end : end + 1] != b")":
                raise self.error(
                    f"a binary list of {count} rows of {columns} {dtype.name} does not end where "
                    "it should: the file is cut off, or arch in its header is wrong"
                )
            values = np.frombuffer(self.data[self.place : end], dtype)
            self.place = end + 1
            return self.shaped(values, columns)
        close = re.compile(rb"\)" if columns == 1 else rb"\)\s*\)").search(self.data, self.place)
        if close is None:
            raise self.error(f"a list of {count} has no closing parenthesis: the file is cut off")
        text = self.data[self.place : close.end()]
        self.place = close.end()
        values = self.parsed(text, dtype, columns)
        if len(values) != count:
            raise self.error(f"a list of {count} has {len(values)} rows")
        return values

    def parsed(self, text: bytes, dtype: np.dtype[Any], columns: int) -> Array:
        """Return numbers in text, in rows."""
        words = _COMMENT.sub(b" ", text).replace(b"(", b" ")
        try:
            values = np.array(words.replace(b")", b" ").split()).astype(dtype)
            return self.shaped(values, columns)
        except ValueError as error:
            raise self.error(f"numbers are expected, {columns} per row: {error}") from error

    @staticmethod
    def shaped(values: Array, columns: int) -> Array:
        """Return numbers in rows, in the byte order of this machine."""
        values = values.astype(values.dtype.newbyteorder("="))
        return values if columns == 1 else values.reshape(-1, columns)


def _file(folders: list[Path], name: str) -> _File:
    for folder in folders:
        for path in (folder / name, folder / f"{name}.gz"):
            if path.is_file():
                return _File(path)
    raise ArgumentError(
        f"read_mesh: there is no file {folders[-1] / name} and no {name}.gz. Run the mesher of the "
        "case, such as blockMesh."
    )


def _list(file: _File, kind: str, columns: int) -> Array:
    if file.kind != kind:
        raise file.error(f"its class must be {kind}; got {file.kind or 'none'}")
    if kind == "labelList":
        return file.numbers(file.label, columns).astype(np.int64)
    values = file.numbers(file.scalar, columns)
    if not np.isfinite(values).all():
        raise file.error("it holds numbers that are not finite")
    return values


def _faces(file: _File) -> Ragged:
    if file.kind == "faceCompactList":
        ends = file.numbers(file.label, 1).astype(np.int64)
        values = file.numbers(file.label, 1).astype(np.int64)
        if not len(ends) or ends[0] != 0 or ends[-1] != len(values):
            raise file.error(f"its offsets must go from 0 to {len(values)}")
        faces = Ragged(ends[1:], values)
    elif file.kind == "faceList" and not file.is_binary:
        size = file.match(rb"(\d+)\s*\(")
        if size is None:
            raise file.error("a list must begin with its length")
        body = _COMMENT.sub(b" ", file.data[file.place :])
        close = re.search(rb"\)\s*\)", body)
        if close is None:
            raise file.error("the list of faces does not end: the file is cut off")
        body = body[: close.end()]
        counts = np.array(re.findall(rb"(\d+)\s*\(", body)).astype(np.int64)
        words = file.parsed(body, np.dtype(np.int64), 1)
        # each face begins with its number of points
        starts = np.cumsum(counts + 1) - counts - 1
        if len(counts) != int(size[1]) or len(words) != counts.sum() + len(counts):
            raise file.error(
                f"{int(size[1])} faces with {counts.sum()} points are expected; it has "
                f"{len(counts)} faces with {len(words) - len(counts)} points"
            )
        faces = Ragged(np.cumsum(counts), np.delete(words, starts))
    else:
        raise file.error(f"its class must be faceList or faceCompactList; got {file.kind}")
    if (faces.counts < 3).any():
        raise file.error(f"face {int(np.argmax(faces.counts < 3))} has fewer than 3 points")
    return faces


def _patches(file: _File) -> dict[str, range]:
    text = _COMMENT.sub(b" ", file.data[file.place :]).decode("latin-1")
    found = {}
    for name, body in re.findall(rf"{_WORD}\s*\{{([^{{}}]*)\}}", text):
        entry = dict(re.findall(rf"(\w+)\s+{_WORD}\s*;", body))
        try:
            start, count = int(entry["startFace"]), int(entry["nFaces"])
        except (KeyError, ValueError) as error:
            raise file.error(f"patch {name} needs integers nFaces and startFace") from error
        found[name.strip('"')] = range(start, start + count)
    return found


def _check(mesh: PolyMesh, folder: Path) -> None:
    """Raise unless the files belong together."""
    faces, inner, cells = len(mesh.faces.ends), len(mesh.neighbour), mesh.num_cells
    wrong = None
    if not faces or not len(mesh.points):
        wrong = f"it has {len(mesh.points)} points and {faces} faces"
    elif len(mesh.owner) != faces:
        wrong = f"owner has {len(mesh.owner)} entries for {faces} faces"
    elif inner > faces:
        wrong = f"neighbour has {inner} entries for {faces} faces"
    elif mesh.faces.values.min() < 0 or mesh.faces.values.max() >= len(mesh.points):
        wrong = f"faces refer to points out of range for {len(mesh.points)} points"
    elif mesh.owner.min() < 0 or mesh.neighbour.min(initial=0) < 0:
        wrong = "owner and neighbour must not be negative"
    elif (
        4 * cells > faces + inner
        or (np.bincount(np.concatenate([mesh.owner, mesh.neighbour])) < 4).any()
    ):
        wrong = "a cell has fewer than 4 faces"
    else:
        for name, faces_of in mesh.patches.items():
            if faces_of.start < inner or faces_of.stop > faces or faces_of.stop < faces_of.start:
                wrong = (
                    f"patch {name} has faces {faces_of.start}...{faces_of.stop}, but faces on the "
                    f"boundary are {inner}...{faces}"
                )
    if wrong:
        raise ArgumentError(f"read_mesh: {folder}: {wrong}. Write the mesh again; see checkMesh.")


def _read_field(path: Path, mesh: PolyMesh) -> str | None:
    """Add the values of a field at cells or points; return the name of a field elsewhere."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as stream:
        try:
            head = stream.read(4096)
        except (OSError, EOFError, zlib.error):
            return None
    found = re.search(rb"class\s+(\w+Field[\w:]*)\s*;", head)
    if not head.lstrip().startswith((b"/*", b"FoamFile", b"//")) or found is None:
        return None
    kind = re.fullmatch(rb"(vol|point)(\w+)Field(::Internal)?", found[1])
    columns = _COLUMNS.get(kind[2].decode()) if kind else None
    if kind is None or columns is None:
        return f"{path.name} ({found[1].decode()})"
    at_cells = kind[1] == b"vol"
    file, count = _File(path), mesh.num_cells if at_cells else len(mesh.points)
    start = re.compile(rb"\b(?:internalField|value)\s+(uniform|nonuniform)\b").search(
        file.data, file.place
    )
    if start is None:
        raise file.error("it has no internalField")
    file.place = start.end()
    if start[1] == b"uniform":
        row = file.match(rb"([^;]*);")
        values = file.parsed(row[1] if row else b"", file.scalar, columns)
        values = np.repeat(values[:1], count, axis=0)
    else:
        file.match(rb"List<\w+>")
        values = file.numbers(file.scalar, columns)
    if len(values) != count:
        noun = "cells" if at_cells else "points"
        raise file.error(f"it has {len(values)} values for {count} {noun}")
    name = path.name.removesuffix(".gz")
    (mesh.cell_data if at_cells else mesh.point_data)[name] = values
    return None
