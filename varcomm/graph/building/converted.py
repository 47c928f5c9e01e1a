"""Data of a graph without node ids in attributes: edges of ``adj_t``, masks of ``train_idx``."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.storage import BaseStorage, NodeStorage
from torch_geometric.utils import is_sparse, to_edge_index

from varcomm.errors import ArgumentError
from varcomm.plan.checks import checked_index

__all__ = ["advice", "converted"]

_SPLITS = ("train_idx", "val_idx", "valid_idx", "test_idx")


def converted(data: Data | HeteroData) -> Data | HeteroData:
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
            own[mask] = torch.zeros(store.num_nodes, dtype=torch.bool, device=index.device)
            own[mask][index] = True
        del own[name]


def advice(name: str) -> str:
    """Return the way to use an attribute that holds node ids, for a message."""
    key = name.rpartition(".")[2]
    if "adj" in key:
        return f"Give the edges as edge_index, by torch_geometric.utils.to_edge_index: del {name}."
    label = (
        ', or make the pairs edges of a type of their own, data["node", "label", "node"]'
        if "label" in key
        else ""
    )
    return (
        f"Take it out, {key} = {name}; del {name}, and fetch rows by these ids: "
        f"graph.rows(values, {key}){label}. For a selection of nodes, give a mask."
    )
