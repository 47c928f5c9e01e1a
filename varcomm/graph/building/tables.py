"""Tables of a PyG graph: rows of nodes, rows of edges, and values of the graph as a whole."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch_geometric import EdgeIndex
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.storage import BaseStorage
from torch_geometric.utils import is_sparse, select

from varcomm.errors import ArgumentError
from varcomm.graph.building.converted import advice, converted
from varcomm.graph.edge_shard import EdgeShard
from varcomm.graph.index import PartitionedIndex
from varcomm.graph.partitioned_graph import EdgeType, NodeType, PartitionedGraph
from varcomm.graph.shard import NodeShard, described
from varcomm.ops.checks import checked_tensor
from varcomm.ops.digest import digest
from varcomm.ops.packing import taken
from varcomm.plan.checks import checked_range
from varcomm.sizes import exact_int

__all__ = [
    "EdgeTable",
    "NodeTable",
    "Tables",
    "check_edge_index",
    "check_name",
    "edge_indices",
    "ends",
    "label",
    "node_counts",
    "read",
    "rows_at",
    "stores",
]

# Names of members of the graph or of a shard would hide an attribute; so would PyG's counts.
_MEMBERS = frozenset(
    name
    for kind in (PartitionedGraph, NodeShard, EdgeShard)
    for name in (*dir(kind), *kind.__dataclass_fields__)
) | {name for name in dir(Data) if name.startswith("num_")}


def _rows_of(value: Any, name: str) -> Any:
    """Return a value per row: numeric arrays become tensors, other sequences lists."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        # torch refuses foreign byte orders and read-only memory
        native = value.dtype.newbyteorder("=")
        value = torch.from_numpy(np.require(value, native, requirements=["C", "W"]))
    if isinstance(value, torch.Tensor):
        checked_tensor(value, "", name)
        return value.detach()
    return list(value) if isinstance(value, tuple | np.ndarray) else value


def rows_at(value: Any, index: torch.Tensor) -> Any:
    """Return some rows of an attribute."""
    return taken(value, index) if isinstance(value, torch.Tensor) else select(value, index, 0)


@dataclass(frozen=True)
class NodeTable:
    """All nodes of one type; an attribute is a dense tensor or another sequence of rows."""

    count: int
    attributes: Mapping[str, Any]


@dataclass(frozen=True)
class EdgeTable:
    """All edges of one type, by node ids."""

    edge_index: torch.Tensor
    attributes: Mapping[str, Any]


@dataclass(frozen=True)
class Tables:
    """A full graph. The type of nodes and edges is None in a graph with one type."""

    nodes: Mapping[NodeType, NodeTable]
    edges: Mapping[EdgeType, EdgeTable]
    attributes: Mapping[str, Any]

    def __post_init__(self) -> None:
        tensors = {k: v.device for k, v in self._rows().items() if isinstance(v, torch.Tensor)}
        if others := [name for name, device in tensors.items() if device != self.device]:
            raise ArgumentError(
                f"{others[0]} is on {tensors[others[0]]}, and {next(iter(tensors))} on "
                f"{self.device}. Move them to one device: data.to(...)."
            )

    def _rows(self) -> dict[str, Any]:
        found = {f"{label(key)}.edge_index": one.edge_index for key, one in self.edges.items()}
        tables: list[tuple[Any, Any]] = [*self.nodes.items(), *self.edges.items()]
        for key, table in tables:
            found |= {f"{label(key)}.{name}": v for name, v in table.attributes.items()}
        return found

    @property
    def device(self) -> torch.device:
        """The one device of all rows."""
        tensors = (value for value in self._rows().values() if isinstance(value, torch.Tensor))
        return next((tensor.device for tensor in tensors), torch.device("cpu"))

    def in_order(self, nodes: Sequence[NodeType], edges: Sequence[EdgeType]) -> Tables:
        """Return the tables with types in this order, on which layers such as HGTConv rely."""
        of_nodes = {key: self.nodes[key] for key in nodes}
        return Tables(of_nodes, {key: self.edges[key] for key in edges}, self.attributes)

    def digests(self) -> dict[str, object]:
        """Return a digest of each attribute, by name, to compare ranks."""
        found: dict[str, object] = {f"data.{k}": digest(v) for k, v in self.attributes.items()}
        found["the kind of device"] = self.device.type
        found |= {f"{label(key)}.num_nodes": nodes.count for key, nodes in self.nodes.items()}
        return found | {name: digest(value) for name, value in self._rows().items()}


def label(key: NodeType | EdgeType) -> str:
    """Return the name of a type's rows in messages."""
    return "data" if key is None else f"data[{key!r}]"


def ends(edge_type: EdgeType) -> tuple[NodeType, NodeType]:
    """Return the types of an edge's source and target."""
    return (None, None) if edge_type is None else (edge_type[0], edge_type[2])


def stores(data: Data | HeteroData, rows: str) -> list[tuple[Any, BaseStorage]]:
    """Return the stores of the "node" or "edge" types, by type; the type is None for a Data."""
    if isinstance(data, HeteroData):
        return list(data.node_items() if rows == "node" else data.edge_items())
    return [(None, data.stores[0])]


def node_counts(data: Data | HeteroData) -> dict[NodeType, int]:
    """Return the number of nodes by type, or raise ArgumentError."""
    found = {}
    for kind, store in stores(data, "node"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyG warns if it cannot count
            count = exact_int(store.num_nodes)
        if count is None or count < 0:
            name = label(kind)
            raise ArgumentError(f"{name} has no number of nodes. Set {name}.num_nodes.")
        found[kind] = count
    if not found:
        raise ArgumentError("data have no nodes of any type.")
    return found


def edge_indices(
    data: Data | HeteroData, counts: Mapping[NodeType, int]
) -> dict[EdgeType, torch.Tensor]:
    """Return the edges by type, or raise ArgumentError."""
    found = {}
    for kind, store in stores(data, "edge"):
        name, pair = label(kind), ends(kind)
        if missing := [end for end in pair if end not in counts]:
            raise ArgumentError(f"{name} has edges of {missing[0]!r}, of which data have no nodes.")
        sources, targets = (counts[end] for end in pair)
        edge_index = store.get("edge_index")
        found[kind] = check_edge_index(edge_index, sources, targets, f"{name}.edge_index")
    return found


def read(data: Data | HeteroData) -> Tables:
    """Return the tables of a graph, or raise ArgumentError."""
    if not isinstance(data, Data | HeteroData):
        raise ArgumentError(
            f"data must be a torch_geometric.data.Data or HeteroData; got {type(data).__name__}."
        )
    data = converted(data)
    counts = node_counts(data)
    edges = edge_indices(data, counts)
    if isinstance(data, HeteroData):
        of_nodes = {
            key: _rows(data, store, counts[key], label(key), "nodes")
            for key, store in data.node_items()
        }
        of_edges = {
            key: _rows(data, store, edges[key].shape[1], label(key), "edges")
            for key, store in data.edge_items()
        }
        # the first store holds the values of the graph as a whole
        whole = dict(_attributes(data.stores[0], "data"))
    else:
        of_nodes, of_edges, whole = _split(data, counts[None], edges[None].shape[1])
    return Tables(
        {key: NodeTable(count, of_nodes[key]) for key, count in counts.items()},
        {key: EdgeTable(index, of_edges[key]) for key, index in edges.items()},
        whole,
    )


def _split(data: Data, nodes: int, edges: int) -> tuple[dict[Any, Any], dict[Any, Any], Any]:
    """Return the attributes of nodes, of edges and of the graph as a whole, as PyG sees them."""
    of_nodes, of_edges, whole = {}, {}, {}
    for key, value in _attributes(data.stores[0], "data"):
        name, dim = f"data.{key}", data.__cat_dim__(key, value)
        has_rows = _has_rows_first(value, dim, name)
        if has_rows and data.is_node_attr(key):
            of_nodes[key] = _rows_of(value, name)
        elif has_rows and data.is_edge_attr(key):
            of_edges[key] = _rows_of(value, name)
        elif dim is not None and _has_several_rows(value):
            # a user's class returns the dimension None for values without rows
            raise ArgumentError(
                f"{name} has {value.shape[0]} entries, for neither {nodes} nodes nor {edges} "
                "edges. If it belongs to the graph as a whole, give it a first dimension of one: "
                f"{name} = {name}[None]."
            )
        else:
            whole[key] = value
    return {None: of_nodes}, {None: of_edges}, whole


def _rows(
    data: HeteroData, store: BaseStorage, count: int, owner: str, rows: str
) -> dict[str, Any]:
    """Return the attributes of the nodes or the edges of one type."""
    found = {}
    for key, value in _attributes(store, owner):
        name = f"{owner}.{key}"
        has_rows = _has_rows_first(value, data.__cat_dim__(key, value, store), name)
        listed = isinstance(value, list | tuple | torch.Tensor | np.ndarray)
        if not (has_rows and listed and len(value) == count):
            raise ArgumentError(
                f"{name} has no entry for each of the {count} {rows}. Make it one of the graph as "
                f"a whole: data.my_{key} = {name}; del {name}."
            )
        found[key] = _rows_of(value, name)
    return found


def _attributes(store: BaseStorage, name: str) -> Iterator[tuple[str, Any]]:
    """Yield all values of a store but the edges, after a check of their names."""
    for key, value in store.items():
        if key not in ("edge_index", "num_nodes"):
            check_name(key, value, name)
            yield key, value


def check_name(key: Any, value: object, owner: str) -> None:
    """Raise if an attribute holds node ids, by its name, or if a member would hide it."""
    if not isinstance(key, str):
        raise ArgumentError(f"{owner}: names of attributes must be str; got {key!r}.")
    if isinstance(value, torch.Tensor | np.ndarray):
        has_ints = str(value.dtype).removeprefix("torch.").startswith(("int", "uint"))
    else:
        has_ints = not isinstance(value, float | str | bool)
    has_ids = key in ("face", "adj", "adj_t", "ptr") or ("adj" in key and is_sparse(value))
    # a leaf_area_index of floats holds none
    if has_ids or (has_ints and ("index" in key or "idx" in key)):
        fix = f"holds node ids, which partitioning changes. {advice(f'{owner}.{key}')}"
    elif key in _MEMBERS or key.startswith("_"):
        fix = f"has the name of a member of PartitionedGraph. Rename it to {owner}.my_{key}."
    else:
        return
    raise ArgumentError(f"{owner}.{key} {fix}")


def check_edge_index(edge_index: Any, sources: int, targets: int, name: str) -> torch.Tensor:
    """Return edges if they are int64, of shape (2, E), and within the numbers of nodes."""
    if isinstance(edge_index, PartitionedIndex):
        raise ArgumentError(f"{name} is of a partitioned graph already, in local ids.")
    if isinstance(edge_index, EdgeIndex):
        edge_index = edge_index.as_tensor()
    if (
        not isinstance(edge_index, torch.Tensor)
        or edge_index.dtype != torch.int64
        or edge_index.dim() != 2
        or edge_index.shape[0] != 2
    ):
        raise ArgumentError(
            f"{name} must be torch.int64 of shape (2, E); got {described(edge_index)}."
        )
    checked_tensor(edge_index, "", name)
    for row, nodes in enumerate((sources, targets)):
        checked_range(edge_index[row], nodes, f"{name}[{row}]", "nodes")
    return edge_index


def _has_rows_first(value: Any, dim: int | None, name: str) -> bool:
    """Return whether a value may have a row per node or edge along dimension 0, as PyG sees it."""
    if not isinstance(value, torch.Tensor | np.ndarray):
        return True
    if value.ndim == 0 or dim is None:
        return False
    if dim % value.ndim != 0 and _has_several_rows(value):
        raise ArgumentError(
            f"{name} has its rows along dimension {dim}, by data.__cat_dim__ or because its name "
            "contains 'index'. Move its rows to dimension 0, and rename it."
        )
    return dim % value.ndim == 0


def _has_several_rows(value: Any) -> bool:
    is_array = isinstance(value, torch.Tensor | np.ndarray)
    return is_array and value.ndim > 0 and value.shape[0] > 1
