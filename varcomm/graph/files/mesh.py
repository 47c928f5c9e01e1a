"""``read_mesh``: a mesh file as a graph of its points or cells; results as VTU."""

from __future__ import annotations

import io
import keyword
import logging
import os
import re
import warnings
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Literal
from xml.sax.saxutils import escape

import numpy as np
import torch
from torch_geometric.data import Data

from varcomm.errors import ArgumentError, MissingPackageError
from varcomm.graph.building.tables import check_name
from varcomm.graph.files.cells import (
    cell_edges,
    cells_of,
    corner_means,
    dimension,
    measures,
    point_edges,
)
from varcomm.graph.shard import described

__all__ = ["Mesh", "read_mesh"]

logger = logging.getLogger("varcomm")

Array = np.ndarray[Any, Any]

_LONGEST = 300  # characters of a message of meshio

# Attributes of PyG that users set.
_FREE = ("x", "y", "edge_weight", "batch", "time")


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

    Examples
    --------
    >>> import meshio, tempfile, torch
    >>> square = meshio.Mesh([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]], {"quad": [[0, 1, 2, 3]]})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     square.write(f"{folder}/square.vtu")
    ...     mesh = read_mesh(f"{folder}/square.vtu")
    >>> mesh.nodes, mesh.data.num_nodes, mesh.data.edge_index[:, :3]
    ('points', 4, tensor([[0, 0, 1],
            [1, 3, 0]]))
    """

    data: Data = field(repr=False)
    nodes: str
    source: Any = field(repr=False)
    _blocks: tuple[int, ...] = field(repr=False)

    def write(self, path: str | os.PathLike[str], /, **fields: Any) -> None:
        """Write the mesh as VTU, with its fields and with values of the graph's nodes.

        Not collective: one rank that has the values of all nodes calls it, such as rank 0 after
        ``graph.gather(prediction, dst=0)``.

        Parameters
        ----------
        path : path
            A file ``.vtu``, which is replaced; its folder must exist.
        **fields : torch.Tensor or numpy.ndarray
            Values of all nodes, (N, *F), by name. Further dimensions are flattened: a 3 x 3 tensor
            becomes 9 components. A field of the file with the same name is replaced.

        Raises
        ------
        ArgumentError
            If a field has another number of rows or is not of real numbers, or if the file cannot
            be written.

        Notes
        -----
        If cells are the nodes, cells of fewer dimensions, as on a boundary, are omitted. fp16 and
        bf16 become float32, and bools become uint8; all other numbers keep their precision.
        """
        import meshio

        where = Path(path)
        if where.suffix.lower() != ".vtu":
            raise ArgumentError(f"mesh.write: path must end in .vtu; got {os.fspath(path)!r}.")
        if not where.parent.is_dir():
            raise ArgumentError(f"mesh.write: there is no folder {where.parent}.")
        values = {name: self._checked(name, value) for name, value in fields.items()}
        source, cells = self.source, [self.source.cells[i] for i in self._blocks]
        point_data = {name: _rows(value) for name, value in source.point_data.items()}
        cell_data = {
            name: [_rows(parts[i]) for i in self._blocks]
            for name, parts in source.cell_data.items()
        }
        if self.nodes == "points":
            point_data |= values
        else:
            ends = np.cumsum([len(block.data) for block in cells])[:-1]
            cell_data |= {name: np.split(value, ends) for name, value in values.items()}

        def name_of(field: str) -> str:
            return escape(field, {'"': "&quot;"})  # meshio does not escape names in XML

        points = np.zeros((len(source.points), 3))
        points[:, : source.points.shape[1]] = source.points
        mesh = meshio.Mesh(
            points,
            [(block.type, block.data) for block in cells],
            {name_of(name): v for name, v in point_data.items() if v is not None},
            {name_of(name): v for name, v in cell_data.items() if all(p is not None for p in v)},
        )
        try:
            mesh.write(where, file_format="vtu")
        except (OSError, KeyError) as error:
            raise ArgumentError(f"mesh.write: {where} cannot be written: {error!r}.") from error

    def _checked(self, name: str, value: Any) -> Array:
        """Return values of all nodes as VTU stores them."""
        array = value
        if isinstance(value, torch.Tensor):
            array = value.detach().cpu()
            array = (array.float() if value.dtype == torch.bfloat16 else array).numpy()
        rows, count = _rows(array), self.data.num_nodes
        if rows is None or len(rows) != count:
            raise ArgumentError(
                f"mesh.write: {name} must be real numbers, one row for each of the {count} "
                f"{self.nodes}; got {described(value)}. After graph.gather(x, dst=0), rank 0 alone "
                "has them."
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
        The nodes of the graph.

        - ``"points"``: all points, with an edge where an edge of a cell connects two of them; edges
          of quadratic cells go through their middle points.
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
        - every numeric field of the points, or of the cells, (N, *F), by its name. In names, other
          characters than letters and digits become ``_``, reserved names begin with ``field_``, and
          ``index`` and ``idx``, which mark node ids in PyG, become ``number``.

    Raises
    ------
    ArgumentError
        If the file is missing or cannot be read completely; if it has no cells, or cells of an
        unsupported kind.
    MissingPackageError
        If meshio is not installed.

    Notes
    -----
    meshio reads only one piece of a VTU file with several, and omits cells of unknown kinds; both
    are errors here. Its other messages go to the log. Communication: none.

    Examples
    --------
    Two triangles that share an edge; a value per triangle is written back.

    >>> import meshio, tempfile
    >>> square = meshio.Mesh([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]],
    ...     {"triangle": [[0, 1, 2], [0, 2, 3]]}, point_data={"height": [1.0, 2.0, 3.0, 4.0]})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     square.write(f"{folder}/square.vtu")
    ...     points = read_mesh(f"{folder}/square.vtu")
    ...     cells = read_mesh(f"{folder}/square.vtu", nodes="cells")
    ...     cells.write(f"{folder}/out.vtu", heat=torch.tensor([0.5, 1.5]))
    ...     print(meshio.read(f"{folder}/out.vtu").cell_data["heat"])
    [array([0.5, 1.5], dtype=float32)]
    >>> points.data.edge_index
    tensor([[0, 0, 0, 1, 1, 2, 2, 2, 3, 3],
            [1, 2, 3, 0, 2, 0, 1, 3, 0, 2]])
    >>> points.data.height, cells.data.edge_index, cells.data.volume
    (tensor([1., 2., 3., 4.], dtype=torch.float64), tensor([[0, 1],
            [1, 0]]), tensor([0.5000, 0.5000], dtype=torch.float64))
    """
    if nodes not in ("points", "cells"):
        raise ArgumentError(f'read_mesh: nodes must be "points" or "cells"; got {nodes!r}.')
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ArgumentError(f"read_mesh: dtype must be one of floats; got {dtype!r}.")
    source = _read(Path(path))
    try:
        return _graph(source, nodes, dtype)
    except ArgumentError as error:
        raise ArgumentError(f"read_mesh: {path}: {error}") from error


def _graph(source: Any, nodes: str, dtype: torch.dtype | None) -> Mesh:
    """Return the graph of a mesh that meshio has read."""
    points = np.asarray(source.points)
    if points.ndim != 2:
        raise ArgumentError("it has no points.")
    points = _native(points if points.dtype.kind == "f" else points.astype(np.float64))
    if points.shape[1] == 3 and not points[:, 2].any():
        points = points[:, :2]
    blocks = [(i, block) for i, block in enumerate(source.cells) if len(block.data)]
    dim = max((dimension(block.type) for _, block in blocks), default=0)
    if dim == 0:
        raise ArgumentError("it has no cells with edges.")
    if nodes == "cells":
        blocks = [(i, block) for i, block in blocks if dimension(block.type) == dim]
    cells = cells_of([(block.type, block.data) for _, block in blocks], len(points))
    count = sum(len(block.data) for _, block in blocks)
    if nodes == "cells":
        pos, edges = corner_means(cells, points, count), cell_edges(cells, count, len(points))
        fields = {n: [parts[i] for i, _ in blocks] for n, parts in source.cell_data.items()}
    else:
        pos, edges = points, point_edges(cells, len(points))
        fields = {name: [values] for name, values in source.point_data.items()}
    far = pos[edges[1]] - pos[edges[0]]
    far = np.concatenate([far, np.linalg.norm(far, axis=1, keepdims=True)], axis=1)
    data = Data(pos=_tensor(pos, dtype), edge_index=torch.from_numpy(edges))
    data.edge_attr = _tensor(far, dtype)
    if nodes == "cells":
        data.volume = _tensor(measures(cells, points, count), dtype)
    for name, parts in fields.items():
        values = np.concatenate([np.asarray(part) for part in parts])
        if values.dtype.kind in "fiub":
            data[_attribute_name(name, data)] = _tensor(values, dtype)
    return Mesh(data, nodes, source, tuple(i for i, _ in blocks))


def _read(path: Path) -> Any:
    """Return the file as meshio reads it, or raise if meshio prints, exits or omits cells."""
    try:
        import meshio
    except ImportError as error:
        raise MissingPackageError('read_mesh needs meshio: pip install "varcomm[mesh]".') from error
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
    try:
        with redirect_stdout(said), redirect_stderr(said), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # NumPy, while meshio tries formats
            source = meshio.read(path)
    except (Exception, SystemExit) as error:
        printed = " ".join(said.getvalue().split())
        reason = printed if isinstance(error, SystemExit) else f"{error!r} {printed}".strip()
        if len(reason) > _LONGEST:  # the message may quote the file
            reason = f"{reason[:_LONGEST]} ..."
        raise ArgumentError(f"read_mesh: {path} cannot be read: {reason}.") from error
    printed = " ".join(said.getvalue().split())
    if "cannot handle" in printed:
        raise ArgumentError(f"read_mesh: {path} cannot be read whole: {printed}")
    if printed:
        logger.warning("read_mesh: %s: %s", path, printed)
    return source


def _attribute_name(name: str, data: Data) -> str:
    """Return a similar name that Data and PartitionedGraph do not use."""
    name = re.sub("index|idx", "number", re.sub(r"\W+", "_", name)).strip("_")

    def is_free(name: str) -> bool:
        try:
            check_name(name, torch.zeros(0, dtype=torch.int64), "data")
        except ArgumentError:
            return False
        is_word = name.isidentifier() and not keyword.iskeyword(name)
        return is_word and name not in data and (name in _FREE or not hasattr(Data, name))

    if not is_free(name):
        name = f"field_{name}".rstrip("_")
    while not is_free(name):
        name += "_"
    return name


def _tensor(values: Array, dtype: torch.dtype | None) -> torch.Tensor:
    """Return an array as a tensor of a dtype with operations, floats as `dtype`."""
    if values.dtype.kind == "u" and values.dtype.itemsize > 1:
        values = values.astype(np.int64)
    tensor = torch.from_numpy(np.ascontiguousarray(_native(values)))
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def _native(values: Array) -> Array:
    """Return an array in native byte order, and in a precision that torch has."""
    if values.dtype.kind == "f" and values.dtype.itemsize > 8:
        return values.astype(np.float64)
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
