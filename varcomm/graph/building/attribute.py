"""What may be an attribute of nodes or edges, and under which names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data
from torch_geometric.utils import is_sparse, select

from varcomm.errors import ArgumentError
from varcomm.graph.edge_shard import EdgeShard
from varcomm.graph.partitioned_graph import PartitionedGraph
from varcomm.graph.shard import NodeShard
from varcomm.ops.checks import checked_tensor
from varcomm.ops.packing import taken

__all__ = ["Attribute", "check_name"]

# Names that the graph or a shard answers to, where an attribute of the same name could not be
# reached; and what Data counts.
_MEMBERS = frozenset(
    name
    for kind in (PartitionedGraph, NodeShard, EdgeShard)
    for name in (*dir(kind), *kind.__dataclass_fields__)
) | {name for name in dir(Data) if name.startswith("num_")}


@dataclass(frozen=True)
class Attribute:
    """A value of each row: a dense tensor with rows along dimension 0, or what lists them."""

    value: Any

    @classmethod
    def of(cls, value: Any, name: str) -> Attribute:
        """Check a value of each row; arrays of numbers become tensors."""
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            # torch takes neither other byte orders nor memory that must not be written to
            native = value.dtype.newbyteorder("=")
            value = torch.from_numpy(np.require(value, native, requirements=["C", "W"]))
        if isinstance(value, torch.Tensor):
            checked_tensor(value, "", name)
            value = value.detach()
        return cls(value)

    def rows(self, index: torch.Tensor) -> Any:
        """Return the value of some rows."""
        if isinstance(self.value, torch.Tensor):
            return taken(self.value, index)
        if isinstance(self.value, list | tuple):
            return [self.value[row] for row in index.tolist()]
        if isinstance(self.value, np.ndarray):
            return self.value[index.cpu().numpy()]
        return select(self.value, index, 0)


def check_name(key: Any, value: object, owner: str) -> None:
    """Raise if an attribute holds numbers of nodes, by its name, or could not be reached by it."""
    if not isinstance(key, str):
        raise ArgumentError(f"{owner}: names of attributes must be str; got {key!r}.")
    if _refers_to_nodes(key, value):
        raise ArgumentError(
            f"{owner}.{key} refers to nodes by their numbers, which change. Remove it: del "
            f"{owner}.{key}."
        )
    if key in _MEMBERS or key.startswith("_"):
        raise ArgumentError(
            f"{owner}.{key} could not be reached: graph.{key} of a PartitionedGraph is its own. "
            f"Rename it: {owner}.my_{key} = {owner}.{key}; del {owner}.{key}."
        )


def _refers_to_nodes(key: str, value: object) -> bool:
    """Return whether an attribute is numbers of nodes, by its name; a leaf_area_index is not."""
    if key in ("face", "adj", "adj_t", "ptr") or ("adj" in key and is_sparse(value)):
        return True
    if isinstance(value, torch.Tensor | np.ndarray):
        whole = str(value.dtype).removeprefix("torch.").startswith(("int", "uint"))
    else:
        whole = not isinstance(value, float | str | bool)
    return whole and ("index" in key or "idx" in key)
