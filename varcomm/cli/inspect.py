"""``varcomm inspect``: content and integrity of a saved partition or a checkpoint."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from varcomm.cli.arguments import number_of
from varcomm.errors import ArgumentError

if TYPE_CHECKING:  # which needs PyTorch Geometric
    from varcomm.graph.files.saved import Array

__all__ = ["DESCRIPTION", "add_arguments", "run"]

DESCRIPTION = """\
Read all files of a saved partition (PartitionedGraph.save, the command
partition) or of a checkpoint (varcomm.checkpoint.save, or safetensors files of
other tools), compare their checksums, and list names, dtypes and shapes, and
the bytes of each rank.

example:
  %(prog)s wing-8
"""

_INDEXES = ("checkpoint.json", "model.safetensors", "model.safetensors.index.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="saved partition or checkpoint")
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Print the content of the folder."""
    folder = options.folder
    if not folder.exists():
        raise ArgumentError(f"there is no folder {folder}.")
    if not folder.is_dir() and folder.suffix not in (".safetensors", ".json"):
        raise ArgumentError(
            f"{folder} is not a folder; give the folder of a saved partition or checkpoint."
        )
    if (folder / "graph.json").exists():
        found, lines = _partition(folder)
    elif folder.is_dir() and not any((folder / name).exists() for name in _INDEXES):
        raise ArgumentError(
            f"{folder} is no saved partition and no checkpoint: it has neither graph.json nor "
            "checkpoint.json nor model.safetensors."
        )
    else:
        found, lines = _checkpoint(folder)
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        print(f"{folder}: a {found['kind']}", *lines, sep="\n")
    return 0


def _partition(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the content of a saved partition for JSON, and its lines for people."""
    from varcomm.graph.files.saved import Outline

    outline = Outline.open(folder)
    outline.verify()
    outline.read_whole()
    by_rank = []
    for rank in range(outline.ranks):
        part = outline.read_part(rank, outline.ranks)
        by_rank.append(
            {
                "nodes": sum(sizes[rank] for sizes in outline.nodes.values()),
                "edges": sum(sizes[rank] for sizes in outline.edges.values()),
                "halo": outline.halo(part, rank),
                "bytes": sum(value.nbytes for value in part.values()),
            }
        )
    nodes, edges = (sum(one[name] for one in by_rank) for name in ("nodes", "edges"))
    of_graph = {name: _kind(array) for name, array in outline.whole.items()}
    of_graph |= {name: type(value).__name__ for name, value in outline.attributes.items()}
    attributes = {
        "node_attributes": _attributes(outline.nodes, "nodes", outline.part),
        "edge_attributes": _attributes(outline.edges, "edges", outline.part),
        "graph_attributes": of_graph,
    }
    counts = {"nodes": nodes, "edges": edges, "by_rank": by_rank}
    found = {"kind": "saved partition", "ranks": outline.ranks, "method": outline.method}
    found |= {"hops": outline.hops, **counts, **attributes, "checksums": "verified"}

    hops = "" if outline.hops == 1 else f", halos of {outline.hops} hops"
    ranks, files = (number_of(outline.ranks, noun) for noun in ("rank", "file"))
    lines = [f"{nodes:,} nodes and {edges:,} edges on {ranks} by {outline.method}{hops}"]
    lines.append(f"{'rank':>5} {'nodes':>10} {'edges':>10} {'halo':>10} {'bytes':>14}")
    for rank, one in enumerate(by_rank):
        rows = f"{one['nodes']:10,} {one['edges']:10,} {one['halo']:10,}"
        lines.append(f"{rank:5} {rows} {one['bytes']:14,}")
    for of, kinds in attributes.items():
        listed = ", ".join(f"{name} {kind}" for name, kind in kinds.items())
        lines.append(f"{of.replace('_', ' ')}: {listed or 'none'}")
    return found, [*lines, f"checksums: SHA-256 of graph.json and {files} verified"]


def _attributes(types: Mapping[Any, Any], noun: str, arrays: Mapping[str, Array]) -> dict[str, str]:
    """Return dtype and row shape of each attribute by name, with its type in front."""
    found = {}
    for place, key in enumerate(types):
        of = "" if key is None else f"{key if isinstance(key, str) else ' '.join(key)}."
        for name, array in arrays.items():
            if name.startswith(f"{noun} {place}."):
                found[of + name.partition(".")[2]] = _kind(array)
    return found


def _kind(array: Array) -> str:
    dtype, rest = array.told()
    return f"{dtype} {tuple(rest)}" if rest else dtype


def _checkpoint(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the content of a checkpoint for JSON, and its lines for people."""
    from varcomm.checkpoint.index import Checkpoint

    saved = Checkpoint(folder)
    saved.verify()
    tensors, total, listed = {}, 0, []
    for key, tensor in saved.tensors.items():
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        pieces = len(tensor.parts)
        tensors[key] = {"dtype": dtype, "shape": list(shape), "pieces": pieces}
        total += prod(shape) * tensor.dtype.itemsize
        listed.append(f"{key}: {dtype} {shape}" + f", in {pieces} pieces" * (pieces != 1))
    names = sorted(saved.files or {part.file for t in saved.tensors.values() for part in t.parts})
    by_rank = []
    for number, name in enumerate(names):
        rank = number if saved.files is None else int(name[-17:-12])
        size = (saved.folder / name).stat().st_size
        by_rank.append({"rank": rank, "file": name, "bytes": size})
    found = {"kind": "checkpoint", "ranks": len(names), "by_rank": by_rank, "tensors": tensors}
    found |= {"tensor_bytes": total, "values": list(saved.values), "files": len(names)}
    found |= {"checksums": "none" if saved.files is None else "verified"}

    values, ranks = f"{len(saved.values)} other values", number_of(len(names), "rank")
    lines = [
        f"{number_of(len(tensors), 'tensor')} of {total:,} bytes, {values}; written by {ranks}"
    ]
    lines.append(f"{'rank':>5} {'bytes':>14} file")
    lines += [f"{one['rank']:5} {one['bytes']:14,} {one['file']}" for one in by_rank] + listed
    if saved.values:
        lines.append(f"other values: {', '.join(saved.values)}")
    files = number_of(len(names), "file")
    if saved.files is None:
        lines.append(f"checksums: none in files of other tools; headers of {files} verified")
    else:
        lines.append(f"checksums: SHA-256 of checkpoint.json and {files} verified")
    return found, lines
