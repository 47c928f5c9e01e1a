"""``migrate``: nodes, and the edges into them, to new owners; only rows that leave are sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from varcomm.errors import ArgumentError
from varcomm.graph.build.assemble import assemble, checked_owner, moved_edges
from varcomm.graph.build.groups import checked_names, ids_of_groups, names_of_groups
from varcomm.graph.build.move import Move
from varcomm.graph.build.pyg_data import check_name, ends
from varcomm.graph.build.several_hops import deepened
from varcomm.graph.edge_shard import EdgeShard
from varcomm.graph.index.partitioned_index import plain
from varcomm.graph.node_shard import NodeShard, Ranks, Shard, described
from varcomm.graph.partitioned_graph import NodeType, PartitionedGraph
from varcomm.graph.partitioners.assign import assign_sharded
from varcomm.ops.checks import checked_tensor
from varcomm.ops.digest import require_equal
from varcomm.sizes import ShardSizes
from varcomm.transport.agreement import agree_and_share

Rows = dict[str, torch.Tensor]

_WHAT = "graph.migrate"


def migrate(
    graph: PartitionedGraph,
    owner: str | Ranks | Mapping[str, Ranks],
    node_attrs: Mapping[str, Any] | None = None,
    groups: Sequence[str] = (),
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
    owner : torch.Tensor or numpy.ndarray or sequence of int or str
        New rank of each owned node, integers of shape (n,). With several types of nodes, pass a
        dict by type; nodes of a missing type stay. ``"rcb"`` or ``"hilbert"`` assign owners as
        in :func:`assign_sharded`, from the attribute ``pos``.
    node_attrs : mapping of str to torch.Tensor, optional
        New or changed attributes, (n, *F), such as the current positions; a dict by type if
        there are several types of nodes.
    groups : list of str
        Further attributes that hold ids of groups, as in :func:`partition`.

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

    names: list[str] = []  # on all ranks

    def check() -> tuple[dict[NodeType, torch.Tensor], dict[Any, Rows]]:
        names[:] = checked_names([*names_of_groups(graph), *checked_names(groups)])
        if owner is None:
            raise ArgumentError('owner must be ranks of nodes, "rcb" or "hilbert"; got None.')
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
        ids_of_groups({key: rows[nodes.noun, key] for key, nodes in shards}, names)
        return {key: _checked_owner(nodes, owners.get(key)) for key, nodes in shards}, rows

    def outline(own: tuple[Any, dict[Any, Rows]]) -> dict[str, str]:
        words = {"owner": "ranks of nodes" if method is None else method, "groups": f"{names}"}
        for (noun, key), rows in own[1].items():
            kind = noun if key is None else f"{noun} of {key}"
            for name, value in rows.items():
                words[f"{name} of {kind}"] = f"{value.dtype}, rows of shape {list(value.shape[1:])}"
        return words

    (owners, rows), of_ranks = agree_and_share(_WHAT, check, outline, graph.group)
    require_equal(_WHAT, of_ranks)
    if method is not None:
        owners = _by_position(graph, method, rows)
    moved = migrated(graph, owners, rows, method or "the ranks given", names)
    return deepened(moved, graph.hops)


def _checked_owner(nodes: NodeShard, owner: Any) -> torch.Tensor:
    device = nodes.ids.device
    if owner is None:
        return torch.full((nodes.num_owned,), nodes.group.rank, device=device)
    return checked_owner(owner, nodes.num_owned, nodes.group.size, "owner").to(device)


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


def migrated(
    graph: PartitionedGraph,
    owners: Mapping[NodeType, torch.Tensor],
    rows: Mapping[Any, Rows],
    method: str,
    groups: Sequence[str],
) -> PartitionedGraph:
    """Return the graph with halos of one hop for checked owners and attributes; collective."""
    group, shards, numbers, edges = graph.group, {}, {}, {}
    for key, nodes in graph.node_shards.items():
        move = Move.to(owners[key], nodes.owned_ids, group)
        sizes = ShardSizes.from_local(len(move.ids), group.process_group)
        shards[key] = NodeShard(group, sizes, move.rows(rows["nodes", key]), move.ids)
        numbers[key] = move.numbers(sizes.offsets[group.rank])
    for edge_type, old in graph.edge_shards.items():
        source, target = ends(edge_type)
        near = torch.cat([numbers[source], old.plan(numbers[source])])
        ends_of_old = old.local_ids[:, : old.num_owned]
        move = Move.to(owners[target], old.owned_ids, group, ends_of_old[1])
        pairs = zip((near, numbers[target]), ends_of_old, strict=True)
        edge_index = torch.stack([number.index_select(0, end) for number, end in pairs])
        edges[edge_type] = moved_edges(move, edge_index, rows["edges", edge_type])
    return assemble(shards, edges, dict(graph.attributes), method, group, groups)
