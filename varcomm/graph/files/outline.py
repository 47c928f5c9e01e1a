"""What ``graph.json`` tells of a saved partition, and whether the arrays of a part fit it.

Whoever can write into the folder can write digests too. So what is read is not taken for what was
saved because its digest is right: sizes, kinds and places are looked at, before anything is made of
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, Self

import torch

from varcomm.errors import ArgumentError
from varcomm.graph.building.tables import ends
from varcomm.graph.partitioned_graph import EdgeType, NodeType, PartitionedGraph
from varcomm.sizes import ShardSizes, exact_int
from varcomm.transport.serialization import dtype_of

__all__ = ["Array", "Arrays", "Outline"]

Arrays = dict[str, torch.Tensor]

# What a part has of each type of edges, beside their ids and attributes.
_OF_EDGES = ("edge_index", "halo ids", "halo numbers")


@dataclass(frozen=True)
class Array:
    """An array of a part, or of the graph as a whole.

    Attributes
    ----------
    dtype : torch.dtype
    rest : tuple of int
        Its shape but for the rows.
    """

    dtype: torch.dtype
    rest: tuple[int, ...]

    @classmethod
    def of(cls, value: torch.Tensor) -> Self:
        """Return what a tensor is."""
        return cls(value.dtype, tuple(value.shape[1:]))

    @classmethod
    def read(cls, told: Any) -> Self:
        """Return what a manifest tells."""
        name, rest = told
        return cls(dtype_of(name), tuple(ShardSizes(rest)))

    def told(self) -> tuple[str, list[int]]:
        """Return it for a manifest."""
        return str(self.dtype).removeprefix("torch."), list(self.rest)


@dataclass(frozen=True)
class Outline:
    """A saved partition, but for the numbers.

    Attributes
    ----------
    method : str
    hops : int
    nodes : dict
        Sizes by type, those of the ranks that saved.
    edges : dict
        As `nodes`.
    attributes : dict
        Of the graph as a whole, that are no tensors.
    whole : dict of str to Array
        Tensors of the graph as a whole.
    part : dict of str to Array
        Tensors of each part.
    digests : list of str
        Of the tensors of the whole, and of each part.
    """

    method: str
    hops: int
    nodes: dict[NodeType, ShardSizes]
    edges: dict[EdgeType, ShardSizes]
    attributes: dict[str, Any]
    whole: dict[str, Array]
    part: dict[str, Array]
    digests: list[str]

    @classmethod
    def of(
        cls,
        graph: PartitionedGraph,
        attributes: dict[str, Any],
        whole: Arrays,
        part: Arrays,
        digests: list[str],
    ) -> Self:
        """Return that of a graph that is being saved."""
        return cls(
            graph.method,
            graph.hops,
            {key: shard.sizes for key, shard in graph.node_shards.items()},
            {key: shard.sizes for key, shard in graph.edge_shards.items()},
            attributes,
            {name: Array.of(value) for name, value in whole.items()},
            {name: Array.of(value) for name, value in part.items()},
            digests,
        )

    def content(self) -> dict[str, Any]:
        """Return what a manifest tells."""
        return {
            "method": self.method,
            "hops": self.hops,
            "node types": [[key, list(sizes)] for key, sizes in self.nodes.items()],
            "edge types": [[key, list(sizes)] for key, sizes in self.edges.items()],
            "attributes": self.attributes,
            "arrays": {name: array.told() for name, array in self.part.items()},
            "arrays of the graph": {name: array.told() for name, array in self.whole.items()},
            "digests": self.digests,
        }

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Self:
        """Return what a manifest tells, or raise ArgumentError if that is no partition."""
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
                [*map(str, content["digests"])],
            )
            found._check()
        except (ArgumentError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ArgumentError(
                f"the partition is damaged, or was not saved by varcomm: {error}"
            ) from error
        return found

    def _check(self) -> None:
        ranks = len(self.digests) - 1
        types = [*self.nodes.values(), *self.edges.values()]
        if self.hops < 1:
            raise ValueError("hops must be a positive whole number")
        if ranks < 1 or any(len(sizes) != ranks for sizes in types):
            raise ValueError("sizes of all types, and digests, must be there for each rank")
        for edge_type in self.edges:
            if not {*ends(edge_type)} <= self.nodes.keys():
                raise ValueError(f"edges {edge_type} lead from or to nodes that are not there")
        needed = {f"nodes {place}" for place in range(len(self.nodes))}
        for place in self._edges():
            needed |= {f"edges {place}", *(f"edges {place} {what}" for what in _OF_EDGES)}
        if missing := needed - self.part.keys():
            raise ValueError(f"there is no {min(missing)!r}")

    def check_whole(self, whole: Arrays) -> None:
        """Raise ArgumentError if what belongs to the graph as a whole is not what was told."""
        _check_kinds(whole, self.whole)

    def check_part(self, part: Arrays, rank: int) -> None:
        """Raise ArgumentError if what a rank saved is not what was told.

        An edge that leads to no node, say, or rows that are more or fewer.
        """
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
                raise ArgumentError(f"{name!r} of rank {rank} lead to nodes that are not there")

    def _edges(self) -> range:
        return range(len(self.edges))


def _check_kinds(
    arrays: Arrays, told: Mapping[str, Array], besides: Set[str] = frozenset()
) -> None:
    for name, array in told.items():
        found = Array.of(arrays[name])
        if found != array and not (name in besides and found.dtype == array.dtype):
            raise ArgumentError(f"{name!r} is of {found}, in place of {array}")


def _check_rows(part: Arrays, name: str, sizes: ShardSizes, rank: int) -> None:
    ids = part[name]
    if not (_is_within(ids, sizes.total) and bool((ids.diff() > 0).all())):
        raise ArgumentError(f"ids of {name!r} of rank {rank} do not ascend below {sizes.total}")
    for key, rows in part.items():
        if (key == name or key.startswith(f"{name}.")) and len(rows) != sizes[rank]:
            raise ArgumentError(f"{key!r} of rank {rank} has {len(rows)} rows of {sizes[rank]}")


def _is_within(index: torch.Tensor, count: int) -> bool:
    """Return whether a tensor of one dimension has numbers from 0 on, below `count`."""
    if index.dtype != torch.int64 or index.dim() != 1:
        return False
    return not len(index) or (int(index.min()) >= 0 and int(index.max()) < count)
