"""A graph of PyG as tables: rows of nodes, rows of edges, and what belongs to neither."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.storage import BaseStorage
from torch_geometric.utils import select

from varcomm.errors import ArgumentError
from varcomm.graph.digest import digest
from varcomm.graph.edge_shard import EdgeShard
from varcomm.graph.partitioned_graph import EdgeType, NodeType, PartitionedGraph
from varcomm.graph.shard import NodeShard

__all__ = ["EdgeTable", "NodeTable", "Tables", "check_edge_index", "check_name", "ends", "read"]

# Names that the graph or a shard answers to, where an attribute of the same name could not be
# reached.
_MEMBERS = frozenset(
    name
    for kind in (PartitionedGraph, NodeShard, EdgeShard)
    for name in (*dir(kind), *kind.__dataclass_fields__)
)


@dataclass(frozen=True)
class Attribute:
    """A value of each row, which stand along dimension `dim`."""

    value: Any
    dim: int

    def rows(self, index: torch.Tensor) -> Any:
        """Return the value of some rows."""
        return select(self.value, index, self.dim)


@dataclass(frozen=True)
class NodeTable:
    """All nodes of one type."""

    count: int
    attributes: Mapping[str, Attribute]


@dataclass(frozen=True)
class EdgeTable:
    """All edges of one type, by numbers of nodes."""

    edge_index: torch.Tensor
    attributes: Mapping[str, Attribute]


@dataclass(frozen=True)
class Tables:
    """A whole graph. A graph with one type has the type None."""

    nodes: Mapping[NodeType, NodeTable]
    edges: Mapping[EdgeType, EdgeTable]
    attributes: Mapping[str, Any]

    def digests(self) -> dict[str, object]:
        """Return, by its name, what tells each attribute apart from that of another rank."""
        found: dict[str, object] = {f"data.{k}": digest(v) for k, v in self.attributes.items()}
        for node_type, nodes in self.nodes.items():
            name = _name(node_type)
            found[f"{name}.num_nodes"] = nodes.count
            found |= {f"{name}.{k}": digest(a.value) for k, a in nodes.attributes.items()}
        for edge_type, edges in self.edges.items():
            name = _name(edge_type)
            found[f"{name}.edge_index"] = digest(edges.edge_index)
            found |= {f"{name}.{k}": digest(a.value) for k, a in edges.attributes.items()}
        return found


def ends(edge_type: EdgeType) -> tuple[NodeType, NodeType]:
    """Return the types of the nodes that edges of a type come from and go to.

    >>> ends(("author", "writes", "paper")), ends(None)
    (('author', 'paper'), (None, None))
    """
    return (None, None) if edge_type is None else (edge_type[0], edge_type[2])


def read(data: Data | HeteroData) -> Tables:
    """Return the tables of a graph, or raise ArgumentError where it will not do."""
    if isinstance(data, HeteroData):
        return _read_types(data)
    if not isinstance(data, Data):
        raise ArgumentError(
            f"data must be a torch_geometric.data.Data or HeteroData; got {type(data).__name__}."
        )
    count = data.num_nodes
    edge_index = check_edge_index(data.edge_index, count, count, "data.edge_index")
    nodes, edges, whole = {}, {}, {}
    for key, value in _attributes(data, "data"):
        attribute = Attribute(value, data.__cat_dim__(key, value))
        if data.is_node_attr(key):
            nodes[key] = attribute
        elif data.is_edge_attr(key):
            edges[key] = attribute
        else:
            _check_whole(value, f"data.{key}", f"{count} nodes nor {edge_index.shape[1]} edges")
            whole[key] = value
    return Tables({None: NodeTable(count, nodes)}, {None: EdgeTable(edge_index, edges)}, whole)


def _read_types(data: HeteroData) -> Tables:
    nodes: dict[NodeType, NodeTable] = {}
    edges: dict[EdgeType, EdgeTable] = {}
    for node_type in data.node_types:
        store, name = data[node_type], _name(node_type)
        if "num_nodes" not in store and not any(store.is_node_attr(key) for key in store):
            raise ArgumentError(f"{name} does not say how many nodes it has: set {name}.num_nodes.")
        count = int(store.num_nodes)
        nodes[node_type] = NodeTable(count, _rows(data, store, count, name, "nodes"))
    for edge_type in data.edge_types:
        store, name = data[edge_type], _name(edge_type)
        source, target = ends(edge_type)
        if missing := [end for end in (source, target) if end not in nodes]:
            raise ArgumentError(f"{name} has edges of {missing[0]!r}, of which data have no nodes.")
        edge_index = check_edge_index(
            store.get("edge_index"), nodes[source].count, nodes[target].count, f"{name}.edge_index"
        )
        rows = _rows(data, store, edge_index.shape[1], name, "edges")
        edges[edge_type] = EdgeTable(edge_index, rows)
    if not nodes:
        raise ArgumentError("data have no nodes of any type.")
    return Tables(nodes, edges, dict(_attributes(data._global_store, "data")))


def _rows(
    data: HeteroData, store: BaseStorage, count: int, name: str, rows: str
) -> dict[str, Attribute]:
    """Return the attributes of the nodes or the edges of one type."""
    found = {}
    for key, value in _attributes(store, name):
        dim = data.__cat_dim__(key, value, store)
        sized = isinstance(value, torch.Tensor | np.ndarray) and value.ndim > 0
        length = value.shape[dim] if sized else len(value) if isinstance(value, list) else None
        if length != count:
            raise ArgumentError(
                f"{name}.{key} has no entry for each of the {count} {rows}. Make it one of the "
                f"graph as a whole: data.my_{key} = {name}.{key}; del {name}.{key}."
            )
        found[key] = Attribute(value, dim)
    return found


def _attributes(store: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield all but the edges themselves, once their names have been checked."""
    for key, value in store.items() if isinstance(store, BaseStorage) else store:
        if key in ("edge_index", "num_nodes"):
            continue
        check_name(key, value, name)
        yield key, value


def check_name(key: str, value: object, owner: str) -> None:
    """Raise if an attribute holds numbers of nodes, by its name, or could not be reached by it."""
    if _refers_to_nodes(key, value):
        raise ArgumentError(
            f"{owner}.{key} refers to nodes by their numbers, which change. Remove it: del "
            f"{owner}.{key}."
        )
    if key in _MEMBERS:
        raise ArgumentError(
            f"{owner}.{key} could not be reached: graph.{key} of a PartitionedGraph is its own. "
            f"Rename it: {owner}.my_{key} = {owner}.{key}; del {owner}.{key}."
        )


def check_edge_index(edge_index: Any, sources: int, targets: int, name: str) -> torch.Tensor:
    """Return edges if they are of int64, of shape (2, E) and between nodes that there are."""
    if not isinstance(edge_index, torch.Tensor) or edge_index.dtype != torch.int64:
        raise ArgumentError(f"{name} must be a tensor of torch.int64.")
    if edge_index.dim() != 2 or edge_index.shape[0] != 2:
        raise ArgumentError(f"{name} must have shape (2, E); got {tuple(edge_index.shape)}.")
    for end, nodes in zip(edge_index, (sources, targets), strict=True):
        if end.numel():
            low, high = torch.stack(end.aminmax()).tolist()
            if low < 0 or high >= nodes:
                low, high = torch.stack(edge_index.aminmax()).tolist()
                raise ArgumentError(f"{name} spans {low}...{high}, out of range for {nodes} nodes.")
    return edge_index


def _check_whole(value: object, name: str, rows: str) -> None:
    """Raise if what belongs to the graph as a whole looks like rows of which some are missing."""
    if isinstance(value, torch.Tensor | np.ndarray) and value.ndim > 0 and value.shape[0] > 1:
        raise ArgumentError(
            f"{name} has {value.shape[0]} entries, for neither {rows}. If it belongs to the graph "
            f"as a whole, give it a first dimension of one: {name} = {name}[None]."
        )


def _refers_to_nodes(key: str, value: object) -> bool:
    """Return whether an attribute is numbers of nodes, by its name; a leaf_area_index is not."""
    if key in ("face", "adj", "adj_t", "ptr"):
        return True
    if isinstance(value, torch.Tensor | np.ndarray):
        whole = str(value.dtype).removeprefix("torch.").startswith(("int", "uint"))
    else:
        whole = not isinstance(value, float | str | bool)
    return whole and ("index" in key or "idx" in key)


def _name(key: NodeType | EdgeType) -> str:
    return "data" if key is None else f"data[{key!r}]"
