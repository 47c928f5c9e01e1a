"""One rank's part of a graph, assembled from rows that stand on their owners or are sent there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch_geometric.data import HeteroData

from varcomm.errors import ArgumentError
from varcomm.graph.build.pyg_data import EdgeTable, NodeTable, ends, rows_at
from varcomm.graph.directory import Directory
from varcomm.graph.edge_shard import EdgeShard
from varcomm.graph.node_shard import NodeShard, described
from varcomm.graph.partitioned_graph import EdgeType, NodeType, PartitionedGraph
from varcomm.ops.all_to_all_v import all_to_all_v
from varcomm.ops.packing import taken
from varcomm.plan.checks import checked_range
from varcomm.plan.exchange_plan import ExchangePlan
from varcomm.sizes import ShardSizes, at_least, holds_integers
from varcomm.transport.agreement import share
from varcomm.transport.group import Group

__all__ = [
    "BroughtNodes",
    "Edges",
    "Numbering",
    "Shuffle",
    "assemble",
    "check_hops",
    "checked_owner",
    "deepened",
    "localised",
    "owned_edges",
    "sent_to_owners",
]


@dataclass(frozen=True)
class Edges:
    """Edges of one type on a rank.

    `edge_index`, (2, e), holds node ids or *global numbers*, which count the nodes of a type rank
    after rank: the owner of a node follows from its number. `ids` are positions in the full graph,
    ascending on the owner.
    """

    edge_index: torch.Tensor
    ids: torch.Tensor
    attributes: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Numbering:
    """Global numbers of the nodes of one type, on a process that has the full graph.

    `owner` is the rank of each node, `number` its global number, (N,); `order` the inverse of
    `number`; `sizes` are nodes per rank.
    """

    owner: torch.Tensor
    sizes: ShardSizes
    order: torch.Tensor
    number: torch.Tensor

    @classmethod
    def of(cls, owner: torch.Tensor, ranks: int) -> Self:
        """Count the nodes of each owner, rank after rank."""
        sizes = ShardSizes(torch.bincount(owner, minlength=ranks).tolist())
        order = torch.sort(owner, stable=True).indices
        number = torch.empty_like(order)
        number[order] = torch.arange(len(order), device=order.device)
        return cls(owner, sizes, order, number)

    def shard(self, nodes: NodeTable, group: Group) -> NodeShard:
        """Return the nodes that this rank owns."""
        mine = self.sizes.range(group.rank)
        ids = self.order[mine.start : mine.stop]
        attributes = {key: rows_at(value, ids) for key, value in nodes.attributes.items()}
        return NodeShard(group, self.sizes, attributes, ids)


def checked_owner(owner: Any, nodes: int, size: int) -> torch.Tensor:
    """Return the rank of each node as int64, if `owner` is valid for `size` ranks."""
    if isinstance(owner, np.ndarray) and owner.dtype.kind in "iu":
        owner = torch.from_numpy(owner.astype(np.int64))
    if not isinstance(owner, torch.Tensor) or owner.shape != (nodes,) or not holds_integers(owner):
        raise ArgumentError(
            f"method, if not a name, must hold the rank of each of the {nodes} nodes as integers; "
            f"got {described(owner)}."
        )
    ranks = owner.to(torch.int64)
    checked_range(ranks, size, "method", "ranks")
    return ranks


def owned_edges(edges: EdgeTable, rank: int, sources: Numbering, targets: Numbering) -> Edges:
    """Return the edges into nodes that a rank owns, from all edges of the full graph."""
    # a table of bools fits into the cache, a table of numbers does not
    is_mine = targets.owner == rank
    ids = torch.nonzero(is_mine[edges.edge_index[1]]).view(-1)
    source, target = edges.edge_index
    numbers = torch.stack([sources.number[source[ids]], targets.number[target[ids]]])
    return Edges(numbers, ids, {key: rows_at(v, ids) for key, v in edges.attributes.items()})


def assemble(
    nodes: Mapping[NodeType, NodeShard],
    edges: Mapping[EdgeType, Edges],
    attributes: Mapping[str, Any],
    method: str,
    group: Group,
) -> PartitionedGraph:
    """Build this rank's part of the graph from owned edges by global numbers; collective."""
    counts = share("graph.partition", lambda: [len(own.ids) for own in edges.values()], group)
    shards = {}
    for (edge_type, own), sizes in zip(edges.items(), zip(*counts, strict=True), strict=True):
        sources, targets = (nodes[end] for end in ends(edge_type))
        edge_index, halo = localised(own.edge_index, sources.sizes, targets.sizes, group)
        plan = ExchangePlan.from_needed(halo, sources.sizes, group=group.process_group)
        shards[edge_type] = EdgeShard(
            group=group,
            sizes=ShardSizes(sizes),
            attributes=own.attributes,
            ids=own.ids,
            local_ids=edge_index,
            halo_ids=plan(sources.owned_ids),
            plan=plan,
            num_targets=targets.num_owned,
        )
    return PartitionedGraph(dict(nodes), shards, dict(attributes), method)


def localised(
    numbers: torch.Tensor, sources: ShardSizes, targets: ShardSizes, group: Group
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return edges in local numbers, and the halo's global numbers, ascending and so by owner."""
    mine, source = sources.range(group.rank), numbers[0]
    edge_index = numbers - numbers.new_tensor([[mine.start], [targets.offsets[group.rank]]])
    is_halo = torch.nonzero((source < mine.start) | (source >= mine.stop)).view(-1)
    halo, position = torch.unique(source[is_halo], return_inverse=True)
    edge_index[0, is_halo] = position + len(mine)
    return edge_index, halo


@dataclass(frozen=True)
class BroughtNodes:
    """The nodes of one type that this rank contributes: ``ranges.range(rank)`` in some order.

    `owner` holds their future owners (None: this rank), and `ids` their ids in the full graph
    (None: the range).
    """

    ranges: ShardSizes
    attributes: Mapping[str, torch.Tensor]
    owner: torch.Tensor | None = None
    ids: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class Shuffle:
    """Destinations of this rank's rows; received rows stand by sender, in the sender's order.

    `order` sorts this rank's rows by destination (None: sorted); `send` and `recv` are rows per
    rank.
    """

    group: Group
    order: torch.Tensor | None
    send: tuple[int, ...]
    recv: tuple[int, ...]

    @classmethod
    def to(cls, destination: torch.Tensor, group: Group) -> Self:
        """Plan from the rank to which each row goes, int64 of shape (rows,); collective."""
        counts = torch.bincount(destination, minlength=group.size)
        in_order = bool((destination.diff() >= 0).all())
        order = None if in_order else torch.sort(destination, stable=True).indices
        ones = (1,) * group.size
        recv = all_to_all_v(counts, ones, ones, group=group.process_group)
        return cls(group, order, tuple(counts.tolist()), tuple(recv.tolist()))

    def carry(self, rows: torch.Tensor) -> torch.Tensor:
        """Send rows, (rows, *F), and return the received rows; collective, not differentiable."""
        rows = rows.detach()
        if self.order is not None:
            rows = taken(rows, self.order)
        return all_to_all_v(rows, self.send, self.recv, group=self.group.process_group)

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        """Return a row for each received row to its sender, in the order before; collective."""
        rows = all_to_all_v(rows, self.recv, self.send, group=self.group.process_group)
        return rows if self.order is None else rows[self.order.argsort()]


def _placed(own: BroughtNodes, group: Group, device: torch.device) -> tuple[Directory, NodeShard]:
    """Send nodes to their owners; return global numbers by contributed nodes, and owned nodes."""
    mine, sizes, shuffle = own.ranges.range(group.rank), own.ranges, None
    ids = torch.arange(mine.start, mine.stop, device=device) if own.ids is None else own.ids
    rows, numbers = {key: value.detach() for key, value in own.attributes.items()}, None
    if own.owner is not None:
        shuffle = Shuffle.to(own.owner, group)
        ids, rows = shuffle.carry(ids), {key: shuffle.carry(value) for key, value in rows.items()}
        sizes = ShardSizes.from_local(len(ids), group.process_group)
    in_order = bool((ids.diff() > 0).all())
    is_mixed = own.ids is not None and not all(share("graph.partition", lambda: in_order, group))
    if shuffle is not None or is_mixed:
        numbers = torch.arange(len(ids), device=device) + sizes.offsets[group.rank]
        if not in_order:
            ids, order = ids.sort()
            numbers = numbers[order.argsort()]
            rows = {key: taken(value, order) for key, value in rows.items()}
        numbers = numbers if shuffle is None else shuffle.back(numbers)
    directory = Directory(group, sizes, own.ranges, numbers)
    return directory, NodeShard(group, sizes, rows, ids)


def sent_to_owners(
    nodes: Mapping[NodeType, BroughtNodes],
    edges: Mapping[EdgeType, Edges],
    attributes: Mapping[str, Any],
    name: str,
    group: Group,
) -> PartitionedGraph:
    """Send nodes and edges to their owners, and build the graph; collective.

    Ends of edges count the contributed nodes rank by rank.
    """
    devices = [brought.ids.device for brought in edges.values()] or [torch.device("cpu")]
    placed = {key: _placed(own, group, devices[0]) for key, own in nodes.items()}
    owned = {
        key: _owned_edges(brought, *(placed[end][0] for end in ends(key)))
        for key, brought in edges.items()
    }
    shards = {key: shard for key, (_, shard) in placed.items()}
    return assemble(shards, owned, attributes, name, group)


def _owned_edges(brought: Edges, sources: Directory, targets: Directory) -> Edges:
    """Exchange contributed edges for the edges into this rank's nodes; collective."""
    if sources is targets:
        source, target = sources.look_up(brought.edge_index)
    else:
        source, target = brought.edge_index
        source, target = sources.look_up(source), targets.look_up(target)
    shuffle = Shuffle.to(targets.sizes.owner(target), targets.group)
    source, target, ids = (shuffle.carry(each) for each in (source, target, brought.ids))
    edge_index = torch.stack([source, target])
    rows = {key: shuffle.carry(value) for key, value in brought.attributes.items()}
    if not bool((ids.diff() > 0).all()):
        ids, order = ids.sort()
        edge_index = edge_index[:, order]
        rows = {key: taken(value, order) for key, value in rows.items()}
    return Edges(edge_index, ids, rows)


def check_hops(hops: int, data: Any) -> None:
    """Raise unless halos can have this many hops."""
    if at_least(1, hops, "hops") > 1 and isinstance(data, HeteroData):
        raise ArgumentError(
            f"hops={hops} is for graphs with one type of nodes. Leave hops at 1 for HeteroData."
        )


def deepened(graph: PartitionedGraph, hops: int) -> PartitionedGraph:
    """Return the graph with a halo of `hops` hops, and the edges into all but the last hop.

    Collective. Per hop, each rank requests the edges into its outermost nodes from their owners.
    Halo nodes of all hops stand in the order of their global numbers; edges into the halo
    stand behind the owned edges.
    """
    if hops == 1:
        return graph
    edges, sizes, group = graph.edges, graph.node_sizes, graph.group
    pg, rank = group.process_group, group.rank
    first, owned = sizes.offsets[rank], graph.num_owned
    own_numbers = torch.arange(first, first + owned, device=edges.local_ids.device)
    halo = edges.plan(own_numbers)
    number = torch.cat([own_numbers, halo])
    source, target = edges.local_ids
    # sorted, because ranks may have their attributes in different orders
    own = {f"attribute {key}": edges.attributes[key] for key in sorted(edges.attributes)}
    own |= {"source": number[source], "target": number[target]}
    by_target = torch.sort(target, stable=True).indices
    counts = torch.bincount(target, minlength=owned)

    found, frontier = [own], halo
    for _ in range(hops - 1):
        if not any(share("graph.partition", frontier.__len__, group)):
            break  # no rank needs more edges
        asked = ExchangePlan.from_needed(frontier, sizes, group=pg)
        index, destination = _edges_into(asked, by_target, counts)
        shuffle = Shuffle.to(destination, group)
        more = {key: shuffle.carry(taken(value, index)) for key, value in own.items()}
        found.append(more)
        sources = more["source"].unique()
        frontier = sources[~torch.isin(sources, halo) & ~_is_own(sources, first, owned)]
        halo = torch.cat([halo, frontier]).sort().values

    whole = {key: torch.cat([part[key] for part in found]) for key in own}
    plan = ExchangePlan.from_needed(halo, sizes, group=pg)
    numbers = torch.stack([whole["source"], whole["target"]])
    beyond = owned + torch.searchsorted(halo, numbers)
    shard = replace(
        edges,
        attributes={key: whole[f"attribute {key}"] for key in edges.attributes},
        local_ids=torch.where(_is_own(numbers, first, owned), numbers - first, beyond),
        halo_ids=plan(graph.owned_ids),
        plan=plan,
        hops=int(hops),
        counts=None,
    )
    return replace(graph, edge_shards={None: shard})


def _is_own(numbers: torch.Tensor, first: int, owned: int) -> torch.Tensor:
    return (numbers >= first) & (numbers < first + owned)


def _edges_into(
    asked: ExchangePlan, by_target: torch.Tensor, counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the edges into the requested nodes, and the requesting rank of each edge."""
    starts, counts = (counts.cumsum(0) - counts)[asked.send_index], counts[asked.send_index]
    # position of each edge among the edges of its node, and so in `by_target`
    first = (counts.cumsum(0) - counts).repeat_interleave(counts)
    nth = torch.arange(len(first), device=first.device) - first
    index = by_target[starts.repeat_interleave(counts) + nth]
    per_rank = torch.tensor(asked.send_counts, device=first.device)
    ranks = torch.arange(len(per_rank), device=first.device).repeat_interleave(per_rank)
    return index, ranks.repeat_interleave(counts)
