"""Graphs of the command line: from a mesh, from arrays by their names, or of a grid."""

from __future__ import annotations

import warnings
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data

from varcomm.errors import ArgumentError
from varcomm.graph.mesh.mesh import Mesh, Nodes, read_mesh
from varcomm.graph.mesh.openfoam import is_case
from varcomm.graph.mesh.readers import SUFFIXES

__all__ = ["globe", "read_graph", "read_graph_and_mesh"]

_TENSORS = (
    "a .pt file must hold a dict of tensors with edge_index (2, E), and others as x or pos: "
    "torch.save(data.to_dict(), path)"
)
_ARRAYS = "an .npz file must hold edge_index (2, E) or edges (E, 2) of integers"

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def read_graph(path: Path) -> Data:
    """Return the graph in a file; see :func:`read_graph_and_mesh`."""
    return read_graph_and_mesh(path)[0]


def read_graph_and_mesh(path: Path, nodes: Nodes = "points") -> tuple[Data, Mesh | None]:
    """Return the graph in a file, and its mesh; raise ArgumentError with one line on a fault.

    - ``.pt`` and ``.pth``: a dict of tensors, as ``data.to_dict()`` of a Data is; no pickle is run.
    - ``.npz``: ``edge_index`` (2, E) or ``edges`` (E, 2), and attributes by their names.
    - a folder is an OpenFOAM case; anything else is another mesh. Its points or cells are `nodes`.
    """
    if is_case(path):
        mesh = read_mesh(path, nodes)
        return mesh.data, mesh
    if not path.is_file():
        wrong = "does not exist"
        if path.exists():
            wrong = "is a folder" if path.is_dir() else "is a pipe or a device"
        raise ArgumentError(f"{path} {wrong}. Pass the file of a mesh or a graph.")
    suffix = path.suffix.lower()
    if suffix not in (".pt", ".pth", ".npz"):
        _check_format(path, suffix)
        mesh = read_mesh(path, nodes)
        return mesh.data, mesh
    if nodes != "points":
        raise ArgumentError(f"{path} is not a mesh, and its nodes are fixed. Leave out --nodes.")
    accepted = _ARRAYS if suffix == ".npz" else _TENSORS
    try:
        if suffix == ".npz":
            content = _arrays(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ArgumentError(f"{path} cannot be read: {error.strerror or error}.") from error
    except Exception as error:  # of pickle, zipfile, zlib, NumPy or torch
        reason = str(error).partition("\n")[0].partition(". ")[0] or type(error).__name__
        reason = "it holds more than tensors" if "weights_only" in str(error) else reason
        raise ArgumentError(f"{path} cannot be read ({reason}); {accepted}.") from error
    try:
        return _data(content, accepted), None
    except ArgumentError as error:
        raise ArgumentError(f"{path}: {str(error).rstrip('.')}.") from error


def _check_format(path: Path, suffix: str) -> None:
    """Refuse a file of an unknown format, and list the known formats."""
    try:
        from meshio import extension_to_filetypes
    except ImportError:
        return  # read_mesh names the missing package
    if suffix not in SUFFIXES | extension_to_filetypes.keys():
        known = " ".join(sorted(SUFFIXES | extension_to_filetypes.keys()))
        raise ArgumentError(
            f"{path} is in no known format. Pass a graph (.pt .pth .npz) or a mesh ({known})."
        )


def _arrays(path: Path) -> dict[str, torch.Tensor]:
    # opened here, because NumPy does not close files that are not archives
    with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
        content = {k: torch.from_numpy(v) for k, v in file.items() if v.dtype.kind in "biufc"}
    if "edges" in content:
        content["edge_index"] = content.pop("edges").T
    return content


def _data(content: Any, accepted: str) -> Data:
    """Return a graph of these attributes; the partitioner checks the rest."""
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ArgumentError(f"it holds a {type(content).__name__}; {accepted}")
    edge_index = content.get("edge_index")
    if not isinstance(edge_index, torch.Tensor):
        raise ArgumentError(f"it has no edge_index, but {', '.join(content)}; {accepted}")
    is_sparse = edge_index.layout != torch.strided
    if is_sparse or edge_index.shape[:1] != (2,) or edge_index.dtype not in _INTEGERS:
        kind = f"{'sparse ' * is_sparse}{edge_index.dtype} of shape {tuple(edge_index.shape)}"
        raise ArgumentError(f"its edges are {kind}; {accepted}")
    data = Data.from_dict(content | {"edge_index": edge_index.long().contiguous()})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyG warns if it counts nodes by edges alone
        count: Any = data.num_nodes
    data.num_nodes = count.item() if isinstance(count, torch.Tensor) and not count.dim() else count
    return data


def globe(rows: int, columns: int) -> Data:
    """Return a grid of 3 columns or more around the Earth: each cell has up to 8 neighbours."""
    cells = torch.arange(rows * columns)
    row, column = cells // columns, cells % columns
    edges = []
    for down, right in product((-1, 0, 1), repeat=2):
        if (down, right) != (0, 0):
            exists = (row + down >= 0) & (row + down < rows)
            source = (row + down) * columns + (column + right) % columns
            edges.append(torch.stack([source[exists], cells[exists]]))
    south = (row.double() + 0.5) * (torch.pi / rows)
    east = (column.double() + 0.5) * (2 * torch.pi / columns)
    pos = torch.stack([south.sin() * east.cos(), south.sin() * east.sin(), south.cos()], dim=1)
    return Data(edge_index=torch.cat(edges, dim=1), pos=pos.float())
