"""The index of a saved partition, and checks that the tensors of its parts match it.

Digests are no signature: the files may be wrong on purpose. So sizes, dtypes and ids are checked
before anything is made of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from varcomm.errors import ArgumentError
from varcomm.graph.building.tables import ends
from varcomm.graph.partitioned_graph import EdgeType, NodeType, PartitionedGraph
from varcomm.sharding.files import Files, TensorFile, read_index, verify_files
from varcomm.sizes import ShardSizes, exact_int
from varcomm.transport.serialization import dtype_of

__all__ = ["KIND", "WHOLE", "Array", "Arrays", "Outline"]

KIND = "graph"

# Prefix of the graph's own tensors, which are in the file of rank 0.
WHOLE = "graph."

Arrays = dict[str, torch.Tensor]

# Tensors of a part for each edge type, beside ids and attributes.
_OF_EDGES = ("edge_index", "halo ids", "halo numbers")


@dataclass(frozen=True)
class Array:
    """Dtype and shape of a row of a saved tensor."""

    dtype: torch.dtype
    rest: tuple[int, ...]

    @classmethod
    def of(cls, value: torch.Tensor) -> Self:
        """Return that of a tensor."""
        return cls(value.dtype, tuple(value.shape[1:]))

    @classmethod
    def read(cls, saved: Any) -> Self:
        """Return that of an index."""
        name, rest = saved
        return cls(dtype_of(name), tuple(ShardSizes(rest)))

    def told(self) -> tuple[str, list[int]]:
        """Return it for an index."""
        return str(self.dtype).removeprefix("torch."), list(self.rest)


@dataclass(frozen=True)
class Outline:
    """A saved partition without its tensors."""

    method: str
    hops: int
    nodes: dict[NodeType, ShardSizes]  # on the ranks that saved
    edges: dict[EdgeType, ShardSizes]
    attributes: dict[str, Any]  # those of the graph that are not tensors
    whole: dict[str, Array]  # tensors of the graph
    part: dict[str, Array]  # tensors of each part
    folder: Path
    files: Files  # in rank order

    @property
    def ranks(self) -> int:
        """Number of ranks that saved."""
        return len(self.files)

    @staticmethod
    def content(
        graph: PartitionedGraph, attributes: Mapping[str, Any], whole: Arrays, part: Arrays
    ) -> dict[str, Any]:
        """Return the content of the index for a graph."""
        return {
            "method": graph.method,
            "hops": graph.hops,
            "node types": [[k, list(shard.sizes)] for k, shard in graph.node_shards.items()],
            "edge types": [[k, list(shard.sizes)] for k, shard in graph.edge_shards.items()],
            "attributes": dict(attributes),
            "arrays": {name: Array.of(value).told() for name, value in part.items()},
            "arrays of the graph": {name: Array.of(value).told() for name, value in whole.items()},
        }

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Read the index of a folder, or raise ArgumentError if there is no saved partition."""
        content, files = read_index(folder, KIND)
        try:
            found = cls(
                str(content["method"]),
                exact_int(content["hops"]) or 0,
                {key: ShardSizes(sizes) for key, sizes in content["node types"]},
                {
                    key if key is None else tuple(key): ShardSizes(sizes)
                    for key, sizes in content["edge types"]
                },
                dict(content["attributes"]),
                {name: Array.read(a) for name, a in content["arrays of the graph"].items()},
                {name: Array.read(array) for name, array in content["arrays"].items()},
                folder,
                dict(sorted(files.items(), key=lambda item: (len(item[0]), item[0]))),
            )
            found._check()
        except (ArgumentError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ArgumentError(
                f"{folder}: the partition is damaged, or was not saved by varcomm: {error}"
            ) from error
        return found

    def verify(self, rank: int = 0, ranks: int = 1) -> None:
        """Check the sizes of all files and the digests of every P-th, or raise ArgumentError."""
        verify_files(self.folder, self.files, rank, ranks)

    def read_whole(self) -> Arrays:
        """Return the tensors of the graph, or raise ArgumentError if they do not match."""
        file = self._file(0)
        found = {
            name: file.tensor(f"{WHOLE}{name}").full(array.dtype)
            for name, array in self.whole.items()
        }
        _check_kinds(found, self.whole)
        return found

    def read_part(self, rank: int) -> Arrays:
        """Return the tensors of a part, or raise ArgumentError if they do not match."""
        file = self._file(rank)
        found = {name: file.tensor(name).full(array.dtype) for name, array in self.part.items()}
        self._check_part(found, rank)
        return found

    def _file(self, rank: int) -> TensorFile:
        return TensorFile(self.folder / list(self.files)[rank])

    def _check(self) -> None:
        ranks = self.ranks
        types = [*self.nodes.values(), *self.edges.values()]
        if self.hops < 1:
            raise ValueError("hops must be a positive int")
        if ranks < 1 or any(len(sizes) != ranks for sizes in types):
            raise ValueError("sizes of all types, and a file, are needed for each rank")
        for edge_type in self.edges:
            if not {*ends(edge_type)} <= self.nodes.keys():
                raise ValueError(f"edges {edge_type} have an unknown type of nodes")
        needed = {f"nodes {place}" for place in range(len(self.nodes))}
        for place in self._edges():
            needed |= {f"edges {place}", *(f"edges {place} {what}" for what in _OF_EDGES)}
        if missing := needed - self.part.keys():
            raise ValueError(f"there is no {min(missing)!r}")

    def _check_part(self, part: Arrays, rank: int) -> None:
        _check_kinds(part, self.part, besides={f"edges {p} edge_index" for p in self._edges()})
        for place, sizes in enumerate(self.nodes.values()):
            _check_rows(part, f"nodes {place}", sizes, rank)
        for place, (edge_type, sizes) in enumerate(self.edges.items()):
            name = f"edges {place}"
            _check_rows(part, name, sizes, rank)
            source, target = (self.nodes[end] for end in ends(edge_type))
            index, ids, numbers = (part[f"{name} {what}"] for what in _OF_EDGES)
            if not (
                index.shape == (2, sizes[rank])
                and _is_within(index[0], source[rank] + len(ids))
                and _is_within(index[1], target[rank])
                and len(ids) == len(numbers)
                and _is_within(ids, source.total)
                and _is_within(numbers, source.total)
            ):
                raise ArgumentError(f"{name!r} of rank {rank} have ends that are no nodes")

    def _edges(self) -> range:
        return range(len(self.edges))


def _check_kinds(
    arrays: Arrays, told: Mapping[str, Array], besides: Set[str] = frozenset()
) -> None:
    for name, array in told.items():
        found = Array.of(arrays[name])
        if found != array and not (name in besides and found.dtype == array.dtype):
            raise ArgumentError(f"{name!r} is {found}; the index has {array}")


def _check_rows(part: Arrays, name: str, sizes: ShardSizes, rank: int) -> None:
    ids = part[name]
    if not (_is_within(ids, sizes.total) and bool((ids.diff() > 0).all())):
        raise ArgumentError(f"ids of {name!r} of rank {rank} must ascend below {sizes.total}")
    for key, rows in part.items():
        if (key == name or key.startswith(f"{name}.")) and len(rows) != sizes[rank]:
            raise ArgumentError(
                f"{key!r} of rank {rank} has {len(rows)} rows; the index has {sizes[rank]}"
            )


def _is_within(index: torch.Tensor, count: int) -> bool:
    """Return whether a tensor has one dimension and ints in 0 ... count - 1."""
    if index.dtype != torch.int64 or index.dim() != 1:
        return False
    return not len(index) or (int(index.min()) >= 0 and int(index.max()) < count)
