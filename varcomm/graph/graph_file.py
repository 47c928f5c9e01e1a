"""Graphs of the command line: from a mesh, from arrays by their names, or of a grid."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import BaseStorage, EdgeStorage, GlobalStorage, NodeStorage

from varcomm.errors import ArgumentError
from varcomm.graph.mesh.mesh import Mesh, Nodes, read_mesh
from varcomm.graph.mesh.openfoam import is_case
from varcomm.graph.mesh.readers import SUFFIXES

_TENSORS = (
    "a .pt file must hold a Data or a HeteroData of tensors, or its dict: "
    "torch.save(data.to_dict(), path)"
)
_OWNERS = (
    "a file of owners must hold the rank of each node: an integer per line, as METIS writes, or "
    "an array or tensor in .npy or .pt"
)
_ARRAYS = "an .npz file must hold edge_index (2, E) or edges (E, 2) of integers"

# Classes in the pickle of a Data or a HeteroData of tensors. They run no code of the file.
_CLASSES = [
    *(Data, HeteroData, BaseStorage, GlobalStorage, NodeStorage, EdgeStorage),
    *(DataEdgeAttr, DataTensorAttr),
]

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def read_graph(path: Path) -> Data | HeteroData:
    """Return the graph in a file; see :func:`read_graph_and_mesh`."""
    return read_graph_and_mesh(path)[0]


def read_graph_and_mesh(
    path: Path, nodes: Nodes = "points"
) -> tuple[Data | HeteroData, Mesh | None]:
    """Return the graph in a file, and its mesh; raise ArgumentError with one line on a fault.

    - ``.pt`` and ``.pth``: a Data or a HeteroData of tensors, its dict, or the processed file of a
      dataset of one graph; no other pickle is run.
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
    accepted, read = (_ARRAYS, _arrays) if suffix == ".npz" else (_TENSORS, _unpickled)
    content = _read(path, read, accepted)
    try:
        return _data(content, accepted), None
    except ArgumentError as error:
        raise ArgumentError(f"{path}: {str(error).rstrip('.')}.") from error


def read_owners(path: Path) -> Any:
    """Return the rank of each node in a file, as an array or tensor, or a dict of them by type."""
    formats: dict[str, Callable[[Path], Any]]
    formats = {".npy": np.load, ".pt": _unpickled, ".pth": _unpickled}
    of_text = partial(np.loadtxt, dtype=np.int64, ndmin=1)
    return _read(path, formats.get(path.suffix, of_text), _OWNERS)


def _read(path: Path, read: Callable[[Path], Any], accepted: str) -> Any:
    """Return the content of a file; raise ArgumentError with one line on a fault."""
    try:
        return read(path)
    except OSError as error:
        raise ArgumentError(f"{path} cannot be read: {error.strerror or error}.") from error
    except Exception as error:  # of pickle, zipfile, zlib, NumPy, torch or PyG
        reason = str(error).partition("\n")[0].partition(". ")[0] or type(error).__name__
        if "weights_only" in str(error):
            name = re.search(r"GLOBAL (\S+)", str(error))
            reason = f"it holds more than tensors{f', {name[1]}' if name else ''}"
        raise ArgumentError(f"{path} cannot be read ({reason}); {accepted}.") from error


def _unpickled(path: Path) -> Any:
    with torch.serialization.safe_globals(_CLASSES):
        content = torch.load(path, map_location="cpu", weights_only=True)
    if isinstance(content, tuple) and content[1:2] == (None,):
        content = content[0]  # of a dataset of one graph, which needs no slices
    return content.to_dict() if isinstance(content, Data | HeteroData) else content


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


def _data(content: Any, accepted: str) -> Data | HeteroData:
    """Return a graph of these attributes; the partitioner checks the rest."""
    if not isinstance(content, dict):
        raise ArgumentError(f"it holds a {type(content).__name__}; {accepted}")
    is_typed = bool(content) and all(isinstance(each, dict) for each in content.values())
    for key, store in content.items() if is_typed else [("", content)]:
        kind = key if isinstance(key, tuple) and len(key) == 3 else (key,)
        if not all(isinstance(name, str) for name in (*kind, *store)):
            raise ArgumentError(f"its keys must be names of types or attributes; {accepted}")
        if not is_typed or isinstance(key, tuple):
            _check_edges(store, f" for {key}" if is_typed else "", accepted)
    if is_typed:
        return HeteroData.from_dict(content)
    data = Data.from_dict(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyG warns if it counts nodes by edges alone
        count: Any = data.num_nodes
    data.num_nodes = count.item() if isinstance(count, torch.Tensor) and not count.dim() else count
    return data


def _check_edges(store: dict[str, Any], of: str, accepted: str) -> None:
    """Make the edges of a type int64; those of ``adj_t`` are the partitioner's."""
    edge_index = store.get("edge_index")
    if edge_index is None and isinstance(store.get("adj_t"), torch.Tensor):
        return
    if not isinstance(edge_index, torch.Tensor):
        raise ArgumentError(f"it has no edge_index{of}, but {', '.join(store)}; {accepted}")
    is_sparse = edge_index.layout != torch.strided
    if is_sparse or edge_index.shape[:1] != (2,) or edge_index.dtype not in _INTEGERS:
        kind = f"{'sparse ' * is_sparse}{edge_index.dtype} of shape {tuple(edge_index.shape)}"
        raise ArgumentError(f"its edges{of} are {kind}; {accepted}")
    store["edge_index"] = edge_index.long().contiguous()


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
