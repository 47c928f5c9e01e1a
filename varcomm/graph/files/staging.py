"""What each rank writes of a partitioned graph, and the folder that takes its place when whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from varcomm.errors import ArgumentError
from varcomm.graph.files.archive import MANIFEST, as_json, digest_of, write_arrays, write_manifest
from varcomm.graph.files.outline import Arrays, Outline
from varcomm.graph.partitioned_graph import EdgeType, PartitionedGraph

__all__ = ["WHOLE", "Staging", "part_file", "part_of"]

WHOLE = "graph.npz"


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

        What is in the folder already is replaced if it is a saved partition, and refused otherwise.
        """
        target = Path(folder)
        is_other = target.exists() and not (target / MANIFEST).is_file()
        if is_other and not (target.is_dir() and not any(target.iterdir())):
            raise ArgumentError(f"{target} exists and is no saved partition; choose another.")
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
        return self.target.with_name(self.target.name + ".saving")

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
        old = self.target.with_name(self.target.name + ".old")
        if self.target.exists():
            shutil.rmtree(old, ignore_errors=True)
            self.target.rename(old)
        self.folder.rename(self.target)
        shutil.rmtree(old, ignore_errors=True)

    def discard(self) -> None:
        """Remove what has been written."""
        shutil.rmtree(self.folder, ignore_errors=True)


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
