"""Attributes of nodes that hold ids of groups, such as ``batch``, and those that a user names."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from varcomm.errors import ArgumentError
from varcomm.graph.build.pyg_data import label
from varcomm.graph.index.node_groups import NodeGroups
from varcomm.graph.index.node_integers import NodeIntegers, is_integer
from varcomm.graph.index.partitioned_index import PartitionedIndex, plain
from varcomm.graph.node_shard import NodeShard, described
from varcomm.graph.partitioned_graph import NodeType, PartitionedGraph


@dataclass(frozen=True)
class GroupIds:
    """An attribute of nodes that holds ids of groups; `size` is one more than the largest here."""

    node_type: NodeType
    name: str
    size: int


def with_groups(
    nodes: Mapping[NodeType, NodeShard], found: Sequence[GroupIds], sizes: Sequence[int]
) -> dict[NodeType, NodeShard]:
    """Return nodes whose integers refer to groups of all ranks, of these sizes, or to none."""
    size_of = {(one.node_type, one.name): n for one, n in zip(found, sizes, strict=True)}
    out = {}
    for key, shard in nodes.items():
        values = {name: plain(value) for name, value in shard.attributes.items()}
        for name, value in values.items():
            if (key, name) in size_of:
                of, ids = NodeGroups(shard.group, size_of[key, name]), value.to(torch.int64)
                values[name] = PartitionedIndex.make(ids, of, "group", whole=True)
            elif is_integer(value) and value.dim() and shard.group.size > 1:
                values[name] = NodeIntegers.make(value, name)
        out[key] = replace(shard, attributes=values)
    return out


def checked_names(groups: Any) -> list[str]:
    """Return names of attributes, each once, or raise ArgumentError."""
    is_list = isinstance(groups, Collection) and not isinstance(groups, str | Mapping)
    if not is_list or not all(isinstance(name, str) for name in groups):
        raise ArgumentError(
            'groups must be a list of names of attributes of nodes, such as ["cell"]; got '
            f"{groups!r}."
        )
    return sorted({*groups})


def names_of_groups(graph: PartitionedGraph) -> list[str]:
    """Return the names of attributes that hold ids of groups, of nodes of any type."""
    values = [pair for nodes in graph.node_shards.values() for pair in nodes.attributes.items()]
    return sorted({name for name, value in values if isinstance(value, PartitionedIndex)})


def ids_of_groups(
    nodes: Mapping[NodeType, Mapping[str, Any]], names: Sequence[str]
) -> list[GroupIds]:
    """Return the attributes of these names and PyG's batch vectors, or raise ArgumentError."""
    for name in names:
        if not any(name in rows for rows in nodes.values()):
            have = sorted({name for rows in nodes.values() for name in rows})
            raise ArgumentError(
                f"groups: nodes have no attribute {name!r}; they have {', '.join(have) or 'none'}."
            )
    return [
        GroupIds(key, name, _size(rows[name], f"{label(key)}.{name}"))
        for key, rows in nodes.items()
        for name in sorted(rows)
        if name in names or _is_batch(name, rows[name])
    ]


def _is_batch(name: str, value: torch.Tensor) -> bool:
    """Return whether PyG made an attribute of graph ids, by its name: batch, or x_batch."""
    return (name == "batch" or name.endswith("_batch")) and is_integer(value) and value.dim() == 1


def _size(ids: torch.Tensor, name: str) -> int:
    """Return one more than the largest id, or raise ArgumentError."""
    if not is_integer(ids) or ids.dim() != 1:
        raise ArgumentError(
            f"{name} holds ids of groups, and must be integers of shape (N,); got {described(ids)}."
        )
    low, high = map(int, ids.aminmax()) if len(ids) else (0, -1)
    if low < 0:
        raise ArgumentError(
            f"{name} holds ids of groups, which count from 0; got {low}. Give nodes without a "
            "group an id of their own."
        )
    return high + 1
