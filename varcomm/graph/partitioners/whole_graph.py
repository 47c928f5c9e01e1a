"""What ``assign`` reads of a graph: nodes of several types one after the other, as if of one."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch_geometric.data import Data, HeteroData

from varcomm.errors import ArgumentError
from varcomm.graph.partitioners.assign_checks import check_sum, checked_positions, checked_weight

__all__ = ["edges_of", "node_counts", "positions_of", "weights_of"]

Ints = NDArray[np.int64]


def node_counts(data: Data | HeteroData) -> dict[Any, int]:
    """Return how many nodes there are of each type; those of a Data are of the type None."""
    counts = {kind: store.num_nodes for kind, store in _node_stores(data)}
    if not counts:
        raise ArgumentError("data has no node types.")
    for kind, count in counts.items():
        if count is None:
            raise ArgumentError(
                f"{_name(kind)} does not tell how many nodes it has: set num_nodes."
            )
    return counts


def positions_of(data: Data | HeteroData, method: str) -> torch.Tensor:
    """Return the positions of all nodes, of shape (N, D), on the CPU."""
    counts, found = node_counts(data), []
    for kind, store in _node_stores(data):
        name = f"{_name(kind)}.pos"
        if store.get("pos") is None:
            raise ArgumentError(f'method="{method}" needs the positions of the nodes in {name}.')
        found.append(checked_positions(store.pos, name, method, counts[kind]).cpu())
    if len({pos.shape[1] for pos in found}) > 1:
        shapes = ", ".join(str(tuple(pos.shape)) for pos in found)
        raise ArgumentError(
            f'method="{method}" needs as many coordinates for nodes of every type; got positions '
            f"of shapes {shapes}."
        )
    return _joined(found)


def edges_of(data: Data | HeteroData, method: str, weight: Any) -> tuple[Ints, Ints, Ints | None]:
    """Return sources and targets of all edges, each of shape (E,), and their weights, if any."""
    counts = node_counts(data)
    starts = dict(zip(counts, accumulate(counts.values(), initial=0), strict=False))
    ends, edges = [], {}
    for kind, store in _edge_stores(data):
        name = f"{_name(kind)}.edge_index"
        edge_index = store.get("edge_index")
        if not isinstance(edge_index, torch.Tensor) or edge_index.dtype != torch.int64:
            raise ArgumentError(f'method="{method}" needs {name}, a tensor of torch.int64.')
        if edge_index.dim() != 2 or edge_index.shape[0] != 2:
            raise ArgumentError(f"{name} must have shape (2, E); got {tuple(edge_index.shape)}.")
        edges[kind] = edge_index.shape[1]
        for end, ids in zip((kind[0], kind[2]) if kind else (kind, kind), edge_index, strict=True):
            nodes = counts.get(end, 0)
            low, high = torch.stack(ids.aminmax()).tolist() if len(ids) else (0, -1)
            if low < 0 or high >= nodes:
                raise ArgumentError(
                    f"{name} spans {low}...{high}, out of range for the {nodes} nodes of "
                    f"{_name(end)}."
                )
            start = starts.get(end, 0)
            ends.append(ids.cpu() + start if start else ids.cpu())
    given = weights_of(weight, "edge_weight", edges, "edges")
    source, target = _joined(ends[::2]).numpy(), _joined(ends[1::2]).numpy()
    if given is None:
        return source, target, None
    check_sum(2 * float(given.double().sum()), 2.0**62, "edge_weight, from both ends,")
    return source, target, given.numpy()


def weights_of(given: Any, name: str, rows: Mapping[Any, int], row: str) -> torch.Tensor | None:
    """Return the weights of nodes or edges of all types, int64 on the CPU, if there are any.

    `rows` is how many there are of each type, and `row` what to call them.
    """
    if given is None:
        return None
    if None in rows:
        given = {None: given}
    if not isinstance(given, Mapping) or given.keys() != rows.keys():
        got = list(given) if isinstance(given, Mapping) else type(given).__name__
        raise ArgumentError(
            f"{name} must be a dict with the weights of each of {list(rows)}; got {got}."
        )
    weights = []
    for kind, count in rows.items():
        each = name if kind is None else f"{name}[{kind!r}]"
        weights.append(checked_weight(given[kind], each, count, row).cpu())
    return _joined(weights)


def _node_stores(data: Data | HeteroData) -> list[tuple[Any, Any]]:
    if isinstance(data, HeteroData):
        return list(data.node_items())
    return [(None, data.node_stores[0])]


def _edge_stores(data: Data | HeteroData) -> list[tuple[Any, Any]]:
    if isinstance(data, HeteroData):
        return list(data.edge_items())
    return [(None, data.edge_stores[0])]


def _name(kind: Hashable) -> str:
    """Return how messages name the nodes or edges of a type."""
    return "data" if kind is None else f"data[{kind!r}]"


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate; a single one is not copied, as it may be large, and none are no integers."""
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat(tensors) if tensors else torch.zeros(0, dtype=torch.int64)
