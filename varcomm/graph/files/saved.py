"""Saved partitions: one safetensors file per rank, and a JSON index.

A file holds the owned rows of its rank and the halo nodes of its owned edges; the file of rank 0
also holds the graph's own tensors. Digests are no signature: files may be wrong on purpose, so
sizes, dtypes and ids are checked before anything is made of them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from varcomm.errors import ArgumentError, DisagreementError, VarcommError
from varcomm.graph.building.assemble import (
    BroughtEdges,
    BroughtNodes,
    at_home,
    deepened,
    sent_to_owners,
)
from varcomm.graph.building.tables import ends
from varcomm.graph.delta_ids import AscendingIds
from varcomm.graph.edge_shard import EdgeShard
from varcomm.graph.index import plain
from varcomm.graph.partitioned_graph import EdgeType, NodeType, PartitionedGraph
from varcomm.graph.shard import NodeShard
from varcomm.plan.exchange_plan import ExchangePlan
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
from varcomm.transport.group import Group, GroupLike, resolve
from varcomm.transport.serialization import dtype_of

__all__ = ["Array", "Arrays", "Outline", "Staging", "check_place", "load", "part_of", "save"]

Arrays = dict[str, torch.Tensor]

_KIND = "graph"
_WHOLE = "graph."  # starts the names of the graph's own tensors
_EDGE_INDEX = re.compile(r"edges \d+ edge_index")
_OWNER = " owner"  # beside attributes of nodes, on their way: no name of an attribute


class Array(NamedTuple):
    """Dtype and shape of a row of a saved tensor."""

    dtype: torch.dtype
    rest: tuple[int, ...]

    def told(self) -> tuple[str, list[int]]:
        """Return both for an index."""
        return str(self.dtype).removeprefix("torch."), list(self.rest)


def save(graph: PartitionedGraph, folder: str | os.PathLike[str]) -> None:
    """Write each rank's part into a folder; collective. See :meth:`PartitionedGraph.save`."""
    group, what = graph.group, "graph.save"
    numbers = {}  # global numbers of halo nodes
    for key, edges in graph.edge_shards.items():
        first = graph.node_shards[ends(key)[0]].sizes.offsets[group.rank]
        own = torch.arange(first, first + edges.num_sources, device=edges.local_ids.device)
        numbers[key] = edges.plan(own)
    token = share(what, new_token, group)[0]

    def collect() -> tuple[Staging, Arrays]:
        return Staging.of(folder, graph.attributes, token), dict(part_of(graph, numbers))

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


class Staging:
    """One save of a partitioned graph; the `token` is the same on all ranks."""

    def __init__(self, target: Path, whole: Arrays, plain: dict[str, Any], token: str) -> None:
        self.target, self.whole, self.plain = target, whole, plain
        self._save = FolderSave(target, _KIND, token)

    @classmethod
    def of(
        cls, folder: str | os.PathLike[str], attributes: Mapping[str, Any], token: str | None = None
    ) -> Self:
        """Return the save of a graph with these attributes; see :func:`check_place`."""
        whole = {name: v for name, v in attributes.items() if isinstance(v, torch.Tensor)}
        plain = {name: v for name, v in attributes.items() if name not in whole}
        for name, value in plain.items():
            try:
                same = json.loads(json.dumps(value, allow_nan=False)) == value
            except (TypeError, ValueError):
                same = False
            if not same:
                raise ArgumentError(
                    f"{name} cannot be saved: its type is {type(value).__name__}. Use tensors, "
                    "numbers, strings, lists of them, or dicts by string."
                )
        return cls(check_place(folder), whole, plain, token or new_token())

    def begin(self) -> None:
        """Make the folder; for one process to call."""
        self.target.mkdir(parents=True, exist_ok=True)

    def write(self, rank: int, part: Arrays) -> str:
        """Write the tensors of a rank; return the SHA-256 of its file."""
        of_graph = {f"{_WHOLE}{name}": value for name, value in self.whole.items()}
        return self._save.write(rank, {**part, **(of_graph if rank == 0 else {})})

    def finish(self, graph: PartitionedGraph, part: Arrays, digests: Sequence[str]) -> None:
        """Replace the index; for one process to call, with the part of rank 0."""
        content = {
            "method": graph.method,
            "hops": graph.hops,
            "node types": [[k, list(shard.sizes)] for k, shard in graph.node_shards.items()],
            "edge types": [[k, list(shard.sizes)] for k, shard in graph.edge_shards.items()],
            "attributes": self.plain,
            "arrays": _told(part),
            "arrays of the graph": _told(self.whole),
        }
        self._save.commit(content, digests)

    def discard(self) -> None:
        """Remove the files of a failed save."""
        self._save.discard()


def _told(arrays: Arrays) -> dict[str, Any]:
    return {name: Array(v.dtype, tuple(v.shape[1:])).told() for name, v in arrays.items()}


def check_place(folder: str | os.PathLike[str]) -> Path:
    """Return the resolved folder, or raise ArgumentError if it has other content."""
    target = Path(folder).resolve()
    if not target.exists() or (target.is_dir() and is_index(target / f"{_KIND}.json", _KIND)):
        return target
    # a killed save leaves files without an index
    if not target.is_dir() or any(not is_save_name(path.name, _KIND) for path in target.iterdir()):
        raise ArgumentError(f"{folder} exists and is no saved partition; choose another.")
    return target


def part_of(
    graph: PartitionedGraph, numbers: Mapping[EdgeType, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that a rank writes: owned rows, and the halo nodes of owned edges.

    `numbers` has, by edge type, the numbers of halo nodes when nodes are counted rank by rank.
    """
    for place, nodes in enumerate(graph.node_shards.values()):
        yield from _rows(nodes, f"nodes {place}")
    for place, (edge_type, edges) in enumerate(graph.edge_shards.items()):
        edge_index = edges.local_ids[:, : edges.num_owned].clone()
        is_halo = edge_index[0] >= edges.num_sources
        halo, position = torch.unique(edge_index[0, is_halo], return_inverse=True)
        edge_index[0, is_halo] = position + edges.num_sources
        halo -= edges.num_sources
        yield from _rows(edges, f"edges {place}")
        yield f"edges {place} edge_index", edge_index
        yield f"edges {place} halo ids", edges.halo_ids[halo]
        yield f"edges {place} halo numbers", numbers[edge_type][halo]


def _rows(shard: NodeShard | EdgeShard, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    yield prefix, shard.owned_ids
    for name, value in shard.attributes.items():
        if not isinstance(value, torch.Tensor):
            raise ArgumentError(
                f"{name} cannot be saved: its type is {type(value).__name__}. Make it a tensor."
            )
        yield f"{prefix}.{name}", plain(value)[: shard.num_owned]


@dataclass(frozen=True)
class Outline:
    """A saved partition without its tensors.

    `nodes` and `edges` are rows per rank that saved, by type; `attributes` the values of the graph
    that are not tensors; `whole` describes the tensors of the graph, `part` those of each part;
    `files` are in rank order.
    """

    folder: Path
    files: Files
    method: str
    hops: int
    nodes: dict[NodeType, ShardSizes]
    edges: dict[EdgeType, ShardSizes]
    attributes: dict[str, Any]
    whole: dict[str, Array]
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

        def arrays(name: str) -> dict[str, Array]:
            found = content[name].items()
            return {key: Array(dtype_of(d), tuple(ShardSizes(rest))) for key, (d, rest) in found}

        try:
            outline = cls(
                folder,
                dict(sorted(files.items(), key=lambda item: (len(item[0]), item[0]))),
                str(content["method"]),
                at_least(1, content["hops"], "hops"),
                sizes("node types"),
                sizes("edge types"),
                dict(content["attributes"]),
                arrays("arrays of the graph"),
                arrays("arrays"),
            )
            outline._check()
        except (ArgumentError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ArgumentError(
                f"{folder}: the partition is damaged, or was not saved by varcomm: {error}"
            ) from error
        return outline

    def verify(self, rank: int = 0, ranks: int = 1) -> None:
        """Check the sizes of all files and the digests of every P-th, or raise ArgumentError."""
        verify_files(self.folder, self.files, rank, ranks)

    def read_whole(self) -> Arrays:
        """Return the tensors of the graph, or raise ArgumentError if they do not match."""
        return self._read(0, self.whole, _WHOLE)

    def read_part(self, rank: int) -> Arrays:
        """Return the tensors of a part, or raise ArgumentError if they do not match."""
        part = self._read(rank, self.part)
        for place, (edge_type, sizes) in enumerate(self.edges.items()):
            source, target = (self.nodes[end] for end in ends(edge_type))
            name = f"edges {place}"
            index, ids = part[f"{name} edge_index"], part[f"{name} halo ids"]
            numbers = part[f"{name} halo numbers"]
            _require(
                index.shape == (2, sizes[rank])
                and _is_within(index[0], source[rank] + len(ids))
                and _is_within(index[1], target[rank])
                and len(ids) == len(numbers)
                and _is_within(ids, source.total)
                and _is_within(numbers, source.total),
                f"{name!r} of rank {rank} have ends that are no nodes",
            )
        types = {f"nodes {place}": sizes for place, sizes in enumerate(self.nodes.values())}
        types |= {f"edges {place}": sizes for place, sizes in enumerate(self.edges.values())}
        for name, sizes in types.items():
            ids, where = part[name], f"of {name!r} of rank {rank}"
            ascends = _is_within(ids, sizes.total) and bool((ids.diff() > 0).all())
            _require(ascends, f"ids {where} must ascend below {sizes.total}")
            rows = {len(part[key]) for key in part if key == name or key.startswith(f"{name}.")}
            expected = sizes[rank]
            _require(rows == {expected}, f"tensors {where} do not have {expected} rows each")
        return part

    def _read(self, rank: int, arrays: Mapping[str, Array], start: str = "") -> Arrays:
        file = TensorFile(self.folder / list(self.files)[rank])
        found = {name: file.full(start + name, a.dtype) for name, a in arrays.items()}
        for name, array in arrays.items():
            # read_part checks the edge_index, whose last dimension is not that of rank 0
            same = tuple(found[name].shape[1:]) == array.rest
            same |= _EDGE_INDEX.fullmatch(name) is not None
            _require(same, f"rows of {name!r} do not have the shape {array.rest} of the index")
        return found

    def _check(self) -> None:
        types = [*self.nodes.values(), *self.edges.values()]
        fits = self.ranks >= 1 and all(len(sizes) == self.ranks for sizes in types)
        _require(fits, "sizes of all types, and a file, are needed for each rank")
        needed = {f"nodes {place}" for place in range(len(self.nodes))}
        for place, edge_type in enumerate(self.edges):
            known = {*ends(edge_type)} <= self.nodes.keys()
            _require(known, f"edges {edge_type} have an unknown type of nodes")
            tensors = ("", " edge_index", " halo ids", " halo numbers")
            needed |= {f"edges {place}{tensor}" for tensor in tensors}
        missing = sorted(needed - self.part.keys())
        _require(not missing, f"tensors are missing: {missing}")


def _require(fits: bool, problem: str) -> None:
    if not fits:
        raise ArgumentError(problem)


def _is_within(index: torch.Tensor, count: int) -> bool:
    """Return whether a tensor has one dimension and ints in 0 ... count - 1."""
    if index.dtype != torch.int64 or index.dim() != 1:
        return False
    return not len(index) or (int(index.min()) >= 0 and int(index.max()) < count)


def load(folder: str | os.PathLike[str], group: GroupLike = None) -> PartitionedGraph:
    """Read a saved partition; collective. See :meth:`PartitionedGraph.load`."""
    ranks, what = resolve(group), "PartitionedGraph.load"

    def find() -> Outline:
        found = Outline.open(Path(folder))
        found.verify(ranks.rank, ranks.size)
        return found

    outline, files = agree_and_share(what, find, lambda one: dict(one.files), ranks)
    if any(other != files[0] for other in files):
        raise DisagreementError(f"{what}: ranks find different graphs in {folder}.")

    def read() -> tuple[Arrays, list[Arrays]]:
        mine = range(ranks.rank, outline.ranks, ranks.size)
        return outline.read_whole(), [outline.read_part(rank) for rank in mine]

    whole, parts = agree(what, read, ranks)
    attributes = outline.attributes | whole
    if outline.ranks == ranks.size:
        graph = _as_saved(outline, parts[0], attributes, ranks)
    else:
        graph = _dealt_anew(outline, parts, attributes, ranks)
    return deepened(graph, outline.hops)


def _attributes(part: Arrays, prefix: str) -> Arrays:
    """Return the attributes of one type of nodes or edges."""
    start = f"{prefix}."
    return {name.removeprefix(start): v for name, v in part.items() if name.startswith(start)}


def _as_saved(
    outline: Outline, part: Arrays, attributes: Mapping[str, Any], group: Group
) -> PartitionedGraph:
    """Return the very part that this rank saved; only the plan is made anew."""
    nodes: dict[NodeType, NodeShard] = {}
    for place, (node_type, sizes) in enumerate(outline.nodes.items()):
        name = f"nodes {place}"
        ids = AscendingIds.of(part[name])
        nodes[node_type] = NodeShard(group, sizes, _attributes(part, name), ids)
    edges: dict[EdgeType, EdgeShard] = {}
    for place, (edge_type, sizes) in enumerate(outline.edges.items()):
        name = f"edges {place}"
        sources, targets = (nodes[end] for end in ends(edge_type))
        needed = part[f"{name} halo numbers"]
        edges[edge_type] = EdgeShard(
            group=group,
            sizes=sizes,
            attributes=_attributes(part, name),
            ids=AscendingIds.of(part[name]),
            edge_index=part[f"{name} edge_index"],
            halo_ids=part[f"{name} halo ids"],
            plan=ExchangePlan.from_needed(needed, sources.sizes, group=group.process_group),
            num_targets=targets.num_owned,
        )
    return PartitionedGraph(nodes, edges, attributes, outline.method)


def _dealt_anew(
    outline: Outline, parts: list[Arrays], attributes: Mapping[str, Any], group: Group
) -> PartitionedGraph:
    """Deal the saved parts to another number of ranks.

    Nodes, in the order of the parts, are cut evenly: so neighbours stay together as far as they
    were, and a part becomes several, or several become one.
    """
    none = torch.empty(0, dtype=torch.int64)
    # edge_index, which has rows along its last dimension, is joined below
    joined = {
        name: torch.cat([torch.empty(0, *array.rest, dtype=array.dtype), *(p[name] for p in parts)])
        for name, array in outline.part.items()
        if not _EDGE_INDEX.fullmatch(name)
    }
    nodes: dict[NodeType, BroughtNodes] = {}
    for place, (node_type, sizes) in enumerate(outline.nodes.items()):
        name = f"nodes {place}"
        cut = ShardSizes.balanced(sizes.total, group.size)
        saved = [sizes.range(rank) for rank in range(group.rank, len(sizes), group.size)]
        numbers = [torch.arange(one.start, one.stop) for one in saved]
        rows = _attributes(joined, name) | {_OWNER: cut.owner(torch.cat([none, *numbers]))}
        home = at_home(BroughtNodes(cut, None, joined[name], rows), group)
        rest = dict(home.attributes)
        nodes[node_type] = BroughtNodes(cut, rest.pop(_OWNER), None, rest)
    edges: dict[EdgeType, BroughtEdges] = {}
    places = {node_type: place for place, node_type in enumerate(outline.nodes)}
    for place, edge_type in enumerate(outline.edges):
        name = f"edges {place}"
        source, target = (f"nodes {places[end]}" for end in ends(edge_type))
        whole = [none.view(2, 0)]
        for part in parts:
            known = torch.cat([part[source], part[f"{name} halo ids"]])
            rows, columns = part[f"{name} edge_index"]
            whole.append(torch.stack([known[rows], part[target][columns]]))
        edge_index = torch.cat(whole, dim=1)
        edges[edge_type] = BroughtEdges(edge_index, joined[name], _attributes(joined, name))
    return sent_to_owners(nodes, edges, attributes, outline.method, group)
