"""Multilevel partitioners: METIS and KaHIP."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch_geometric.utils import remove_self_loops, to_undirected

from varcomm.errors import ArgumentError, MissingPackageError

__all__ = ["adjacency", "by_kahip", "by_metis"]

# Starts of the rows, neighbours, and weights of edges, if any; int64 arrays.
Adjacency = tuple[Any, Any, Any]

# KaHIP's default: parts up to 3 % above the mean.
_IMBALANCE = 0.03


def adjacency(edge_index: torch.Tensor, nodes: int, weight: torch.Tensor | None) -> Adjacency:
    """Return compressed rows of the undirected graph.

    Weights of all edges between two nodes are added; a sum of zero is no edge.
    """
    if weight is not None:
        edge_index, weight = edge_index[:, weight > 0], weight[weight > 0]
    edge_index, weight = remove_self_loops(edge_index, weight)
    if weight is None:
        edge_index = to_undirected(edge_index, num_nodes=nodes)
    else:
        edge_index, weight = to_undirected(edge_index, weight, nodes, reduce="add")
    starts = torch.searchsorted(edge_index[0].contiguous(), torch.arange(nodes + 1))
    neighbours = edge_index[1].contiguous().numpy()
    return starts.numpy(), neighbours, None if weight is None else weight.numpy()


def by_metis(graph: Adjacency, parts: int, node_weight: torch.Tensor | None) -> torch.Tensor:
    """Return the part of each node by METIS's k-way partitioning, or its recursive bisection."""
    try:
        import pymetis
    except ImportError as error:
        raise MissingPackageError(
            'method="metis" needs pymetis: pip install "varcomm[partition]". '
            'Or choose method="rcb" (with data.pos) or "block".'
        ) from error
    starts, neighbours, weights = graph
    _, owner = pymetis.part_graph(
        parts,
        adjacency=pymetis.CSRAdjacency(starts, neighbours),
        vweights=None if node_weight is None else node_weight.numpy(),
        eweights=weights,
    )
    return torch.from_numpy(np.asarray(owner, dtype=np.int64))


def by_kahip(graph: Adjacency, parts: int, node_weight: torch.Tensor | None) -> torch.Tensor:
    """Return the part of each node by KaHIP's KaFFPa in its configuration "eco"."""
    try:
        import kahip
    except ImportError as error:
        raise MissingPackageError(
            'method="kahip" needs kahip: pip install "varcomm[kahip]". '
            'Or choose method="metis", "rcb" (with data.pos) or "block".'
        ) from error
    starts, neighbours, weights = graph
    of_nodes = np.ones(len(starts) - 1, np.int64) if node_weight is None else node_weight.numpy()
    of_edges = np.ones_like(neighbours) if weights is None else weights
    for each, rows in ((of_nodes, "nodes"), (of_edges, "edges, from both ends,")):
        # KaHIP would use the remainder, and return nearly all nodes in one part
        if (total := int(each.sum())) >= 2**31:
            raise ArgumentError(
                f'method="kahip" computes in 32 bits, but the weights of all {rows} add up to '
                f"{total}; they must stay below {2**31}. Divide them, or choose another method."
            )
    # views, which KaHIP reads one by one: lists would need five times the memory
    arrays = [array.data for array in (of_nodes, starts, of_edges, neighbours)]
    seed, silent = 0, True
    _, owner = kahip.kaffpa(*arrays, parts, _IMBALANCE, silent, seed, kahip.ECO)
    return torch.from_numpy(np.asarray(owner, dtype=np.int64))
