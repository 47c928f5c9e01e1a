"""``varcomm inspect``: what is in a saved partition or a checkpoint, and whether it is whole."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from varcomm.errors import ArgumentError

if TYPE_CHECKING:  # which need time to import, and the first PyTorch Geometric
    from varcomm.checkpoint.reader import Checkpoint
    from varcomm.graph.files.outline import Array, Arrays, Outline

__all__ = ["DESCRIPTION", "HELP", "add_arguments", "run"]

HELP = "check a saved partition or checkpoint: what is in it"
DESCRIPTION = """\
Tell what is in the folder of a partition (PartitionedGraph.save, the command
partition) or of a checkpoint (varcomm.checkpoint.save, or
torch.distributed.checkpoint): names, dtypes, shapes, and how much each rank
has. All of it is read and its checksums compared. Nothing in it is run.

example:
  %(prog)s wing-8
"""

Found = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="what was saved")
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Look into the folder."""
    folder = options.folder
    if folder.is_file():
        raise ArgumentError(
            f"{folder} is a file; give the folder of a saved partition or checkpoint."
        )
    if folder.exists() and not folder.is_dir():
        raise ArgumentError(f"{folder} is no folder, but a pipe or a device.")
    if not folder.is_dir():
        raise ArgumentError(f"there is no folder {folder}.")
    if (folder / "graph.json").exists():
        found, lines = _partition(folder), _lines_of_partition
    elif (folder / ".metadata").exists():
        found, lines = _checkpoint(folder), _lines_of_checkpoint
    else:
        raise ArgumentError(
            f"{folder} is no saved partition and no checkpoint: it has neither graph.json nor "
            ".metadata."
        )
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        print(f"{folder}: a {found['kind']}", *lines(found), sep="\n")
    return 0


def _partition(folder: Path) -> Found:
    from varcomm.graph.files.contents import outline_of, read_part, read_whole

    outline = outline_of(folder)
    read_whole(folder, outline)
    ranks = []
    for rank in range(len(outline.digests) - 1):
        part = read_part(folder, outline, rank)
        ranks.append(_of_rank(outline, part, rank))
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
    """Return dtype and shape of a row of each attribute, by its name; its type in front."""
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
    yield f"checksums: SHA-256 of graph.json, graph.npz and {ranks} parts verified"


def _checkpoint(folder: Path) -> Found:
    from varcomm.checkpoint.reader import Checkpoint

    found = Checkpoint.open(folder)
    found.verify()
    tensors = {
        key: {
            "dtype": str(entry.properties.dtype).removeprefix("torch."),
            "shape": list(entry.size),
            "pieces": len(entry.chunks),
        }
        for key, entry in found.tensors.items()
    }
    bytes_by_rank = _bytes_by_rank(found)
    return {
        "kind": "checkpoint",
        "ranks": len(bytes_by_rank),
        "by_rank": [
            {"rank": rank, "bytes": count} for rank, count in sorted(bytes_by_rank.items())
        ],
        "tensors": tensors,
        "tensor_bytes": sum(
            prod(entry.size) * entry.properties.dtype.itemsize for entry in found.tensors.values()
        ),
        "values": [key for key in found.paths if key not in tensors],
        "files": len(found.files),
        "checksums": "none" if found.manifest is None else "verified",
    }


def _bytes_by_rank(found: Checkpoint) -> dict[int, int]:
    """Return what each rank has written, which the names of its files tell."""
    bytes_by_rank: dict[int, int] = {}
    for name in found.files:
        match = re.match(r"__(\d+)_", name)
        rank = int(match[1]) if match else 0
        size = (found.folder / name).stat().st_size
        bytes_by_rank[rank] = bytes_by_rank.get(rank, 0) + size
    return bytes_by_rank


def _lines_of_checkpoint(found: Found) -> Iterator[str]:
    count = len(found["tensors"])
    yield (
        f"{count} tensor{'s' * (count != 1)} of {found['tensor_bytes']:,} bytes, "
        f"{len(found['values'])} other values; written by {found['ranks']} "
        f"rank{'s' * (found['ranks'] != 1)}"
    )
    yield f"{'rank':>5} {'bytes':>14}"
    for one in found["by_rank"]:
        yield f"{one['rank']:5} {one['bytes']:14,}"
    for key, tensor in found["tensors"].items():
        pieces = "" if tensor["pieces"] == 1 else f", in {tensor['pieces']} pieces"
        yield f"{key}: {tensor['dtype']} {tuple(tensor['shape'])}{pieces}"
    if found["values"]:
        yield f"other values: {', '.join(found['values'])}"
    files = f"{found['files']} file{'s' * (found['files'] != 1)}"
    if found["checksums"] == "verified":
        yield f"checksums: SHA-256 of .metadata and {files} verified"
    else:
        yield f"checksums: none, torch alone has written it; sizes of {files} verified"
