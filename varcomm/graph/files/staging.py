"""The save of a partitioned graph: the tensors of each rank, and the folder they go to."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch

from varcomm.errors import ArgumentError
from varcomm.graph.files.outline import KIND, WHOLE, Arrays, Outline
from varcomm.graph.partitioned_graph import EdgeType, PartitionedGraph
from varcomm.sharding.files import FolderSave, is_index, is_save_name, new_token

__all__ = ["Staging", "check_place", "part_of"]


@dataclass(frozen=True)
class Staging:
    """One save of a partitioned graph."""

    target: Path
    whole: Arrays  # tensors of the graph
    plain: dict[str, Any]  # its other attributes
    token: str = field(default_factory=new_token)  # the same on all ranks

    @classmethod
    def of(cls, folder: str | os.PathLike[str], attributes: Mapping[str, Any]) -> Self:
        """Return the save of a graph with these attributes; see :func:`check_place`."""
        target = check_place(folder)
        whole = {name: v for name, v in attributes.items() if isinstance(v, torch.Tensor)}
        plain = {name: _as_json(name, v) for name, v in attributes.items() if name not in whole}
        return cls(target, whole, plain)

    def begin(self) -> None:
        """Make the folder; for one process to call."""
        self.target.mkdir(parents=True, exist_ok=True)

    def write(self, rank: int, part: Arrays) -> str:
        """Write the tensors of a rank; return the SHA-256 of its file."""
        of_graph = {f"{WHOLE}{name}": value for name, value in self.whole.items()}
        return self._save().write(rank, {**part, **(of_graph if rank == 0 else {})})

    def finish(self, graph: PartitionedGraph, part: Arrays, digests: Sequence[str]) -> None:
        """Replace the index; for one process to call, with the part of rank 0."""
        self._save().commit(Outline.content(graph, self.plain, self.whole, part), digests)

    def discard(self) -> None:
        """Remove the files of a failed save."""
        if not self._save().is_committed():
            self._save().discard()
            with suppress(OSError):  # there is an earlier save
                self.target.rmdir()

    def _save(self) -> FolderSave:
        return FolderSave(self.target, KIND, self.token)


def check_place(folder: str | os.PathLike[str]) -> Path:
    """Return the resolved folder, or raise ArgumentError if it has other content."""
    target = Path(folder).resolve()
    if not target.exists() or (target.is_dir() and is_index(target / f"{KIND}.json", KIND)):
        return target
    # a killed save leaves files without an index
    if not target.is_dir() or any(not is_save_name(path.name, KIND) for path in target.iterdir()):
        raise ArgumentError(f"{folder} exists and is no saved partition; choose another.")
    return target


def _as_json(name: str, value: Any) -> Any:
    try:
        if json.loads(json.dumps(value, allow_nan=False)) == value:
            return value
    except (TypeError, ValueError):
        pass
    raise ArgumentError(
        f"{name} cannot be saved: its type is {type(value).__name__}. Use tensors, numbers, texts, "
        "lists of them, or dicts by text."
    )


def part_of(
    graph: PartitionedGraph, numbers: Mapping[EdgeType, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that a rank writes: owned rows, and the halo nodes of owned edges.

    `numbers` has, by edge type, the numbers of halo nodes when nodes are counted rank by rank.
    """
    for place, nodes in enumerate(graph.node_shards.values()):
        yield f"nodes {place}", nodes.owned_ids
        yield from _rows(nodes.attributes, f"nodes {place}", nodes.num_owned)
    for place, (edge_type, edges) in enumerate(graph.edge_shards.items()):
        edge_index = edges.local_ids[:, : edges.num_owned].clone()
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
                f"{name} cannot be saved: its type is {type(value).__name__}. Make it a tensor."
            )
        yield f"{prefix}.{name}", value[:count]
