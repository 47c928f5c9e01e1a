"""``varcomm inspect``: what is in a saved partition or a checkpoint, and whether it is whole."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from varcomm.errors import ArgumentError

if TYPE_CHECKING:  # importing these takes time; the first imports PyTorch Geometric
    from varcomm.graph.files.outline import Array, Arrays, Outline

__all__ = ["DESCRIPTION", "HELP", "add_arguments", "run"]

HELP = "check a saved partition or checkpoint, and list its content"
DESCRIPTION = """\
Read all files of a saved partition (PartitionedGraph.save, the command
partition) or of a checkpoint (varcomm.checkpoint.save, or safetensors files of
other tools), compare their checksums, and list names, dtypes and shapes, and
the bytes of each rank.

example:
  %(prog)s wing-8
"""

Found = dict[str, Any]

_INDEXES = (
    "graph.json",
    "checkpoint.json",
    "model.safetensors",
    "model.safetensors.index.json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
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
    if folder.is_dir() and not any((folder / name).exists() for name in _INDEXES):
        raise ArgumentError(
            f"{folder} is no saved partition and no checkpoint: it has neither graph.json nor "
            "checkpoint.json nor model.safetensors."
        )
    if (folder / "graph.json").exists():
        found, lines = _partition(folder), _lines_of_partition
    else:
        found, lines = _checkpoint(folder), _lines_of_checkpoint
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        print(f"{folder}: a {found['kind']}", *lines(found), sep="\n")
    return 0


def _partition(folder: Path) -> Found:
    from varcomm.graph.files.outline import Outline

    outline = Outline.open(folder)
    outline.verify()
    outline.read_whole()
    ranks = [_of_rank(outline, outline.read_part(rank), rank) for rank in range(outline.ranks)]
    return {
        "kind": "saved partition",
        "ranks": len(ranks),
        "method": outline.method,
        "hops": outline.hops,
        "nodes": sum(one["nodes"] for one in ranks),
        "edges": sum(one["edges"] for one in ranks),
        "by_rank": ranks,
        "node_attributes": _attributes(outline.nodes, "nodes", outline.part),
        "edge_attributes": _attributes(outline.edges, "edges", outline.part),
        "graph_attributes": {
            **{name: _kind(array) for name, array in outline.whole.items()},
            **{name: type(value).__name__ for name, value in outline.attributes.items()},
        },
        "checksums": "verified",
    }


def _of_rank(outline: Outline, part: Arrays, rank: int) -> dict[str, int]:
    return {
        "nodes": sum(sizes[rank] for sizes in outline.nodes.values()),
        "edges": sum(sizes[rank] for sizes in outline.edges.values()),
        "halo": sum(len(part[f"edges {place} halo ids"]) for place in range(len(outline.edges))),
        "bytes": sum(value.nbytes for value in part.values()),
    }


def _attributes(types: Mapping[Any, Any], what: str, arrays: Mapping[str, Array]) -> dict[str, str]:
    """Return dtype and row shape of each attribute by name, with its type in front."""
    found = {}
    for place, key in enumerate(types):
        start = f"{what} {place}."
        of = "" if key is None else f"{key if isinstance(key, str) else ' '.join(key)}."
        for name, array in arrays.items():
            if name.startswith(start):
                found[of + name.removeprefix(start)] = _kind(array)
    return found


def _kind(array: Array) -> str:
    dtype, rest = array.told()
    return f"{dtype} {tuple(rest)}" if rest else dtype


def _lines_of_partition(found: Found) -> Iterator[str]:
    ranks = found["ranks"]
    hops = "" if found["hops"] == 1 else f", halos of {found['hops']} hops"
    yield (
        f"{found['nodes']:,} nodes and {found['edges']:,} edges on {ranks} "
        f"rank{'s' * (ranks != 1)} by {found['method']}{hops}"
    )
    yield f"{'rank':>5} {'nodes':>10} {'edges':>10} {'halo':>10} {'bytes':>14}"
    for rank, one in enumerate(found["by_rank"]):
        yield f"{rank:5} " + " ".join(
            f"{one[name]:{width},}"
            for name, width in (("nodes", 10), ("edges", 10), ("halo", 10), ("bytes", 14))
        )
    for of in ("node", "edge", "graph"):
        named = found[f"{of}_attributes"]
        listed = ", ".join(f"{name} {kind}" for name, kind in named.items())
        yield f"{of} attributes: {listed or 'none'}"
    yield f"checksums: SHA-256 of graph.json and {ranks} file{'s' * (ranks != 1)} verified"


def _checkpoint(folder: Path) -> Found:
    from varcomm.checkpoint.index import Checkpoint

    found = Checkpoint(folder)
    found.verify()
    tensors = {
        key: {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "pieces": len(tensor.parts),
        }
        for key, tensor in found.tensors.items()
    }
    names = sorted(found.files or {part.file for t in found.tensors.values() for part in t.parts})
    by_rank = []
    for number, name in enumerate(names):
        rank = int(name[-17:-12]) if found.files is not None else number
        size = (found.folder / name).stat().st_size
        by_rank.append({"rank": rank, "file": name, "bytes": size})
    return {
        "kind": "checkpoint",
        "ranks": len(names),
        "by_rank": by_rank,
        "tensors": tensors,
        "tensor_bytes": sum(
            prod(tensor.shape) * tensor.dtype.itemsize for tensor in found.tensors.values()
        ),
        "values": list(found.values),
        "files": len(names),
        "checksums": "none" if found.files is None else "verified",
    }


def _lines_of_checkpoint(found: Found) -> Iterator[str]:
    count = len(found["tensors"])
    yield (
        f"{count} tensor{'s' * (count != 1)} of {found['tensor_bytes']:,} bytes, "
        f"{len(found['values'])} other values; written by {found['ranks']} "
        f"rank{'s' * (found['ranks'] != 1)}"
    )
    yield f"{'rank':>5} {'bytes':>14} file"
    for one in found["by_rank"]:
        yield f"{one['rank']:5} {one['bytes']:14,} {one['file']}"
    for key, tensor in found["tensors"].items():
        pieces = "" if tensor["pieces"] == 1 else f", in {tensor['pieces']} pieces"
        yield f"{key}: {tensor['dtype']} {tuple(tensor['shape'])}{pieces}"
    if found["values"]:
        yield f"other values: {', '.join(found['values'])}"
    files = f"{found['files']} file{'s' * (found['files'] != 1)}"
    if found["checksums"] == "verified":
        yield f"checksums: SHA-256 of checkpoint.json and {files} verified"
    else:
        yield f"checksums: none in files of other tools; headers of {files} verified"
