"""Save a partitioned graph, and load it on the same or on another number of ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from varcomm.errors import DisagreementError, VarcommError
from varcomm.graph.building.hops import deepened
from varcomm.graph.building.redistribute import BroughtEdges, BroughtNodes, at_home, sent_to_owners
from varcomm.graph.building.tables import ends
from varcomm.graph.delta_ids import AscendingIds
from varcomm.graph.edge_shard import EdgeShard
from varcomm.graph.files.outline import Arrays, Outline
from varcomm.graph.files.staging import Staging, part_of
from varcomm.graph.partitioned_graph import EdgeType, NodeType, PartitionedGraph
from varcomm.graph.shard import NodeShard
from varcomm.plan.exchange_plan import ExchangePlan
from varcomm.sizes import ShardSizes
from varcomm.transport.agreement import agree, agree_and_share, on_all_ranks, share
from varcomm.transport.group import Group, GroupLike, resolve

__all__ = ["load", "save"]

# Beside the attributes of nodes, on their way: no name that one of these could have.
_OWNER = " owner"


def save(graph: PartitionedGraph, folder: str | os.PathLike[str]) -> None:
    """Write each rank's part into a folder; collective. See :meth:`PartitionedGraph.save`."""
    group, what = graph.group, "graph.save"
    numbers = {key: _numbers(graph, key) for key in graph.edge_shards}

    def collect() -> tuple[Staging, Arrays]:
        return Staging.of(folder, graph.attributes), dict(part_of(graph, numbers))

    (staging, part), tokens = agree_and_share(what, collect, lambda one: one[0].token, group)
    staging = replace(staging, token=tokens[0])

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


def _numbers(graph: PartitionedGraph, edge_type: EdgeType) -> torch.Tensor:
    """Return the global numbers of the halo's nodes; collective."""
    edges = graph.edge_shards[edge_type]
    first = graph.node_shards[ends(edge_type)[0]].sizes.offsets[graph.group.rank]
    device = edges.edge_index.device
    return edges.plan(torch.arange(first, first + edges.num_sources, device=device))


def _of(part: Arrays, prefix: str) -> Arrays:
    """Return the attributes of one type of nodes or edges."""
    start = f"{prefix}."
    return {name.removeprefix(start): v for name, v in part.items() if name.startswith(start)}


def _as_saved(
    outline: Outline, part: Arrays, attributes: Mapping[str, Any], group: Group
) -> PartitionedGraph:
    """Return the very part that this rank saved; only the plan is made anew."""
    nodes: dict[NodeType, NodeShard] = {}
    for place, (node_type, sizes) in enumerate(outline.nodes.items()):
        ids = AscendingIds.of(part[f"nodes {place}"])
        nodes[node_type] = NodeShard(group, sizes, _of(part, f"nodes {place}"), ids)
    edges: dict[EdgeType, EdgeShard] = {}
    for place, (edge_type, sizes) in enumerate(outline.edges.items()):
        sources, targets = (nodes[end] for end in ends(edge_type))
        halo = part[f"edges {place} halo numbers"]
        edges[edge_type] = EdgeShard(
            group=group,
            sizes=sizes,
            attributes=_of(part, f"edges {place}"),
            ids=AscendingIds.of(part[f"edges {place}"]),
            edge_index=part[f"edges {place} edge_index"],
            halo_ids=part[f"edges {place} halo ids"],
            plan=ExchangePlan.from_needed(halo, sources.sizes, group=group.process_group),
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

    def joined(name: str) -> torch.Tensor:
        array = outline.part[name]
        none = torch.empty(0, *array.rest, dtype=array.dtype)
        return torch.cat([none, *(part[name] for part in parts)])

    def attributes_of(prefix: str) -> Arrays:
        names = [name for name in outline.part if name.startswith(f"{prefix}.")]
        return {name.removeprefix(f"{prefix}."): joined(name) for name in names}

    nodes: dict[NodeType, BroughtNodes] = {}
    for place, (node_type, sizes) in enumerate(outline.nodes.items()):
        cut = ShardSizes.balanced(sizes.total, group.size)
        saved = range(group.rank, len(sizes), group.size)
        numbers = [torch.arange(r.start, r.stop) for r in map(sizes.range, saved)]
        owner = cut.owner(torch.cat([torch.empty(0, dtype=torch.int64), *numbers]))
        rows = attributes_of(f"nodes {place}") | {_OWNER: owner}
        home = at_home(BroughtNodes(cut, None, joined(f"nodes {place}"), rows), group)
        rest = {name: value for name, value in home.attributes.items() if name != _OWNER}
        nodes[node_type] = BroughtNodes(cut, home.attributes[_OWNER], None, rest)
    edges: dict[EdgeType, BroughtEdges] = {}
    places = {node_type: place for place, node_type in enumerate(outline.nodes)}
    for place, edge_type in enumerate(outline.edges):
        source, target = (f"nodes {places[end]}" for end in ends(edge_type))
        whole = [torch.empty(2, 0, dtype=torch.int64)]
        for part in parts:
            known = torch.cat([part[source], part[f"edges {place} halo ids"]])
            rows, columns = part[f"edges {place} edge_index"]
            whole.append(torch.stack([known[rows], part[target][columns]]))
        edges[edge_type] = BroughtEdges(
            torch.cat(whole, dim=1), joined(f"edges {place}"), attributes_of(f"edges {place}")
        )
    return sent_to_owners(nodes, edges, attributes, outline.method, group)
