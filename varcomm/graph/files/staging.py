"""What each rank writes of a partitioned graph, and the folder that takes its place when whole."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from varcomm.errors import ArgumentError
from varcomm.graph.files.archive import (
    MANIFEST,
    as_json,
    digest_of,
    is_manifest,
    write_arrays,
    write_manifest,
)
from varcomm.graph.files.outline import Arrays, Outline
from varcomm.graph.partitioned_graph import EdgeType, PartitionedGraph

__all__ = ["WHOLE", "Staging", "check_place", "part_file", "part_of"]

WHOLE = "graph.npz"

_OURS = re.compile(rf"{re.escape(MANIFEST)}|{re.escape(WHOLE)}|part-\d{{5,}}\.npz")


def part_file(rank: int) -> str:
    """Return the name of what belongs to a rank."""
    return f"part-{rank:05}.npz"


@dataclass(frozen=True)
class Staging:
    """A folder that is written beside the place it is for.

    Attributes
    ----------
    target : Path
        Its place.
    whole : dict of str to torch.Tensor
        What belongs to the graph as a whole.
    told : dict
        The same, that is no tensors.
    """

    target: Path
    whole: Arrays
    told: dict[str, Any]

    @classmethod
    def of(cls, folder: str | os.PathLike[str], attributes: Mapping[str, Any]) -> Self:
        """Return that of a graph with these attributes, or raise ArgumentError; nothing is written.

        See :func:`check_place` for which folders are taken.
        """
        target = check_place(folder)
        whole, told = {}, {}
        for name, value in attributes.items():
            if isinstance(value, torch.Tensor):
                whole[name] = value
            else:
                told[name] = as_json(name, value)
        return cls(target, whole, told)

    @property
    def folder(self) -> Path:
        """Where it is while it is written."""
        return _beside(self.target)

    def begin(self) -> None:
        """Make the folder, for one process to call."""
        self.discard()
        self.folder.mkdir(parents=True)
        write_arrays(self.folder / WHOLE, self.whole)

    def write(self, rank: int, part: Arrays) -> str:
        """Write what belongs to a rank, and return its digest."""
        write_arrays(self.folder / part_file(rank), part)
        return digest_of(part)

    def finish(self, graph: PartitionedGraph, part: Arrays, digests: Sequence[str]) -> None:
        """Put the folder in its place; an earlier one there is lost only then.

        Of `graph`, and of the `part` of rank 0, is taken what all ranks have alike.
        """
        all_digests = [digest_of(self.whole), *digests]
        outline = Outline.of(graph, self.told, self.whole, part, all_digests)
        write_manifest(self.folder, outline.content())
        if not self.target.exists():
            self.folder.rename(self.target)
            return
        earlier = Path(tempfile.mkdtemp(prefix=f".{self.target.name}.", dir=self.target.parent))
        self.target.rename(earlier / self.target.name)
        self.folder.rename(self.target)
        shutil.rmtree(earlier, ignore_errors=True)

    def discard(self) -> None:
        """Remove what has been written."""
        shutil.rmtree(self.folder, ignore_errors=True)


def check_place(folder: str | os.PathLike[str]) -> Path:
    """Return the folder that a path leads to if a partition can be saved there.

    A saved partition that is there already would be replaced; anything else that is there, or in
    it, raises ArgumentError. So does what stands where the files are collected, unless it is what
    a killed process has left of a save.
    """
    target = Path(folder).resolve()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        if not is_manifest(target / MANIFEST):
            raise ArgumentError(f"{folder} exists and is no saved partition; choose another.")
        if others := _others(target):
            raise ArgumentError(
                f"{folder} has {others[0]} besides the partition that would be replaced. Move it, "
                "or choose another folder."
            )
    staging = _beside(target)
    if staging.exists() and not (staging.is_dir() and not _others(staging)):
        raise ArgumentError(
            f"{staging} is in the way: files are collected there before they take their place. "
            "Move it, or choose another folder."
        )
    return target


def _beside(target: Path) -> Path:
    return target.with_name(target.name + ".saving")


def _others(folder: Path) -> list[str]:
    """Return the names in a folder that no saved partition has."""
    return sorted(path.name for path in folder.iterdir() if not _OURS.fullmatch(path.name))


def part_of(
    graph: PartitionedGraph, numbers: Mapping[EdgeType, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what a rank writes: owned rows alone, and of the halo what these edges come from.

    `numbers` are those of the halo's nodes, counted rank after rank, by type of edges.
    """
    for place, nodes in enumerate(graph.node_shards.values()):
        yield f"nodes {place}", nodes.owned_ids
        yield from _rows(nodes.attributes, f"nodes {place}", nodes.num_owned)
    for place, (edge_type, edges) in enumerate(graph.edge_shards.items()):
        edge_index = edges.edge_index[:, : edges.num_owned].clone()
        is_halo = edge_index[0] >= edges.num_sources
        halo, position = torch.unique(edge_index[0, is_halo], return_inverse=True)
        edge_index[0, is_halo] = position + edges.num_sources
        halo -= edges.num_sources
        yield f"edges {place}", edges.owned_ids
        yield f"edges {place} edge_index", edge_index
        yield f"edges {place} halo ids", edges.halo_ids[halo]
        yield f"edges {place} halo numbers", numbers[edge_type][halo]
        yield from _rows(edges.attributes, f"edges {place}", edges.num_owned)


def _rows(
    attributes: Mapping[str, Any], prefix: str, count: int
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in attributes.items():
        if not isinstance(value, torch.Tensor):
            raise ArgumentError(
                f"{name} cannot be saved: it is of {type(value).__name__}. Make it a tensor."
            )
        yield f"{prefix}.{name}", value[:count]
