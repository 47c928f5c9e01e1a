"""``read_mesh``: a mesh file as a graph of its points or cells; results as VTU."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from keyword import kwlist
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import torch
from torch_geometric.data import Data
from torch_geometric.utils import to_undirected

from varcomm.errors import ArgumentError
from varcomm.graph.build.pyg_data import IDS, members
from varcomm.graph.mesh.cell_lists import CellLists
from varcomm.graph.mesh.cells import both_directions, cell_edges, cells_of, geometry, shape_of
from varcomm.graph.mesh.polyhedra import PolyMesh
from varcomm.graph.mesh.readers import read_source, source_of
from varcomm.graph.mesh.vtu import Piece, stored, write_piece
from varcomm.graph.node_shard import described
from varcomm.graph.ragged import Array
from varcomm.sizes import checked_rank
from varcomm.transport.agreement import agree
from varcomm.transport.group import GroupLike, resolve

logger = logging.getLogger("varcomm")

Nodes = Literal["points", "cells"]

# Attributes of PyG that users set.
_SET_BY_USERS = {"x", "y", "edge_weight", "batch", "time"}


@dataclass(frozen=True, eq=False)
class Mesh:
    """A mesh as a graph, with the contents of its file; returned by :func:`read_mesh`.

    Attributes
    ----------
    data : torch_geometric.data.Data
        The graph, whose nodes are points or cells of the mesh.
    nodes : {"points", "cells"}
        The nodes of the graph.
    source : meshio.Mesh or object
        The contents of the file: an object with the attributes `points`, `cells`, `cell_data` and
        `point_data`, which is meshio's own if meshio reads the file. Of an OpenFOAM case, or if
        cells are polyhedra: an object with `points`, `faces`, `owner`, `neighbour`, `patches`,
        `cell_data`, `point_data`, and `area` (F, 3), the area vector of each face.

    See Also
    --------
    read_mesh, MeshWriter
    """

    data: Data = field(repr=False)
    nodes: str
    source: Any = field(repr=False)
    _blocks: tuple[int, ...] = field(repr=False)

    def write(self, path: str | os.PathLike[str], /, **fields: Any) -> None:
        """Write the mesh as VTU, with its fields and with values of the graph's nodes.

        Not collective: call it on a rank that has the values of all nodes. If cells are the nodes,
        or if cells are polyhedra, cells of fewer dimensions, as on a boundary, are omitted.

        Parameters
        ----------
        path : path
            Path of the ``.vtu`` file; an existing file is replaced. The folder must exist.
        **fields : torch.Tensor or numpy.ndarray
            Values of all nodes, (N, *F), by name. Further dimensions are flattened. A field of the
            file with the same name is replaced.

        Raises
        ------
        ArgumentError
            If a field has another number of rows or is not of real numbers, or if the file cannot
            be written.
        """
        where = Path(path)
        if where.suffix.lower() != ".vtu":
            raise ArgumentError(f"mesh.write: path must end in .vtu; got {os.fspath(path)!r}.")
        values = {name: self._checked(name, value) for name, value in fields.items()}
        source, at_cells = self.source, dict(self.source.cell_data)
        if not isinstance(source, PolyMesh):
            at_cells = {
                name: np.concatenate([np.asarray(parts[i]) for i in self._blocks])
                for name, parts in at_cells.items()
            }
        fields = {"points": {**source.point_data}, "cells": at_cells}
        at_points, at_cells = (
            {name: stored(value) for name, value in fields[at].items()} for at in fields
        )
        (at_points if self.nodes == "points" else at_cells).update(values)
        lists = cell_lists(self, second_order=True)
        piece = Piece.of(lists, np.arange(len(lists.types)), np.arange(len(lists.points)))
        try:
            write_piece(where, piece, at_points, at_cells)
        except OSError as error:
            raise ArgumentError(f"mesh.write: {where} cannot be written: {error}.") from error

    def _checked(self, name: str, value: Any) -> Array:
        rows = stored(value)
        if rows is None or len(rows) != self.data.num_nodes:
            raise ArgumentError(
                f"mesh.write: {name} must be real numbers, one row for each of the "
                f"{self.data.num_nodes} {self.nodes}; got {described(value)}. After "
                "graph.gather(x, dst=0), only rank 0 has them."
            )
        return rows


@overload
def read_mesh(
    path: str | os.PathLike[str] | Any,
    nodes: Nodes = "points",
    dtype: torch.dtype | None = None,
    src: None = None,
    group: GroupLike = None,
    step: int = 0,
) -> Mesh: ...


@overload
def read_mesh(
    path: str | os.PathLike[str] | Any,
    nodes: Nodes = "points",
    dtype: torch.dtype | None = None,
    *,
    src: int,
    group: GroupLike = None,
    step: int = 0,
) -> Mesh | None: ...


def read_mesh(
    path: str | os.PathLike[str] | Any,
    nodes: Nodes = "points",
    dtype: torch.dtype | None = None,
    src: int | None = None,
    group: GroupLike = None,
    step: int = 0,
) -> Mesh | None:
    """Read a mesh file as a graph of its points, or of its cells.

    Without ``src``, the function does not communicate: all ranks read the file. With `src`, one
    rank reads it, and ``partition(mesh.data if mesh else None, src=src)`` sends each rank its part.

    Parameters
    ----------
    path : path or mesh
        - A file: VTU, PVTU or PVD, or any format that meshio reads, as Gmsh, Abaqus, Nastran, SU2,
          STL and XDMF. Other files of VTK are read if PyVista is installed. Points of two pieces at
          the same place are one point; ghost cells are left out.
        - An OpenFOAM case: its folder, its file ``.foam``, or the folder of a time. The fields of
          that time are then read as well.
        - A mesh object of meshio, PyVista or VTK.
    nodes : {"points", "cells"}
        - ``"points"``: all points, with an edge between two points that an edge of a cell connects.
          In a cell of second order, the point on an edge is joined to both ends, a point in a
          facet to the points on the facet's edges.
        - ``"cells"``: the cells of the highest dimension, with an edge between two cells that share
          a facet: a face, or in two dimensions an edge.
    dtype : torch.dtype, optional
        The dtype of floats; None keeps the dtype of the file.
    src : int, optional
        Group rank that reads the file. With src, the call is collective: an error is raised on
        every rank.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part with `src`; None means the whole world.
    step : int, optional
        The step to read of a series in PVD or XDMF; negative steps count from the end.

    Returns
    -------
    Mesh or None
        None on ranks other than `src`. ``mesh.data`` is the graph, on the CPU, with

        - ``pos`` (N, D): the points, or the means of the cells' corners. D is 2 if all z are zero.
        - ``edge_index`` (2, E): both directions of each edge, sorted, without duplicates.
        - ``edge_attr`` (E, D + 1): the displacement from source to target, and its length.
        - ``volume`` (N,), of cells only: length, area or volume. Of polyhedra and of OpenFOAM cases
          it is OpenFOAM's: see :doc:`/how_to/read_openfoam`.
        - ``edge_area`` (E,), of the cells of polyhedra and of OpenFOAM cases only: the area of the
          faces between two cells.
        - every numeric field of the nodes, (N, *F), by its name: ``_`` replaces characters that
          are invalid in names, ``number`` replaces ``index`` and ``idx``, and reserved names get
          ``field_``.
        - ``patches`` (N, B), of an OpenFOAM case only: whether a node has a face on each of the B
          patches in ``mesh.source.patches``.

    Raises
    ------
    ArgumentError
        If the file is missing or cannot be read completely. Also raised if it has no cells, or
        cells of an unsupported kind, or if files of a case contradict each other.
    MissingPackageError
        If the format needs a package that is not installed. OpenFOAM cases and VTU need none.

    See Also
    --------
    Mesh, MeshWriter, partition

    Notes
    -----
    Communication: none without `src`; with it, an agreement on errors, 1 KiB per rank.
    In one process: the same call.

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
    if src is None:
        return _mesh_of(path, nodes, dtype, step)
    ranks = resolve(group)
    reader = checked_rank(src, ranks.size, "src", "read_mesh: ")
    is_reader = ranks.rank == reader
    return agree(
        "read_mesh", lambda: _mesh_of(path, nodes, dtype, step) if is_reader else None, ranks
    )


def _mesh_of(path: Any, nodes: str, dtype: torch.dtype | None, step: int) -> Mesh:
    if isinstance(path, str | os.PathLike):
        source, name = read_source(Path(path), step), f"read_mesh: {os.fspath(path)}: "
    else:
        source, name = None, "read_mesh: "
    try:
        source = source_of(path) if source is None else source
        make = _graph_of_polyhedra if isinstance(source, PolyMesh) else _graph
        mesh = make(source, nodes)
    except ArgumentError as error:
        raise ArgumentError(f"{name}{error}") from error
    if dtype is not None:
        mesh.data.apply(lambda x: x.to(dtype) if x.is_floating_point() else x)
    return mesh


def _graph(source: Any, nodes: str) -> Mesh:
    points = np.asarray(source.points)
    if points.ndim != 2:
        raise ArgumentError("it has no points. Pass a mesh of points and cells.")
    points = _native(points if points.dtype.kind == "f" else points.astype(np.float64))
    if points.shape[1] == 3 and not points[:, 2].any():
        points = points[:, :2]
    blocks = [(i, block) for i, block in enumerate(source.cells) if len(block.data)]
    dim = max((shape_of(block.type).dim for _, block in blocks), default=0)
    if dim == 0:
        raise ArgumentError("it has no cells with edges. Pass a mesh of lines, polygons or solids.")
    if nodes == "cells":
        blocks = [(i, block) for i, block in blocks if shape_of(block.type).dim == dim]
    cells = cells_of([(block.type, block.data) for _, block in blocks], len(points))
    count = sum(len(block.data) for _, block in blocks)
    if nodes == "cells":
        pos, volume = geometry(cells, points, count)
        edges = cell_edges(cells, count, len(points))
        fields = {n: [parts[i] for i, _ in blocks] for n, parts in source.cell_data.items()}
    else:
        joined = [group.points[:, pair].T for group in cells for pair in group.joined]
        pos, volume = points, None
        edges = both_directions(np.concatenate(joined, axis=1), len(points))
        fields = {name: [values] for name, values in source.point_data.items()}
    flat = {name: np.concatenate([*map(np.asarray, parts)]) for name, parts in fields.items()}
    return Mesh(_data(pos, edges, volume, flat), nodes, source, tuple(i for i, _ in blocks))


def _graph_of_polyhedra(case: PolyMesh, nodes: str) -> Mesh:
    if nodes == "cells":
        pos, volume = case.geometry()
        pairs = np.stack([case.owner[: len(case.neighbour)], case.neighbour])
        area = np.linalg.norm(case.area[: pairs.shape[1]], axis=1)
        is_edge = pairs[0] != pairs[1]
        edges, area = to_undirected(
            *map(torch.from_numpy, (pairs[:, is_edge], area[is_edge])), case.num_cells, "sum"
        )
        fields, others = case.cell_data, case.point_data
    else:
        pos, volume = case.points, None
        edges = both_directions(np.concatenate([case.edges(), case.lines], axis=1), len(pos))
        fields, others = case.point_data, case.cell_data
    if case.patches and others:
        other = "points" if nodes == "cells" else "cells"
        names = ", ".join(others)
        logger.warning('read_mesh: fields left out: %s. nodes="%s" reads them.', names, other)
    data = _data(pos, edges, volume, fields)
    if nodes == "cells":
        data[_attribute_name("edge_area", data)] = area
    if case.patches:
        data[_attribute_name("patches", data)] = torch.from_numpy(case.on_patches(nodes))
    return Mesh(data, nodes, case, ())


def _data(
    pos: Array, edges: torch.Tensor, volume: Array | None, fields: Mapping[str, Array]
) -> Data:
    start, end = edges.numpy()
    far = pos[end] - pos[start]
    far = np.concatenate([far, np.linalg.norm(far, axis=1, keepdims=True)], axis=1)
    data = Data(pos=_tensor(pos), edge_index=edges, edge_attr=_tensor(far))
    if volume is not None:
        data.volume = _tensor(volume)
    for name, values in fields.items():
        if values.dtype.kind not in "fiub":
            logger.warning("read_mesh: the field %s is left out: it has no numbers", name)
        else:
            data[_attribute_name(name, data)] = _tensor(values)
    return data


def cell_lists(mesh: Mesh, second_order: bool = False) -> CellLists:
    """Return the cells of a mesh by their corners; if cells are the nodes, these cells.

    With `second_order`, cells have all of their points.
    """
    if isinstance(mesh.source, PolyMesh):
        return CellLists.of_case(mesh.source)
    blocks = [mesh.source.cells[i] for i in mesh._blocks]
    points = _native(np.asarray(mesh.source.points))
    points = points if points.dtype.kind == "f" else points.astype(np.float64)
    cells = cells_of([(block.type, block.data) for block in blocks], len(points))
    return CellLists.of_groups(cells, points, second_order)


def _attribute_name(name: str, data: Data) -> str:
    """Return a similar name that Data and PartitionedGraph do not use."""
    taken = {*IDS, *members(), *kwlist, *dir(Data)} - _SET_BY_USERS
    name = re.sub("index|idx", "number", re.sub(r"\W+", "_", name)).strip("_")
    while not name.isidentifier() or name in taken or name in data:
        name = f"field_{name}"
    return name


def _tensor(values: Array) -> torch.Tensor:
    """Return an array as a tensor of a dtype with operations."""
    if values.dtype.kind == "u" and values.dtype.itemsize > 1:
        values = values.astype(np.int64)
    return torch.from_numpy(np.ascontiguousarray(_native(values)))


def _native(values: Array) -> Array:
    return values.astype(values.dtype.newbyteorder("="), copy=False)
