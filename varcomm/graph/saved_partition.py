"""Saved partitions: one safetensors file per rank, and a JSON index.

A file holds the owned rows of its rank; ends of edges count nodes rank by rank. The index also
holds the graph's own values as text that every rank reads; tensors take 1.25 times their bytes.
Digests are not signatures: a file may be wrong on purpose, so sizes, dtypes and ids are checked
before they are used.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from varcomm.errors import ArgumentError, DisagreementError, VarcommError
from varcomm.graph.build.assemble import BroughtNodes, Edges, sent_to_owners
from varcomm.graph.build.groups import checked_names, names_of_groups
from varcomm.graph.build.pyg_data import ends
from varcomm.graph.build.several_hops import deepened
from varcomm.graph.edge_shard import EdgeShard
from varcomm.graph.index.partitioned_index import plain
from varcomm.graph.node_shard import NodeShard, moved
from varcomm.graph.partitioned_graph import EdgeType, NodeType, PartitionedGraph
from varcomm.sharding.files import (
    Files,
    FolderSave,
    TensorFile,
    is_index,
    is_save_name,
    new_token,
    read_index,
    verify_files,
)
from varcomm.sizes import ShardSizes, at_least
from varcomm.transport.agreement import agree, agree_and_share, on_all_ranks, share
from varcomm.transport.group import GroupLike, resolve
from varcomm.transport.serialization import dtype_of, from_bytes, to_bytes

Arrays = dict[str, torch.Tensor]

_KIND = "graph"
_ENDS = (" sources", " targets")


class Array(NamedTuple):
    """Dtype and shape of a row of a saved tensor."""

    dtype: torch.dtype
    rest: tuple[int, ...]


_IDS = Array(torch.int64, ())


def save(graph: PartitionedGraph, folder: str | os.PathLike[str]) -> None:
    """Write each rank's part into a folder on a shared file system; collective.

    The folder has one safetensors file per rank with its owned rows, and one JSON index.

    Parameters
    ----------
    folder : path
        Made if it is missing. One rename replaces an earlier partition in the folder.

    Raises
    ------
    ArgumentError
        On every rank, if a rank cannot write, or if the folder has other content, which is
        kept. Also raised if a value of the full graph is not a tensor, number, string, or list,
        set, tuple or dict of them.
    """
    group, what = graph.group, "graph.save"
    numbers = {}
    for key, edges in graph.edge_shards.items():
        own = graph.node_shards[ends(key)[0]].sizes.range(group.rank)
        numbers[key] = edges.plan(torch.arange(own.start, own.stop, device=edges.local_ids.device))
    token = share(what, new_token, group)[0]

    def collect() -> tuple[Staging, Arrays]:
        return Staging(folder, graph.attributes, token), dict(part_of(graph, numbers))

    staging, part = agree(what, collect, group)

    def finish() -> None:
        if group.rank == 0:
            staging.finish(graph, part, digests)

    try:
        digests = share(what, lambda: staging.write(group.rank, part), group)
        agree(what, finish, group)
    except VarcommError as error:
        # if a rank has exited, another one may be about to finish, and the files must stay
        if on_all_ranks(error):
            staging.discard()
        raise


class Staging(FolderSave):
    """One save of a graph with these attributes; the `token` is the same on all ranks."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        attributes: Mapping[str, Any],
        token: str | None = None,
    ) -> None:
        super().__init__(check_place(folder), _KIND, token or new_token())
        self.attributes: dict[str, str] = {}
        for name, value in moved(attributes, "cpu").items():
            try:
                own = value.detach() if isinstance(value, torch.Tensor) else value
                self.attributes[name] = to_bytes(own).decode()
            except TypeError as error:
                raise ArgumentError(
                    f"{name} cannot be saved: {error}. Use tensors, numbers, strings, or lists, "
                    "tuples or dicts of them."
                ) from error

    def finish(self, graph: PartitionedGraph, part: Arrays, digests: Sequence[str]) -> None:
        """Replace the index; for one process to call, with the part of rank 0."""
        rows = {k: [str(v.dtype).removeprefix("torch."), [*v.shape[1:]]] for k, v in part.items()}
        content = {
            "method": graph.method,
            "hops": graph.hops,
            "node types": [[k, list(shard.sizes)] for k, shard in graph.node_shards.items()],
            "edge types": [[k, list(shard.sizes)] for k, shard in graph.edge_shards.items()],
            "attributes": self.attributes,
            "groups": names_of_groups(graph),
            "arrays": rows,
        }
        self.commit(content, digests)


def check_place(folder: str | os.PathLike[str]) -> Path:
    """Return the resolved folder, or raise ArgumentError if it has other content."""
    target = Path(folder).resolve()
    if not target.exists() or (target.is_dir() and is_index(target / f"{_KIND}.json", _KIND)):
        return target
    # a killed save leaves files without an index
    if not target.is_dir() or any(not is_save_name(path.name, _KIND) for path in target.iterdir()):
        raise ArgumentError(f"{folder} exists and is not a saved partition; choose another.")
    return target


def part_of(
    graph: PartitionedGraph, numbers: Mapping[EdgeType, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that a rank writes: its owned rows.

    `numbers` has, by edge type, the numbers of halo nodes when nodes are counted rank by rank.
    """
    for place, nodes in enumerate(graph.node_shards.values()):
        yield from _rows(nodes, f"nodes {place}")
    for place, (edge_type, edges) in enumerate(graph.edge_shards.items()):
        yield from _rows(edges, f"edges {place}")
        source, target = edges.local_ids[:, : edges.num_owned]
        own, into = (
            graph.node_shards[end].sizes.range(edges.group.rank) for end in ends(edge_type)
        )
        first = torch.arange(own.start, own.stop, device=source.device)
        known = torch.cat([first, numbers[edge_type].to(source.device)])
        yield f"edges {place}{_ENDS[0]}", known[source]
        yield f"edges {place}{_ENDS[1]}", target + into.start


def _rows(shard: NodeShard | EdgeShard, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    yield prefix, shard.owned_ids
    for name, value in shard.attributes.items():
        yield f"{prefix}.{name}", plain(value)[: shard.num_owned]


@dataclass(frozen=True)
class Outline:
    """The index of a saved partition: `files` in rank order, and rows per saving rank by type.

    `attributes` are the graph's own values, `groups` the names of nodes' attributes that hold ids
    of groups; `part` describes the rows of tensors of each part.
    """

    folder: Path
    files: Files
    method: str
    hops: int
    nodes: dict[NodeType, ShardSizes]
    edges: dict[EdgeType, ShardSizes]
    attributes: dict[str, Any]
    groups: list[str]
    part: dict[str, Array]

    @property
    def ranks(self) -> int:
        """Number of ranks that saved."""
        return len(self.files)

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Read the index of a folder, or raise ArgumentError if there is no saved partition."""
        content, files = read_index(folder, _KIND)

        def sizes(name: str) -> dict[Any, ShardSizes]:
            pairs = ((tuple(k) if isinstance(k, list) else k, s) for k, s in content[name])
            return {key: ShardSizes(each) for key, each in pairs}

        try:
            outline = cls(
                folder,
                dict(sorted(files.items(), key=lambda item: (len(item[0]), item[0]))),
                str(content["method"]),
                at_least(1, content["hops"], "hops"),
                sizes("node types"),
                sizes("edge types"),
                {k: from_bytes(text.encode()) for k, text in content["attributes"].items()},
                checked_names(content.get("groups", [])),
                {
                    key: Array(dtype_of(dtype), tuple(ShardSizes(rest)))
                    for key, (dtype, rest) in content["arrays"].items()
                },
            )
            for kind, rows, limits in outline._kinds():
                fits = all(outline.part.get(kind + name) == _IDS for name in limits)
                _require(fits and len(rows) == outline.ranks, f"{kind} lacks ids or sizes")
        except (ArgumentError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ArgumentError(
                f"{folder}: the partition is damaged, or was not saved by varcomm: {error}"
            ) from error
        return outline

    def verify(self, rank: int = 0, ranks: int = 1) -> None:
        """Check the sizes of all files and the digests of every P-th, or raise ArgumentError."""
        verify_files(self.folder, self.files, rank, ranks)

    def cut(self, sizes: ShardSizes, ranks: int) -> ShardSizes:
        """Return the rows of each of `ranks` ranks: as saved, or the saved rows cut evenly."""
        return sizes if len(sizes) == ranks else ShardSizes.balanced(sizes.total, ranks)

    def read_part(self, rank: int, ranks: int) -> Arrays:
        """Return the tensors of a part of `ranks`, or raise ArgumentError if they do not match."""
        part: Arrays = {}
        for kind, sizes, limits in self._kinds():
            part |= self._read(kind, sizes, rank, ranks, limits)
        return part

    def _kinds(self) -> Iterator[tuple[str, ShardSizes, dict[str, int]]]:
        """Yield the prefix of each type's tensors, its rows, and its tensors of ids with limits."""
        for place, sizes in enumerate(self.nodes.values()):
            yield f"nodes {place}", sizes, {"": sizes.total}
        for place, (edge_type, sizes) in enumerate(self.edges.items()):
            nodes = (self.nodes[end].total for end in ends(edge_type))
            yield f"edges {place}", sizes, {"": sizes.total, **dict(zip(_ENDS, nodes, strict=True))}

    def halo(self, part: Arrays, rank: int) -> int:
        """Return the number of halo nodes of a part, as saved."""
        found = 0
        for place, edge_type in enumerate(self.edges):
            own = self.nodes[ends(edge_type)[0]].range(rank)
            sources = part[f"edges {place}{_ENDS[0]}"].unique()
            found += int(((sources < own.start) | (sources >= own.stop)).sum())
        return found

    def _read(
        self, kind: str, sizes: ShardSizes, rank: int, ranks: int, ids: Mapping[str, int]
    ) -> Arrays:
        """Return the rows of one type; `ids` are tensors of ids, and the limits of these."""
        mine = self.cut(sizes, ranks).range(rank)
        starts = f"{kind} ", f"{kind}."
        arrays = {k: a for k, a in self.part.items() if k == kind or k.startswith(starts)}
        pieces: dict[str, list[torch.Tensor]] = {name: [] for name in arrays}
        for number, path in enumerate(self.files):
            saved = sizes.range(number)
            first, last = max(saved.start, mine.start), min(saved.stop, mine.stop)
            if first >= last:
                first = last = saved.start
            if first < last or number == 0:  # the first file has empty tensors, too
                file = TensorFile(self.folder / path)
                for name, (dtype, rest) in arrays.items():
                    file.check(name, dtype, (sizes[number], *rest))
                    at = (first - saved.start, *[0] * len(rest))
                    pieces[name].append(file.read(name, dtype, at, (last - first, *rest)))
        part = {name: torch.cat(found) for name, found in pieces.items()}
        for name, limit in ids.items():
            values = part[kind + name]
            within = not len(values) or 0 <= int(values.min()) <= int(values.max()) < limit
            _require(within, f"{self.folder}: {kind + name!r} must be ids below {limit}")
        unique = len(part[kind].unique()) == len(part[kind])
        _require(unique, f"{self.folder}: {kind!r} has an id twice")
        return part


def _require(fits: bool, problem: str) -> None:
    if not fits:
        raise ArgumentError(problem)


def load(folder: str | os.PathLike[str], group: GroupLike = None) -> PartitionedGraph:
    """Read a saved partition, on the same or on another number of ranks; collective.

    Each rank reads its own rows. On another number of ranks, the nodes are split evenly in the
    order of the saved parts.

    Parameters
    ----------
    folder : path
        As for :meth:`save`.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None means the whole world.

    Returns
    -------
    PartitionedGraph
        On the CPU.

    Raises
    ------
    ArgumentError
        On every rank, if a file is missing, incomplete, altered, or of another graph.

    Examples
    --------
    >>> import tempfile, torch, varcomm
    >>> from torch_geometric.data import Data
    >>> def save(rank, folder):
    ...     ring = Data(x=torch.arange(4.0), edge_index=torch.tensor([[0, 1, 2], [1, 2, 3]]))
    ...     varcomm.graph.partition(ring, method="block").save(folder)
    >>> def load(rank, folder):
    ...     return varcomm.graph.PartitionedGraph.load(folder).x.tolist()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     varcomm.launch(save, 2, folder), varcomm.launch(load, 1, folder)
    ([None, None], [[0.0, 1.0, 2.0, 3.0]])
    """
    ranks, what = resolve(group), "PartitionedGraph.load"

    def find() -> Outline:
        found = Outline.open(Path(folder))
        found.verify(ranks.rank, ranks.size)
        return found

    outline, files = agree_and_share(what, find, lambda one: dict(one.files), ranks)
    if any(other != files[0] for other in files):
        raise DisagreementError(f"{what}: ranks find different graphs in {folder}.")

    part = agree(what, lambda: outline.read_part(ranks.rank, ranks.size), ranks)

    def attributes(kind: str) -> Arrays:
        return {k.removeprefix(f"{kind}."): v for k, v in part.items() if k.startswith(f"{kind}.")}

    nodes: dict[NodeType, BroughtNodes] = {}
    for place, (node_type, sizes) in enumerate(outline.nodes.items()):
        kind, cut = f"nodes {place}", outline.cut(sizes, ranks.size)
        nodes[node_type] = BroughtNodes(cut, attributes(kind), ids=part[kind])
    edges: dict[EdgeType, Edges] = {}
    for place, edge_type in enumerate(outline.edges):
        kind = f"edges {place}"
        numbers = torch.stack([part[kind + end] for end in _ENDS])
        edges[edge_type] = Edges(numbers, part[kind], attributes(kind))
    graph = sent_to_owners(nodes, edges, outline.attributes, outline.method, ranks, outline.groups)
    return deepened(graph, outline.hops)
