"""Tables of a PyG graph: rows of nodes, rows of edges, and values of the graph as a whole."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch_geometric import EdgeIndex
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.storage import BaseStorage, NodeStorage
from torch_geometric.utils import index_to_mask, is_sparse, to_edge_index

from varcomm.errors import ArgumentError
from varcomm.graph.edge_shard import EdgeShard
from varcomm.graph.index.partitioned_index import PartitionedIndex
from varcomm.graph.node_shard import NodeShard, as_tensor, described
from varcomm.graph.partitioned_graph import EdgeType, NodeType, PartitionedGraph
from varcomm.ops.checks import checked_tensor
from varcomm.ops.digest import digest
from varcomm.plan.checks import checked_index, checked_range
from varcomm.sizes import exact_int

# Attributes of PyG that hold node ids, and those that masks can replace.
IDS = ("face", "adj", "adj_t", "ptr")
_SPLITS = ("train_idx", "val_idx", "valid_idx", "test_idx")


@cache
def members() -> frozenset[str]:
    """Return the members of the graph and of its shards, and PyG's counts: they hide attributes."""
    return frozenset(
        name
        for kind in (PartitionedGraph, NodeShard, EdgeShard)
        for name in (*dir(kind), *kind.__dataclass_fields__)
    ) | {name for name in dir(Data) if name.startswith("num_")}


def _rows_of(value: Any, name: str) -> torch.Tensor:
    """Return the rows of nodes or edges; numeric arrays become tensors."""
    if isinstance(value, np.ndarray):
        value = as_tensor(value)
    if not isinstance(value, torch.Tensor):
        raise ArgumentError(
            f"{name} has a row for each node or edge, and must be a tensor or a numeric array; got "
            f"{type(value).__name__}. Or take it out, and select: [rows[i] for i in owned_ids]."
        )
    checked_tensor(value, "", name)
    return value.detach()


@dataclass(frozen=True)
class NodeTable:
    """All nodes of one type; attributes are dense tensors."""

    count: int
    attributes: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class EdgeTable:
    """All edges of one type, by node ids."""

    edge_index: torch.Tensor
    attributes: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Tables:
    """A full graph. The type of nodes and edges is None in a graph with one type."""

    nodes: Mapping[NodeType, NodeTable]
    edges: Mapping[EdgeType, EdgeTable]
    attributes: Mapping[str, Any]

    def __post_init__(self) -> None:
        for name, value in self._rows().items():
            if value.device != self.device:
                raise ArgumentError(
                    f"{name} is on {value.device}, and {next(iter(self._rows()))} on "
                    f"{self.device}. Move them to one device: data.to(...)."
                )

    def _rows(self) -> dict[str, torch.Tensor]:
        found = {f"{label(key)}.edge_index": one.edge_index for key, one in self.edges.items()}
        tables: list[tuple[Any, Any]] = [*self.nodes.items(), *self.edges.items()]
        for key, table in tables:
            found |= {f"{label(key)}.{name}": v for name, v in table.attributes.items()}
        return found

    @property
    def device(self) -> torch.device:
        """The one device of all rows."""
        return next((rows.device for rows in self._rows().values()), torch.device("cpu"))

    def digests(self) -> dict[str, object]:
        """Return a digest of each attribute, by name, to compare ranks.

        Layers such as HGTConv rely on the order of types.
        """
        found: dict[str, object] = {f"data.{k}": digest(v) for k, v in self.attributes.items()}
        found["the kind of device"] = self.device.type
        found["the order of types"] = [*self.nodes, *self.edges]
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
    data = _converted(data)
    counts = node_counts(data)
    edges = edge_indices(data, counts)
    is_typed = isinstance(data, HeteroData)
    rows: dict[str, dict[Any, dict[str, Any]]]
    rows = {"nodes": {key: {} for key in counts}, "edges": {key: {} for key in edges}}
    whole = {}
    # the first store of a HeteroData holds the values of the graph as a whole
    kinds = [None, *counts, *edges] if is_typed else [None]
    for kind, store in zip(kinds, data.stores, strict=True):
        for key, value in store.items():
            if key in ("edge_index", "num_nodes"):
                continue
            check_name(key, value, label(kind))
            if is_typed and kind is None:
                whole[key] = value
            elif noun := _noun(data, store, kind, key, value, counts, edges):
                rows[noun][kind][key] = _rows_of(value, f"{label(kind)}.{key}")
            else:
                whole[key] = value
    return Tables(
        {key: NodeTable(count, rows["nodes"][key]) for key, count in counts.items()},
        {key: EdgeTable(index, rows["edges"][key]) for key, index in edges.items()},
        whole,
    )


def _noun(
    data: Data | HeteroData,
    store: BaseStorage,
    kind: Any,
    key: str,
    value: Any,
    nodes: Mapping[Any, int],
    edges: Mapping[Any, torch.Tensor],
) -> str:
    """Return the rows of an attribute as PyG sees them, "nodes" or "edges"; "" if it has none."""
    name, dim = f"{label(kind)}.{key}", data.__cat_dim__(key, value, store)
    is_array = isinstance(value, torch.Tensor | np.ndarray)
    # a user's class returns the dimension None for values without rows
    along = dim % value.ndim if is_array and value.ndim and dim is not None else None
    is_long = along is not None and len(value) > 1
    if along and is_long:
        raise ArgumentError(
            f"{name} has its rows along dimension {dim}, by data.__cat_dim__ or because its name "
            "contains 'index'. Move its rows to dimension 0, and rename it."
        )
    has_rows = along == 0 or not is_array
    if isinstance(data, Data):
        if has_rows and data.is_node_attr(key):
            return "nodes"
        if has_rows and data.is_edge_attr(key):
            return "edges"
        if is_long:
            raise ArgumentError(
                f"{name} has {len(value)} entries, but there are {nodes[None]} nodes and "
                f"{edges[None].shape[1]} edges. If it belongs to the full graph, add a first "
                f"dimension of one: {name} = {name}[None]."
            )
        return ""
    noun, count = ("nodes", nodes[kind]) if kind in nodes else ("edges", edges[kind].shape[1])
    if not has_rows or not hasattr(value, "__len__") or len(value) != count:
        raise ArgumentError(
            f"{name} has no entry for each of the {count} {noun}. Make it one of the graph as "
            f"a whole: data.my_{key} = {name}; del {name}."
        )
    return noun


def check_name(key: Any, value: object, owner: str) -> None:
    """Raise if an attribute holds node ids, by its name, or if a member would hide it."""
    if not isinstance(key, str):
        raise ArgumentError(f"{owner}: names of attributes must be str; got {key!r}.")
    if isinstance(value, torch.Tensor | np.ndarray):
        has_ints = str(value.dtype).removeprefix("torch.").startswith(("int", "uint"))
    else:
        has_ints = not isinstance(value, float | str | bool)
    has_ids = key in IDS or ("adj" in key and is_sparse(value))
    # a leaf_area_index of floats holds none
    if has_ids or (has_ints and ("index" in key or "idx" in key)):
        fix = (
            f"holds node ids, which partitioning changes. Take it out, {key} = {owner}.{key}; "
            f"del {owner}.{key}, and fetch rows by these ids: graph.rows(values, {key}). Give "
            "edges as edge_index, and a selection of nodes as a mask."
        )
    elif key in members() or key.startswith("_"):
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


def _converted(data: Data | HeteroData) -> Data | HeteroData:
    """Return data whose attributes can be cut, if they have an equivalent without node ids.

    ``adj_t`` of ToSparseTensor becomes ``edge_index``, and ``edge_weight`` if it has values other
    than 1. ``train_idx``, ``val_idx``, ``valid_idx``, ``test_idx`` and the dict ``split_idx`` of
    nodes become ``train_mask``, ... A batch vector makes ``ptr`` redundant.
    """
    out = copy.copy(data)
    for store, own in zip(data.stores, out.stores, strict=True):
        if is_sparse(store.get("adj_t")) and store.get("edge_index") is None:
            ends, weight = to_edge_index(store["adj_t"])
            if weight.dim() == 1 and "edge_weight" not in store:
                if isinstance(out, Data):
                    out.num_nodes = data.num_nodes  # isolated nodes at the end
                own["edge_index"] = ends.flip(0)
                if bool((weight != 1).any()):
                    own["edge_weight"] = weight
                del own["adj_t"]
        if "ptr" in store and "batch" in store:
            del own["ptr"]
        if isinstance(store, NodeStorage):
            _masked(store, own)
    return out


def _masked(store: BaseStorage, own: BaseStorage) -> None:
    """Replace the ids of nodes of a split by masks."""
    ids: dict[str, Mapping[str, Any]]
    ids = {name: {name.removesuffix("_idx"): store[name]} for name in _SPLITS if name in store}
    if isinstance(splits := store.get("split_idx"), Mapping):
        ids["split_idx"] = splits
    for name, parts in ids.items():
        for part, value in parts.items():
            mask = f"{part}_mask"
            if mask in own:
                raise ArgumentError(f"data has {name} and {mask}. Remove one of them.")
            index = checked_index(torch.as_tensor(value), store.num_nodes, f"data.{name}", "nodes")
            if len(index.unique()) != len(index):
                raise ArgumentError(
                    f"data.{name} has a node twice, and a mask cannot. Give nodes weights instead."
                )
            own[mask] = index_to_mask(index, store.num_nodes)
        del own[name]
