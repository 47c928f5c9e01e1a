"""``read_mesh``: a mesh file as a graph of its points or cells; results as VTU."""

from __future__ import annotations

import io
import logging
import os
import re
import warnings
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from keyword import kwlist
from math import prod
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal, NamedTuple
from xml.sax.saxutils import escape

import numpy as np
import torch
from torch_geometric.data import Data
from torch_geometric.utils import remove_self_loops, to_undirected

from varcomm.errors import ArgumentError, MissingPackageError
from varcomm.graph.building.tables import IDS, MEMBERS
from varcomm.graph.shard import described

__all__ = ["Mesh", "read_mesh"]

logger = logging.getLogger("varcomm")

Array = np.ndarray[Any, Any]

# Names that a field cannot have; the last ones are attributes of PyG that users set.
_TAKEN = {*IDS, *MEMBERS, *kwlist, *dir(Data)} - {"x", "y", "edge_weight", "batch", "time"}


@dataclass(frozen=True, eq=False)
class Mesh:
    """A mesh as a graph, and its file, to write results back; built by :func:`read_mesh`.

    Attributes
    ----------
    data : torch_geometric.data.Data
        The graph, whose nodes are points or cells of the mesh.
    nodes : {"points", "cells"}
        The nodes of the graph.
    source : meshio.Mesh
        The file: points, blocks of cells and all fields.
    """

    data: Data = field(repr=False)
    nodes: str
    source: Any = field(repr=False)
    _blocks: tuple[int, ...] = field(repr=False)

    def write(self, path: str | os.PathLike[str], /, **fields: Any) -> None:
        """Write the mesh as VTU, with its fields and with values of the graph's nodes.

        Not collective: call it on a rank that has the values of all nodes. If cells are the nodes,
        cells of fewer dimensions, as on a boundary, are omitted.

        Parameters
        ----------
        path : path
            A file ``.vtu``, which is replaced; its folder must exist.
        **fields : torch.Tensor or numpy.ndarray
            Values of all nodes, (N, *F), by name. Further dimensions are flattened. A field of the
            file with the same name is replaced.

        Raises
        ------
        ArgumentError
            If a field has another number of rows or is not of real numbers, or if the file cannot
            be written.
        """
        import meshio

        where = Path(path)
        if where.suffix.lower() != ".vtu":
            raise ArgumentError(f"mesh.write: path must end in .vtu; got {os.fspath(path)!r}.")
        values = {name: self._checked(name, value) for name, value in fields.items()}
        source, cells = self.source, [self.source.cells[i] for i in self._blocks]
        point_data = {name: _rows(value) for name, value in source.point_data.items()}
        cell_data = {
            name: [_rows(v[i]) for i in self._blocks] for name, v in source.cell_data.items()
        }
        if self.nodes == "points":
            point_data |= values
        else:
            ends = np.cumsum([len(block.data) for block in cells])[:-1]
            cell_data |= {name: [*np.split(value, ends)] for name, value in values.items()}

        def xml(fields: dict[str, Any]) -> dict[str, Any]:
            # meshio does not escape names
            return {escape(name, {'"': "&quot;"}): values for name, values in fields.items()}

        points = np.zeros((len(source.points), 3))
        points[:, : source.points.shape[1]] = source.points
        mesh = meshio.Mesh(
            points,
            [(block.type, block.data) for block in cells],
            xml({name: v for name, v in point_data.items() if v is not None}),
            xml({name: v for name, v in cell_data.items() if all(p is not None for p in v)}),
        )
        try:
            mesh.write(where, file_format="vtu")
        except (OSError, KeyError) as error:
            raise ArgumentError(f"mesh.write: {where} cannot be written: {error!r}.") from error

    def _checked(self, name: str, value: Any) -> Array:
        if isinstance(value, torch.Tensor):
            value = (value.float() if value.dtype == torch.bfloat16 else value).detach().cpu()
        rows = _rows(value)
        if rows is None or len(rows) != self.data.num_nodes:
            raise ArgumentError(
                f"mesh.write: {name} must be real numbers, one row for each of the "
                f"{self.data.num_nodes} {self.nodes}; got {described(value)}. After "
                "graph.gather(x, dst=0), only rank 0 has them."
            )
        return rows


def read_mesh(
    path: str | os.PathLike[str],
    nodes: Literal["points", "cells"] = "points",
    dtype: torch.dtype | None = None,
) -> Mesh:
    """Read a mesh file as a graph of its points, or of its cells.

    Not collective: all ranks read the file, or one rank that calls ``partition(data, src=...)``.

    Parameters
    ----------
    path : path
        A file in any format that meshio reads: VTU, VTK, Gmsh, Abaqus, Nastran, SU2, STL, ...
    nodes : {"points", "cells"}
        - ``"points"``: all points, with an edge where an edge of a cell connects two of them. Cells
          are linear.
        - ``"cells"``: the cells of the highest dimension, with an edge where two of them share a
          facet: a face, or in two dimensions an edge.
    dtype : torch.dtype, optional
        The dtype of floats; None keeps the dtype of the file.

    Returns
    -------
    Mesh
        ``mesh.data`` is the graph, on the CPU, with

        - ``pos`` (N, D): the points, or the means of the cells' corners. D is 2 if all z are zero.
        - ``edge_index`` (2, E): both directions of each edge, sorted, once.
        - ``edge_attr`` (E, D + 1): the displacement from source to target, and its length.
        - ``volume`` (N,), of cells only: length, area or volume.
        - every numeric field of the nodes, (N, *F), by its name: ``_`` replaces characters that no
          name has, ``number`` replaces ``index`` and ``idx``, reserved names get ``field_``.

    Raises
    ------
    ArgumentError
        If the file is missing or cannot be read completely, such as a VTU file of several pieces;
        if it has no cells, or cells of an unsupported kind.
    MissingPackageError
        If meshio is not installed.

    Examples
    --------
    Two triangles that share an edge; a value per triangle is written back.

    >>> import meshio, tempfile
    >>> square = meshio.Mesh([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]],
    ...     {"triangle": [[0, 1, 2], [0, 2, 3]]})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     square.write(f"{folder}/square.vtu")
    ...     cells = read_mesh(f"{folder}/square.vtu", nodes="cells")
    ...     cells.write(f"{folder}/out.vtu", heat=torch.tensor([0.5, 1.5]))
    >>> cells.data.edge_index, cells.data.volume
    (tensor([[0, 1],
            [1, 0]]), tensor([0.5000, 0.5000], dtype=torch.float64))
    """
    if nodes not in ("points", "cells"):
        raise ArgumentError(f'read_mesh: nodes must be "points" or "cells"; got {nodes!r}.')
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ArgumentError(f"read_mesh: dtype must be one of floats; got {dtype!r}.")
    source = _read(Path(path))
    try:
        mesh = _graph(source, nodes)
    except ArgumentError as error:
        raise ArgumentError(f"read_mesh: {path}: {error}") from error
    if dtype is not None:
        mesh.data.apply(lambda x: x.to(dtype) if x.is_floating_point() else x)
    return mesh


def _graph(source: Any, nodes: str) -> Mesh:
    points = np.asarray(source.points)
    if points.ndim != 2:
        raise ArgumentError("it has no points.")
    points = _native(points if points.dtype.kind == "f" else points.astype(np.float64))
    if points.shape[1] == 3 and not points[:, 2].any():
        points = points[:, :2]
    blocks = [(i, block) for i, block in enumerate(source.cells) if len(block.data)]
    dim = max((_shape(block.type).dim for _, block in blocks), default=0)
    if dim == 0:
        raise ArgumentError("it has no cells with edges.")
    if nodes == "cells":
        blocks = [(i, block) for i, block in blocks if _shape(block.type).dim == dim]
    cells = _cells_of([(block.type, block.data) for _, block in blocks], len(points))
    count = sum(len(block.data) for _, block in blocks)
    if nodes == "cells":
        pos, volume = _geometry(cells, points, count)
        edges = _cell_edges(cells, count, len(points))
        fields = {n: [parts[i] for i, _ in blocks] for n, parts in source.cell_data.items()}
    else:
        joined = [group.points[:, pair].T for group in cells for pair in group.joined]
        pos, edges = points, _both_directions(np.concatenate(joined, axis=1), len(points))
        fields = {name: [values] for name, values in source.point_data.items()}
    start, end = edges.numpy()
    far = pos[end] - pos[start]
    far = np.concatenate([far, np.linalg.norm(far, axis=1, keepdims=True)], axis=1)
    data = Data(pos=_tensor(pos), edge_index=edges, edge_attr=_tensor(far))
    if nodes == "cells":
        data.volume = _tensor(volume)
    for name, parts in fields.items():
        values = np.concatenate([np.asarray(part) for part in parts])
        if values.dtype.kind in "fiub":
            data[_attribute_name(name, data)] = _tensor(values)
    return Mesh(data, nodes, source, tuple(i for i, _ in blocks))


def _read(path: Path) -> Any:
    """Return the file as meshio reads it, or raise if meshio prints, exits or omits cells."""
    try:
        import meshio
    except ImportError as error:
        raise MissingPackageError("read_mesh needs meshio: pip install meshio.") from error
    if not path.is_file():
        raise ArgumentError(f"read_mesh: there is no file {path}.")
    if path.suffix.lower() == ".vtu":
        with path.open("rb") as file:
            pieces = sum(line.count(b"<Piece") for line in file)
        if pieces > 1:
            raise ArgumentError(
                f"read_mesh: {path} is in {pieces} pieces, of which meshio would read the last "
                "alone. Merge them first, with ParaView's filters Merge Blocks or Clean to Grid."
            )
    said = io.StringIO()
    failure: BaseException | None = None
    try:
        with redirect_stdout(said), redirect_stderr(said), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # NumPy, while meshio tries formats
            source = meshio.read(path)
    except (Exception, SystemExit) as error:
        failure = error
    printed = " ".join(said.getvalue().split())
    if failure or "cannot handle" in printed:
        # the message of a parser may quote the file
        reason = shorten(f"{failure!r} {printed}" if failure else printed, 300)
        raise ArgumentError(f"read_mesh: {path} cannot be read: {reason}.") from failure
    if printed:
        logger.warning("read_mesh: %s: %s", path, printed)
    return source


def _attribute_name(name: str, data: Data) -> str:
    """Return a similar name that Data and PartitionedGraph do not use."""
    name = re.sub("index|idx", "number", re.sub(r"\W+", "_", name)).strip("_")
    while not name.isidentifier() or name in _TAKEN or name in data:
        name = f"field_{name}"
    return name


def _tensor(values: Array) -> torch.Tensor:
    """Return an array as a tensor of a dtype with operations."""
    if values.dtype.kind == "u" and values.dtype.itemsize > 1:
        values = values.astype(np.int64)
    return torch.from_numpy(np.ascontiguousarray(_native(values)))


def _native(values: Array) -> Array:
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def _rows(given: Any) -> Array | None:
    """Return values as rows of numbers, as VTU stores them; None for other values."""
    values: Array = np.asarray(given)
    if values.dtype.kind not in "fiub" or values.ndim == 0:
        return None
    stored = {np.dtype(np.bool_): np.uint8, np.dtype(np.float16): np.float32}
    values = _native(values)
    values = values.astype(stored.get(values.dtype, values.dtype), copy=False)
    return values.reshape(len(values), prod(values.shape[1:])) if values.ndim > 2 else values


# Points of a cell stand in meshio's order,
# https://github.com/nschloe/meshio/wiki/Node-ordering-in-cells:
# corners first, then a point on each edge, then points inside facets and the cell.


class _Shape(NamedTuple):
    """Edges and facets of a cell, by its corners; facets run counterclockwise from outside."""

    dim: int
    corners: int
    edges: list[tuple[int, int]]
    facets: list[list[int]]


def _solid(corners: int, edges: str, facets: str) -> _Shape:
    pairs = [(int(pair[0]), int(pair[1])) for pair in edges.split()]
    return _Shape(3, corners, pairs, [[*map(int, facet)] for facet in facets.split()])


def _polygon(corners: int) -> _Shape:
    edges = [(i, (i + 1) % corners) for i in range(corners)]
    return _Shape(2, corners, edges, [list(edge) for edge in edges])


_SHAPES = {
    "vertex": _Shape(0, 1, [], []),
    "line": _Shape(1, 2, [(0, 1)], [[0], [1]]),
    "triangle": _polygon(3),
    "quad": _polygon(4),
    "tetra": _solid(4, "01 12 20 03 13 23", "021 013 123 203"),
    "pyramid": _solid(5, "01 12 23 30 04 14 24 34", "0321 014 124 234 304"),
    "wedge": _solid(6, "01 12 20 34 45 53 03 14 25", "021 345 0143 1254 2035"),
    "hexahedron": _solid(8, "01 12 23 30 45 56 67 74 04 15 26 37", "0321 4567 0154 1265 2376 3047"),
}


class _Cells(NamedTuple):
    """All cells of one kind, by meshio's name: their points, (C, K), and positions among all."""

    kind: str
    shape: _Shape
    points: Array
    ids: Array

    @property
    def joined(self) -> list[tuple[int, int]]:
        """Pairs of points of a cell that are joined, along its edges."""
        if self.shape.dim and self.points.shape[1] != self.shape.corners:
            raise ArgumentError(
                f"points of cells of kind {self.kind!r} cannot be joined. Keep their corners, "
                'or let cells be the nodes: nodes="cells".'
            )
        return self.shape.edges


def _shape(kind: str, points: int = 3) -> _Shape:
    """Return the shape of cells of a kind with so many points, or raise if it is not supported."""
    base = kind.rstrip("0123456789")
    if base == "polygon":
        return _polygon(points)
    if base not in _SHAPES:
        raise ArgumentError(
            f"cells of kind {kind!r} are not supported; those that are: "
            f"{', '.join([*_SHAPES, 'polygon'])}, and those of higher order."
        )
    return _SHAPES[base]


def _cells_of(blocks: Sequence[tuple[str, Any]], points: int) -> list[_Cells]:
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
        _Cells(kind, _shape(kind, width), *map(np.concatenate, zip(*tables, strict=True)))
        for (kind, width), tables in groups.items()
    ]


def _cell_edges(cells: Sequence[_Cells], count: int, points: int) -> torch.Tensor:
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
    rows, cell = torch.stack([low, high])[:, order].numpy(), cell[order.numpy()]
    left = np.arange(len(cell))
    step, pairs = 0, [np.zeros((2, 0), np.int64)]
    while len(left):
        # cells of one facet are consecutive; a cell without a partner at `step` has none after it
        step += 1
        left = left[left + step < len(cell)]
        left = left[(rows[:, left] == rows[:, left + step]).all(axis=0)]
        pairs.append(np.stack([cell[left], cell[left + step]]))
    return _both_directions(np.concatenate(pairs, axis=1), count)


def _geometry(cells: Sequence[_Cells], points: Array, count: int) -> tuple[Array, Array]:
    """Return each cell's mean of corners, (count, D), and its length, area or volume, (count,).

    A facet that is not flat counts as triangles around the mean of its corners. The area of a cell
    that is not flat is that of its largest projection onto a plane.
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


def _both_directions(pairs: Array, count: int) -> torch.Tensor:
    edges, _ = remove_self_loops(torch.from_numpy(pairs))
    both: torch.Tensor = to_undirected(edges, num_nodes=count)
    return both
