"""A graph from a file: a mesh, METIS's text, or arrays and tensors by their names."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data

from varcomm.errors import ArgumentError
from varcomm.graph.building.tables import check_name
from varcomm.graph.files.mesh import read_mesh

__all__ = ["read_graph"]

_TENSORS = (
    "a .pt file must hold a dict of tensors with edge_index (2, E), and others as x or pos: "
    "torch.save(data.to_dict(), path)"
)
_ARRAYS = "an .npz file must hold edge_index (2, E) or edges (E, 2) of integers"

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def read_graph(path: Path) -> Data:
    """Return the graph in a file, or raise ArgumentError with one line that says what is wrong.

    - ``.graph`` and ``.metis``: METIS's format; weights become ``node_weight``, ``node_size`` and
      ``edge_weight``.
    - ``.pt`` and ``.pth``: a dict of tensors, as ``data.to_dict()`` of a Data is; no pickle is run.
    - ``.npz``: ``edge_index`` (2, E) or ``edges`` (E, 2), and attributes by their names.
    - anything else is a mesh for meshio.
    """
    if path.is_dir():
        raise ArgumentError(f"{path} is a folder; give the file of a mesh or graph.")
    if path.exists() and not path.is_file():
        raise ArgumentError(f"{path} is no file, but a pipe or a device; give one that ends.")
    if not path.is_file():
        raise ArgumentError(f"there is no file {path}.")
    readers = {
        ".graph": _metis,
        ".metis": _metis,
        ".pt": _tensors,
        ".pth": _tensors,
        ".npz": _arrays,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        return read_mesh(path).data
    try:
        return reader(path)
    except ArgumentError as error:
        raise ArgumentError(f"{path}: {str(error).rstrip('.')}.") from error
    except OSError as error:
        raise ArgumentError(f"{path} cannot be read: {error.strerror or error}.") from error


def _metis(path: Path) -> Data:
    """Read ``nodes edges [format [weights]]``, and a line of neighbours for each node."""
    try:
        lines = [line for line in path.read_text().splitlines() if not line.startswith("%")]
        head, *rows = [[int(word) for word in line.split()] for line in lines] or [[]]
        values = np.fromiter(chain.from_iterable(rows), np.int64)
    except (ValueError, OverflowError):
        raise ArgumentError("METIS's format has integers alone, and this has others") from None
    if len(head) not in (2, 3, 4) or min(head) < 0:
        raise ArgumentError("METIS's format begins with a line of the numbers of nodes and edges")
    nodes, edges, kind, weights = [*head, *[0, 1][len(head) - 2 :]]
    if not re.fullmatch("[01]{3}", flags := f"{kind:03}"):
        raise ArgumentError(f"METIS's format has no kind {flags}")
    has_size, has_weight, has_edge_weight = (int(flag) for flag in flags)
    if len(rows) < nodes or any(rows[nodes:]):
        raise ArgumentError(f"it tells of {nodes} nodes, and has {len(rows)} lines of neighbours")
    before, step = has_size + weights * has_weight, 1 + has_edge_weight
    counts = np.array([len(row) for row in rows[:nodes]], dtype=np.int64)
    if (counts < before).any() or ((counts - before) % step).any():
        raise ArgumentError("a line lacks weights that its first line tells of")
    place = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    is_end = (place >= before) & ((place - before) % step == 0)
    source = np.repeat(np.arange(nodes), (counts - before) // step)
    target = values[is_end] - 1
    if len(target) != 2 * edges:
        raise ArgumentError(
            f"it tells of {edges} edges, which are {2 * edges} neighbours, and lists {len(target)}"
        )
    if len(target) and not (target.min() >= 0 and target.max() < nodes):
        raise ArgumentError(
            f"it lists neighbours {target.min() + 1}...{target.max() + 1} of {nodes} nodes"
        )
    if not np.array_equal(np.sort(source * nodes + target), np.sort(target * nodes + source)):
        raise ArgumentError("not every edge is listed at both of its ends")
    data = Data(edge_index=torch.from_numpy(np.stack([source, target])), num_nodes=nodes)
    if has_size:
        data.node_size = torch.from_numpy(values[place == 0])
    if before > has_size:
        own = values[(place >= has_size) & (place < before)].reshape(nodes, before - has_size)
        data.node_weight = torch.from_numpy(own)
    if has_edge_weight:
        data.edge_weight = torch.from_numpy(values[(place >= before) & ~is_end])
    return data


def _tensors(path: Path) -> Data:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # of pickle, zipfile or torch, by what is wrong
        if "weights_only" in str(error):
            raise ArgumentError(f"it holds more than tensors; {_TENSORS}") from error
        reason = str(error).partition("\n")[0].partition(". ")[0] or type(error).__name__
        raise ArgumentError(f"it cannot be read ({reason}); {_TENSORS}") from error
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ArgumentError(f"it holds a {type(content).__name__}; {_TENSORS}")
    return _data(content, _TENSORS)


def _arrays(path: Path) -> Data:
    try:
        # opened here, since NumPy leaves open what is no archive
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            arrays: dict[str, Any] = dict(file)
    except OSError:
        raise
    except Exception as error:  # of zipfile, zlib or NumPy, by where the damage is
        raise ArgumentError(f"it cannot be read ({str(error).rstrip('.')}); {_ARRAYS}") from error
    content = {name: torch.from_numpy(v) for name, v in arrays.items() if v.dtype.kind in "biufc"}
    edges = content.pop("edges", None)
    if edges is not None:
        content["edge_index"] = edges.T
    return _data(content, _ARRAYS)


def _data(content: Mapping[str, Any], accepted: str) -> Data:
    """Return a graph of these attributes, whose edges are looked at; others are by whom cuts it."""
    edge_index = content.get("edge_index")
    if not isinstance(edge_index, torch.Tensor):
        found = ", ".join(content) or "nothing"
        raise ArgumentError(f"it has no edge_index, but {found}; {accepted}")
    if edge_index.layout != torch.strided:
        raise ArgumentError(
            "its edge_index is a sparse tensor; make it (2, E): "
            "torch_geometric.utils.to_edge_index(adjacency)[0]"
        )
    if edge_index.dim() != 2 or len(edge_index) != 2 or edge_index.dtype not in _INTEGERS:
        raise ArgumentError(
            f"its edges are {edge_index.dtype} of shape {tuple(edge_index.shape)}; {accepted}"
        )
    told = content.get("num_nodes")
    data = Data(edge_index=edge_index.long().contiguous())
    for name, value in content.items():
        if name not in ("edge_index", "num_nodes"):
            check_name(name, value, "data")
            data[name] = value
    if told is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of PyG's, that nodes are counted by edges alone
            told = data.num_nodes or 0
    data.num_nodes = told.item() if isinstance(told, torch.Tensor) and not told.dim() else told
    return data
