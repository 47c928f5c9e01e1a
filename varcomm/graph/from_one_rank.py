"""A graph that one rank has, sent to all: it speaks for all nodes and brings all edges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from varcomm.errors import ArgumentError
from varcomm.graph.brought import BroughtEdges, BroughtNodes, sent_to_owners
from varcomm.graph.partitioned_graph import EdgeType, NodeType, PartitionedGraph
from varcomm.graph.tables import Tables
from varcomm.layout import ShardSizes
from varcomm.transport.agree import share
from varcomm.transport.group import Group

__all__ = ["from_one_rank"]


def from_one_rank(
    what: str,
    given: tuple[Tables, Mapping[NodeType, torch.Tensor], str] | None,
    src: int,
    group: Group,
) -> PartitionedGraph:
    """Build the graph that rank `src` has, whose nodes it has assigned; collective.

    It speaks for all nodes and brings all edges, and the others bring nothing.
    """

    def outline() -> tuple[Any, ...] | None:
        if given is None:
            return None
        tables, _, name = given
        nodes = {
            key: (table.count, _outline(table.attributes)) for key, table in tables.nodes.items()
        }
        edges = {key: _outline(table.attributes) for key, table in tables.edges.items()}
        kinds = {table.edge_index.device.type for table in tables.edges.values()} or {"cpu"}
        return nodes, edges, dict(tables.attributes), name, kinds.pop()

    told = share(what, outline, group)[src]
    assert told is not None
    node_outlines, edge_outlines, attributes, name, device = told
    nodes: dict[NodeType, BroughtNodes] = {}
    edges: dict[EdgeType, BroughtEdges] = {}
    for node_type, (count, rows) in node_outlines.items():
        ranges = ShardSizes(count * (rank == src) for rank in range(group.size))
        if given is None:
            owner = torch.empty(0, dtype=torch.int64, device=device)
            nodes[node_type] = BroughtNodes(ranges, owner, None, _nothing(rows, device))
        else:
            table, owner = given[0].nodes[node_type], given[1][node_type]
            nodes[node_type] = BroughtNodes(
                ranges, owner.to(device), None, _whole(table.attributes)
            )
    for edge_type, rows in edge_outlines.items():
        if given is None:
            none = torch.empty(2, 0, dtype=torch.int64, device=device)
            edges[edge_type] = BroughtEdges(none, _nothing(rows, device))
        else:
            own = given[0].edges[edge_type]
            edges[edge_type] = BroughtEdges(own.edge_index, _whole(own.attributes))
    return sent_to_owners(nodes, edges, attributes, name, group)


def _outline(attributes: Mapping[str, Any]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Return what others need to know of the rows that one rank has of everything."""
    return {key: (value.dtype, value.shape[1:]) for key, value in _whole(attributes).items()}


def _whole(attributes: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    rows = {}
    for key, attribute in attributes.items():
        value = attribute.value
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            value = torch.from_numpy(value)
        if not isinstance(value, torch.Tensor) or attribute.dim != 0:
            raise ArgumentError(
                f"data.{key} must be a tensor with a row for each node or edge, to be sent from "
                f"one rank; got {type(value).__name__}. Make it one, or give data to all ranks."
            )
        rows[key] = value
    return rows


def _nothing(outline: Mapping[str, Any], device: str) -> dict[str, torch.Tensor]:
    return {
        key: torch.empty(0, *shape, dtype=dtype, device=device)
        for key, (dtype, shape) in outline.items()
    }
