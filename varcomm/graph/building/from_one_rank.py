"""A graph that one rank has, sent to all: it speaks for all nodes and brings all edges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from varcomm.errors import ArgumentError
from varcomm.graph.building.attribute import Attribute
from varcomm.graph.building.brought import BroughtEdges, BroughtNodes, sent_to_owners
from varcomm.graph.building.tables import Tables
from varcomm.graph.partitioned_graph import EdgeType, NodeType, PartitionedGraph
from varcomm.ops.broadcast import broadcast
from varcomm.sizes import ShardSizes
from varcomm.transport.agreement import agree, share
from varcomm.transport.group import Group
from varcomm.transport.serialization import from_bytes, to_bytes

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
        return nodes, edges, name, tables.device.type

    told = share(what, outline, group)[src]
    assert told is not None
    node_outlines, edge_outlines, name, device = told
    attributes = _of_the_graph(what, None if given is None else given[0].attributes, src, group)
    nodes: dict[NodeType, BroughtNodes] = {}
    edges: dict[EdgeType, BroughtEdges] = {}
    for node_type, (count, rows) in node_outlines.items():
        ranges = ShardSizes(count * (rank == src) for rank in range(group.size))
        if given is None:
            owner = torch.empty(0, dtype=torch.int64, device=device)
            nodes[node_type] = BroughtNodes(ranges, owner, None, _nothing(rows, device))
        else:
            table, owner = given[0].nodes[node_type], given[1][node_type].to(given[0].device)
            nodes[node_type] = BroughtNodes(ranges, owner, None, _whole(table.attributes))
    for edge_type, rows in edge_outlines.items():
        if given is None:
            none = torch.empty(2, 0, dtype=torch.int64, device=device)
            edges[edge_type] = BroughtEdges(none, _nothing(rows, device))
        else:
            own = given[0].edges[edge_type]
            edges[edge_type] = BroughtEdges(own.edge_index, _whole(own.attributes))
    return sent_to_owners(nodes, edges, attributes, name, group)


def _of_the_graph(
    what: str, attributes: Mapping[str, Any] | None, src: int, group: Group
) -> dict[str, Any]:
    """Return the attributes of the graph as a whole, which `src` has; collective."""

    def packed() -> torch.Tensor | None:
        if attributes is None:
            return None
        texts = {name: _packed(name, value) for name, value in attributes.items()}
        return torch.frombuffer(bytearray(to_bytes(texts)), dtype=torch.uint8)

    content = agree(what, packed, group)
    # as bytes, of which each rank then gets only these
    if content is not None:
        content = content.to(group.device())
    content = broadcast(content, src=src, group=group.process_group).cpu()
    if attributes is not None:
        return dict(attributes)
    texts: dict[str, str] = from_bytes(content.numpy().tobytes())
    return {name: from_bytes(text.encode()) for name, text in texts.items()}


def _packed(name: str, value: Any) -> str:
    try:
        return to_bytes(value).decode()
    except TypeError as error:
        raise ArgumentError(
            f"data.{name} cannot be sent from one rank: {error}. Tensors can be, and numbers, "
            "texts, lists and dicts of them. Give data to all ranks, or remove it: "
            f"del data.{name}."
        ) from error


def _outline(attributes: Mapping[str, Attribute]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Return what others need to know of the rows that one rank has of everything."""
    return {key: (value.dtype, value.shape[1:]) for key, value in _whole(attributes).items()}


def _whole(attributes: Mapping[str, Attribute]) -> dict[str, torch.Tensor]:
    for key, attribute in attributes.items():
        if not isinstance(attribute.value, torch.Tensor):
            raise ArgumentError(
                f"data.{key} must be a tensor to be sent from one rank; got "
                f"{type(attribute.value).__name__}. Make it one, or give data to all ranks."
            )
    return {key: attribute.value for key, attribute in attributes.items()}


def _nothing(outline: Mapping[str, Any], device: str) -> dict[str, torch.Tensor]:
    return {
        key: torch.empty(0, *shape, dtype=dtype, device=device)
        for key, (dtype, shape) in outline.items()
    }
