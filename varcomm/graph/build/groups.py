"""Attributes of nodes that hold ids of groups, such as ``batch``, and those that a user names."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from varcomm.errors import ArgumentError
from varcomm.graph.build.pyg_data import label
from varcomm.graph.index.node_groups import NodeGroups
from varcomm.graph.index.partitioned_index import PartitionedIndex, plain
from varcomm.graph.node_shard import NodeShard, described
from varcomm.graph.partitioned_graph import NodeType, PartitionedGraph

__all__ = ["GroupIds", "checked_names", "ids_of_groups", "names_of_groups"]


@dataclass(frozen=True)
class GroupIds:
    """An attribute of nodes that holds ids of groups; `size` is one more than the largest here."""

    node_type: NodeType
    name: str
    size: int

    def known_in(self, nodes: NodeShard, size: int) -> NodeShard:
        """Return nodes whose attribute refers to the groups of all ranks, of which `size` exist."""
        ids = PartitionedIndex.make(
            plain(nodes.attributes[self.name]), NodeGroups(nodes.group, size), "group", whole=True
        )
        return replace(nodes, attributes={**nodes.attributes, self.name: ids})


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
    is_integer = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    return (name == "batch" or name.endswith("_batch")) and is_integer and value.dim() == 1


def _size(ids: torch.Tensor, name: str) -> int:
    """Return one more than the largest id, or raise ArgumentError."""
    if ids.dtype != torch.int64 or ids.dim() != 1:
        raise ArgumentError(
            f"{name} holds ids of groups, and must be torch.int64 of shape (N,); got "
            f"{described(ids)}."
        )
    low, high = map(int, ids.aminmax()) if len(ids) else (0, -1)
    if low < 0:
        raise ArgumentError(
            f"{name} holds ids of groups, which count from 0; got {low}. Give nodes without a "
            "group an id of their own."
        )
    return high + 1
