"""``varcomm inspect``: content and integrity of a saved partition or a checkpoint."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from varcomm.cli.table import aligned

__all__ = ["DESCRIPTION", "add_arguments", "run"]

DESCRIPTION = """\
Read all files of a saved partition (PartitionedGraph.save, the command
partition) or of a checkpoint (varcomm.checkpoint.save, or safetensors files of
other tools). Compare their checksums, and list names, dtypes and shapes, and
the bytes of each rank. Of a graph or a mesh, as the command partition reads it,
list the attributes.

example:
  %(prog)s wing-8
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    words = "saved partition, checkpoint, or file of a graph"
    parser.add_argument("folder", type=Path, metavar="PATH", help=words)
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Print the content of the folder."""
    folder = options.folder
    if (folder / "graph.json").exists():
        kind, found = _partition(folder)
    elif folder.is_file() and folder.suffix != ".safetensors":
        kind, found = _graph(folder)
    else:
        kind, found = _checkpoint(folder)
    if options.json:
        print(json.dumps({"kind": kind, **found}, indent=1))
    else:
        print(f"{folder}: a {kind}", *_lines(found), sep="\n")
    return 0


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the content as lines; that of ranks as a table."""
    for name, value in found.items():
        if name == "by_rank":
            rows = [[f"{n:,}" if isinstance(n, int) else n for n in row.values()] for row in value]
            yield from aligned([list(value[0]), *rows], left=0)
        elif isinstance(value, dict) and value:
            yield f"{name.replace('_', ' ')}:"
            yield from (f"  {key}: {kind}" for key, kind in value.items())
        else:
            text = f"{value:,}" if isinstance(value, int) else value or "none"
            yield f"{name.replace('_', ' ')}: {text}"


def _partition(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the content of a saved partition."""
    from varcomm.graph.saved_partition import Outline

    outline = Outline.open(folder)
    outline.verify()
    by_rank = []
    for rank in range(outline.ranks):
        part = outline.read_part(rank, outline.ranks)
        row = {
            "rank": rank,
            "nodes": sum(sizes[rank] for sizes in outline.nodes.values()),
            "edges": sum(sizes[rank] for sizes in outline.edges.values()),
            "halo": outline.halo(part, rank),
            "bytes": sum(value.nbytes for value in part.values()),
        }
        by_rank.append(row)

    def attributes(types: Mapping[Any, Any], noun: str) -> dict[str, str]:
        """Return dtype and row shape of each attribute by name, with its type in front."""
        found = {}
        for place, key in enumerate(types):
            for name, array in outline.part.items():
                if name.startswith(f"{noun} {place}."):
                    found[_in_type(key) + name.partition(".")[2]] = _kind(*array)
        return found

    return "saved partition", {
        "ranks": outline.ranks,
        "method": outline.method,
        "hops": outline.hops,
        "nodes": sum(one["nodes"] for one in by_rank),
        "edges": sum(one["edges"] for one in by_rank),
        "by_rank": by_rank,
        "node_attributes": attributes(outline.nodes, "nodes"),
        "edge_attributes": attributes(outline.edges, "edges"),
        "graph_attributes": _of_graph(outline.attributes),
        "checksums": "verified",
    }


def _graph(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the content of a graph, or raise for one that the command partition would refuse."""
    from varcomm.graph.build.pyg_data import read
    from varcomm.graph.graph_file import read_graph

    tables = read(read_graph(path))
    nodes = {key: table.count for key, table in tables.nodes.items()}
    edges = {key: table.edge_index.shape[1] for key, table in tables.edges.items()}
    found: dict[str, Any] = {"nodes": sum(nodes.values()), "edges": sum(edges.values())}
    if None not in nodes:
        found["by_type"] = {_in_type(key)[:-1]: n for key, n in (nodes | edges).items()}
    types: list[tuple[str, Mapping[Any, Any]]]
    types = [("node", tables.nodes), ("edge", tables.edges)]
    for noun, by_type in types:
        found[f"{noun}_attributes"] = {
            _in_type(key) + name: _kind(rows.dtype, tuple(rows.shape[1:]))
            for key, table in by_type.items()
            for name, rows in table.attributes.items()
        }
    return "graph", found | {"graph_attributes": _of_graph(tables.attributes)}


def _in_type(key: Any) -> str:
    """Return the name of a type in front of its attributes; "" in a graph with one type."""
    return f"{key if isinstance(key, str) else ' '.join(key)}." if key else ""


def _of_graph(attributes: Mapping[str, Any]) -> dict[str, str]:
    return {
        k: _kind(v.dtype, tuple(v.shape)) if isinstance(v, torch.Tensor) else type(v).__name__
        for k, v in attributes.items()
    }


def _kind(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {shape or ''}".rstrip()


def _checkpoint(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the content of a checkpoint."""
    from varcomm.checkpoint.index import Checkpoint

    saved = Checkpoint(folder)
    saved.verify()
    tensors, nbytes = {}, 0
    for key, tensor in saved.tensors.items():
        pieces = len(tensor.parts)
        tensors[key] = _kind(tensor.dtype, tensor.shape) + f", in {pieces} pieces" * (pieces != 1)
        nbytes += prod(tensor.shape) * tensor.dtype.itemsize
    names = sorted(saved.files or {part.file for t in saved.tensors.values() for part in t.parts})
    sizes = [(saved.folder / name).stat().st_size for name in names]
    return "checkpoint", {
        "ranks": len(names),
        "tensor_bytes": nbytes,
        "by_rank": [
            {"rank": rank, "bytes": size, "file": name}
            for rank, (size, name) in enumerate(zip(sizes, names, strict=True))
        ],
        "tensors": tensors,
        "other_values": ", ".join(saved.values),
        "checksums": "verified" if saved.files else "none in files of other tools",
    }
