"""``migrate``: nodes, and the edges into them, to new owners; only rows that leave are sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from varcomm.errors import ArgumentError, DisagreementError
from varcomm.graph.build.assemble import deepened
from varcomm.graph.build.pyg_data import check_name, ends
from varcomm.graph.edge_shard import EdgeShard
from varcomm.graph.index.partitioned_index import plain
from varcomm.graph.node_shard import NodeShard, Shard, described
from varcomm.graph.partitioned_graph import NodeType, PartitionedGraph
from varcomm.graph.partitioners.assign import assign_sharded
from varcomm.ops.checks import checked_tensor
from varcomm.ops.packing import signed, taken
from varcomm.plan.checks import checked_index
from varcomm.plan.exchange_plan import ExchangePlan
from varcomm.sizes import ShardSizes
from varcomm.transport.agreement import agree_and_share, share
from varcomm.transport.group import Group

__all__ = ["migrate", "migrated"]

Rows = dict[str, torch.Tensor]

_WHAT = "graph.migrate"


def migrate(
    graph: PartitionedGraph,
    owner: str | torch.Tensor | Mapping[str, torch.Tensor],
    node_attrs: Mapping[str, Any] | None = None,
) -> PartitionedGraph:
    """Return the graph with new owners of its nodes; this graph does not change.

    Collective; an error on one rank is raised on all ranks. A node moves with its attributes,
    the edges into it, and the attributes of these edges. The result equals :func:`partition`
    with these owners. Attributes are not differentiable: :func:`transfer` moves any tensor with
    its gradient.
    Communication: each node and edge that moves is sent once, and a few numbers per halo node
    and per rank.

    Parameters
    ----------
    owner : torch.Tensor or str
        New rank of each owned node, int64 of shape (n,). With several types of nodes, pass a
        dict by type; nodes of a missing type stay. ``"rcb"`` or ``"hilbert"`` assign owners as
        in :func:`assign_sharded`, from the attribute ``pos``.
    node_attrs : mapping of str to torch.Tensor, optional
        New or changed attributes, (n, *F), such as the current positions; a dict by type if
        there are several types of nodes.

    Returns
    -------
    PartitionedGraph
        This rank's new part, on the same device, with the same hops.

    Raises
    ------
    ArgumentError
        On every rank, if an owner is out of range, or an attribute does not have one row per
        node.
    DisagreementError
        On every rank, if attributes differ in name, dtype or row shape.

    Examples
    --------
    >>> import torch, varcomm
    >>> from torch_geometric.data import Data
    >>> def fn(rank):
    ...     edge_index = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    ...     ring = Data(x=torch.arange(4.0), edge_index=edge_index)
    ...     old = varcomm.graph.partition(ring, method="block")
    ...     new = old.migrate(torch.tensor([[0, 1], [1, 1]][rank]))
    ...     return new.x.tolist(), new.halo_ids.tolist()
    >>> varcomm.launch(fn, 2)
    [([0.0], [3]), ([1.0, 2.0, 3.0], [0])]
    """
    method = owner if isinstance(owner, str) else None

    def by_type(given: Any, name: str) -> Mapping[NodeType, Any]:
        if given is None:
            return {}
        given = {None: given} if None in graph.node_shards else given
        if not isinstance(given, Mapping) or not given.keys() <= graph.node_shards.keys():
            raise ArgumentError(
                f"{name} must be given by type of node, of {graph.node_types}; got "
                f"{list(given) if isinstance(given, Mapping) else described(given)}."
            )
        return given

    def check() -> tuple[dict[NodeType, torch.Tensor], dict[Any, Rows]]:
        if owner is None:
            raise ArgumentError('owner must be a tensor of ranks, "rcb" or "hilbert"; got None.')
        owners = by_type(owner, "owner") if method is None else {}
        current = by_type(node_attrs, "node_attrs")
        rows: dict[Any, Rows] = {}
        for key, nodes in graph.node_shards.items():
            rows[nodes.noun, key] = _rows(nodes, {**nodes.attributes, **current.get(key, {})})
        for edge_type, edges in graph.edge_shards.items():
            rows[edges.noun, edge_type] = _rows(edges, edges.attributes)
            others = graph.attributes.keys() | edges.attributes.keys()
            if None in current and (shadowed := current[None].keys() & others):
                raise ArgumentError(
                    f"node_attrs: {sorted(shadowed)} are attributes of the graph or of edges. "
                    "Rename them."
                )
        shards = graph.node_shards.items()
        return {key: _checked_owner(nodes, owners.get(key)) for key, nodes in shards}, rows

    def outline(own: tuple[Any, dict[Any, Rows]]) -> list[str]:
        kinds = [
            f"{name} of {value.dtype} and shape {list(value.shape[1:])}"
            for rows in own[1].values()
            for name, value in rows.items()
        ]
        return ["owner by rank" if method is None else f"owner={method!r}", *kinds]

    (owners, rows), of_ranks = agree_and_share(_WHAT, check, outline, graph.group)
    for rank, other in enumerate(of_ranks):
        if other != of_ranks[0]:
            pairs = zip(of_ranks[0], other, strict=False)
            one, two = next((p for p in pairs if p[0] != p[1]), ("some attributes", "others"))
            raise DisagreementError(f"{_WHAT}: rank 0 has {one}, and rank {rank} has {two}.")
    if method is not None:
        owners = _by_position(graph, method, rows)
    return deepened(migrated(graph, owners, rows, method or "the ranks given"), graph.hops)


def _checked_owner(nodes: NodeShard, owner: Any) -> torch.Tensor:
    device = nodes.ids.device
    if owner is None:
        return torch.full((nodes.num_owned,), nodes.group.rank, device=device)
    if not isinstance(owner, torch.Tensor) or owner.shape != (nodes.num_owned,):
        raise ArgumentError(
            f"owner must be a tensor with the rank of each of the {nodes.num_owned} owned nodes; "
            f"got {described(owner)}."
        )
    return checked_index(owner, nodes.group.size, "owner", "ranks").to(device)


def _rows(shard: Shard, attributes: Mapping[str, Any]) -> Rows:
    """Return the attributes of owned rows, by name in the order in which all ranks send them."""
    found = {}
    for name, value in sorted(attributes.items()):
        if name not in shard.attributes:
            check_name(name, value, "node_attrs")
        rows = shard.num_owned
        if isinstance(shard, EdgeShard):
            rows = shard.edge_index.shape[1]  # with edges into the halo
        if not isinstance(value, torch.Tensor) or value.shape[:1] != (rows,):
            raise ArgumentError(
                f"{name} must be a tensor with a row for each of {rows} {shard.noun}; got "
                f"{described(value)}. Remove it, or make it a tensor."
            )
        value = plain(value).detach()
        checked_tensor(value, "", name)
        found[name] = value[: shard.num_owned].to(shard.ids.device)
    return found


def _by_position(
    graph: PartitionedGraph, method: str, rows: Mapping[Any, Rows]
) -> dict[NodeType, torch.Tensor]:
    """Return owners of the nodes of all types from their positions; collective."""

    def positions() -> torch.Tensor:
        kinds = list(graph.node_shards)
        if missing := [kind for kind in kinds if "pos" not in rows["nodes", kind]]:
            raise ArgumentError(f'owner="{method}" needs the attribute pos; {missing} has none.')
        found = [rows["nodes", kind]["pos"] for kind in kinds]
        if len({pos.shape[1:] for pos in found}) > 1:
            raise ArgumentError("pos must have as many coordinates for nodes of every type.")
        return torch.cat(found)

    pos = agree_and_share(_WHAT, positions, lambda _: None, graph.group)[0]
    owner = assign_sharded(pos, graph.group.size, method, group=graph.group.process_group)
    parts = owner.split([shard.num_owned for shard in graph.node_shards.values()])
    return dict(zip(graph.node_shards, parts, strict=True))


@dataclass(frozen=True, eq=False)
class _Move:
    """Owned rows of one kind that leave for other ranks, and rows that arrive and are merged by id.

    `leaving` are old positions of rows by their new ranks. Arriving rows, in the order `arrival`,
    stand at the positions `at`; `origin` is the old position of every new row, 0 of an arriving
    one. `ids` are the new ids, ascending.
    """

    plan: ExchangePlan
    leaving: torch.Tensor
    arrival: torch.Tensor
    at: torch.Tensor
    origin: torch.Tensor
    ids: torch.Tensor

    @classmethod
    def of(cls, ids: torch.Tensor, leaves: torch.Tensor, owner: torch.Tensor, group: Group) -> Self:
        """Send ids; `owner` holds the new ranks of the rows that leave. Collective.

        For example, 20 leaves of ids 10, 20, 30, and 15 and 40 arrive: new ids are 10, 15, 30, 40.
        Kept rows 0 and 2 stand at 0 and 2, arrived ones `at` 1 and 3, and `origin` is 0, 0, 2, 0.
        """
        device, pg = ids.device, group.process_group
        gone, kept = leaves.nonzero().view(-1), (~leaves).nonzero().view(-1)
        leaving = gone[torch.sort(owner, stable=True).indices]
        counts = torch.bincount(owner, minlength=group.size).tolist()
        plan = ExchangePlan.from_indices(
            torch.arange(len(gone), device=device).split(counts), len(gone), group=pg
        )
        arrived, arrival = plan(ids[leaving]).sort()
        before = torch.searchsorted(ids, arrived)
        before -= torch.searchsorted(gone, before)  # kept rows before each arriving one
        at = before + torch.arange(len(arrived), device=device)
        stays = torch.ones(len(kept) + len(at), dtype=torch.bool, device=device)
        stays[at] = False
        origin = torch.zeros_like(stays, dtype=torch.int32).masked_scatter_(stays, kept.int())
        move = cls(plan, leaving, arrival, at, origin, arrived)
        return replace(move, ids=move.merged(ids, arrived))

    def sent(self, rows: torch.Tensor) -> torch.Tensor:
        """Send rows that leave, and return arriving rows by id; collective."""
        return taken(self.plan(taken(rows, self.leaving)), self.arrival)

    def merged(self, rows: torch.Tensor, arriving: torch.Tensor) -> torch.Tensor:
        """Return the new rows from old rows and arriving rows."""
        if len(self.origin) == len(self.at):
            return arriving
        out = signed(rows).index_select(0, self.origin)
        return out.index_copy_(0, self.at, signed(arriving)).view(rows.dtype)

    def numbers(self, first: int, leaves: torch.Tensor) -> torch.Tensor:
        """Return the new global numbers of the old rows; `first` is the first new number."""
        stays = torch.ones_like(self.origin, dtype=torch.bool).index_fill_(0, self.at, False)
        numbers = torch.empty_like(leaves, dtype=torch.int64)
        numbers[~leaves] = stays.nonzero().view(-1) + first
        arrived = torch.empty_like(self.at)
        arrived[self.arrival] = self.at + first
        numbers[self.leaving] = self.plan.adjoint(arrived)
        return numbers

    def rows(self, rows: Rows) -> Rows:
        """Return the attributes of the new rows; collective."""
        return {name: self.merged(value, self.sent(value)) for name, value in rows.items()}


def migrated(
    graph: PartitionedGraph,
    owners: Mapping[NodeType, torch.Tensor],
    rows: Mapping[Any, Rows],
    method: str,
) -> PartitionedGraph:
    """Return the graph with halos of one hop for checked owners and attributes; collective."""
    group, moves = graph.group, {}
    for key, nodes in graph.node_shards.items():
        leaves = owners[key] != group.rank
        moves[key] = _Move.of(nodes.owned_ids, leaves, owners[key][leaves], group)
    counts = share(_WHAT, lambda: [len(move.ids) for move in moves.values()], group)
    shards, numbers = {}, {}
    for (key, move), column in zip(moves.items(), zip(*counts, strict=True), strict=True):
        sizes = ShardSizes(column)
        ids = move.ids
        shards[key] = NodeShard(group, sizes, move.rows(rows["nodes", key]), ids)
        numbers[key] = move.numbers(sizes.offsets[group.rank], owners[key] != group.rank)
    edges = {}
    for edge_type, old in graph.edge_shards.items():
        source, target = ends(edge_type)
        near = torch.cat([numbers[source], old.plan(numbers[source])])
        into = old.local_ids[1, : old.num_owned]
        leaves = (owners[target] != group.rank).index_select(0, into)
        move = _Move.of(old.owned_ids, leaves, owners[target][into[leaves]], group)
        pair = shards[source], shards[target]
        edges[edge_type] = _edges(
            old, move, rows["edges", edge_type], (near, numbers[target]), *pair
        )
    return PartitionedGraph(shards, edges, dict(graph.attributes), method)


def _edges(
    old: EdgeShard,
    move: _Move,
    rows: Rows,
    numbers: tuple[torch.Tensor, torch.Tensor],
    sources: NodeShard,
    targets: NodeShard,
) -> EdgeShard:
    """Return the edges into the new nodes of this rank, with a halo of one hop; collective.

    `numbers` are the new global numbers of the old sources, owned and halo, and of the old targets.
    """
    group, ends_of_old = old.group, old.local_ids[:, : old.num_owned]
    pairs = [*zip(numbers, ends_of_old, strict=True)]
    sent = torch.stack([number[end[move.leaving]] for number, end in pairs], dim=1)
    tables, places = [], []
    for (number, end), arrived in zip(pairs, taken(move.plan(sent), move.arrival).T, strict=True):
        tables.append(torch.cat([number, arrived]))
        beyond = torch.arange(len(number), len(tables[-1]), device=arrived.device)
        places.append(move.merged(end, beyond))
    near, mine = tables[0], sources.sizes.range(group.rank)
    is_used = torch.zeros_like(near, dtype=torch.bool).index_fill_(0, places[0], True)
    is_far = (near < mine.start) | (near >= mine.stop)
    halo = near[is_used & is_far].unique()
    local = near - mine.start
    local[is_far] = torch.searchsorted(halo, near[is_far]) + len(mine)
    into = tables[1] - targets.sizes.offsets[group.rank]
    pairs = [(local, places[0]), (into, places[1])]
    plan = ExchangePlan.from_needed(halo, sources.sizes, group=group.process_group)
    return EdgeShard(
        group=group,
        sizes=ShardSizes.from_local(len(move.ids), group.process_group),
        attributes=move.rows(rows),
        ids=move.ids,
        local_ids=torch.stack([table.index_select(0, at) for table, at in pairs]),
        halo_ids=plan(sources.owned_ids),
        plan=plan,
        num_targets=targets.num_owned,
    )
