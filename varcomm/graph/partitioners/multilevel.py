"""Multilevel partitioners: METIS and KaHIP."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from varcomm.errors import ArgumentError, MissingPackageError

__all__ = ["Adjacency", "by_kahip", "by_metis"]

Ints = NDArray[np.int64]

# KaHIP's default: parts up to 3 % above the mean.
_IMBALANCE = 0.03


@dataclass(frozen=True)
class Adjacency:
    """Compressed rows of an undirected graph: each edge from both ends, no loops.

    `starts`, (N + 1,), delimits each node's `neighbours`, strictly ascending. All are int64;
    `weights` None is 1 per edge.
    """

    starts: Ints
    neighbours: Ints
    weights: Ints | None = None

    @classmethod
    def from_edges(
        cls, source: Ints, target: Ints, nodes: int, weight: Ints | None = None
    ) -> Adjacency:
        """Build an undirected graph from directed edges.

        Edges connect nodes ``0...nodes - 1``; loops and repeats are allowed. Non-negative weights
        of all edges between two nodes are added, and a sum of zero is no edge.
        """
        # one integer per edge, the lower node first, because sorting integers is fast
        pairs = np.minimum(source, target) * nodes + np.maximum(source, target)
        real = source != target
        if weight is not None:
            real &= weight > 0
        if not real.all():
            pairs, weight = pairs[real], None if weight is None else weight[real]
        del real
        if weight is None:
            pairs.sort()
            pairs = pairs[_first_of_equals(pairs)]
        else:
            order = np.argsort(pairs)
            pairs, weight = pairs[order], weight[order]
            first = np.flatnonzero(_first_of_equals(pairs))
            pairs, weight = pairs[first], np.add.reduceat(weight, first) if len(first) else weight
        low, high = np.divmod(pairs, nodes)
        both = np.concatenate([pairs, high * nodes + low])
        del pairs, low, high
        if weight is None:
            both.sort()
        else:
            order = np.argsort(both)
            both, weight = both[order], np.concatenate([weight, weight])[order]
        starts = np.searchsorted(both, np.arange(nodes + 1) * nodes)
        both %= nodes
        return cls(starts, both, weight)


def _first_of_equals(ordered: Ints) -> NDArray[np.bool_]:
    first = np.ones(len(ordered), dtype=bool)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return first


def by_metis(graph: Adjacency, parts: int, node_weight: Ints | None) -> Ints:
    """Return the part of each node by METIS's k-way partitioning, or its recursive bisection."""
    try:
        import pymetis
    except ImportError as error:
        raise MissingPackageError(
            'method="metis" needs pymetis: pip install "varcomm[partition]". '
            'Or choose method="rcb" (with data.pos) or "block".'
        ) from error
    _, owner = pymetis.part_graph(
        parts,
        adjacency=pymetis.CSRAdjacency(graph.starts, graph.neighbours),
        vweights=node_weight,
        eweights=graph.weights,
    )
    return np.asarray(owner, dtype=np.int64)


def by_kahip(graph: Adjacency, parts: int, node_weight: Ints | None) -> Ints:
    """Return the part of each node by KaHIP's KaFFPa in its configuration "eco"."""
    try:
        import kahip
    except ImportError as error:
        raise MissingPackageError(
            'method="kahip" needs kahip: pip install "varcomm[kahip]". '
            'Or choose method="metis", "rcb" (with data.pos) or "block".'
        ) from error
    nodes = np.ones(len(graph.starts) - 1, np.int64) if node_weight is None else node_weight
    edges = np.ones_like(graph.neighbours) if graph.weights is None else graph.weights
    for weights, what in ((nodes, "nodes"), (edges, "edges, from both ends,")):
        # KaHIP would use the remainder, and return nearly all nodes in one part
        if (total := int(weights.sum())) >= 2**31:
            raise ArgumentError(
                f'method="kahip" computes in 32 bits, but the weights of all {what} add up to '
                f"{total}; they must stay below {2**31}. Divide them, or choose another method."
            )
    # views, which KaHIP reads one by one: lists would need five times the memory
    arrays = [array.data for array in (nodes, graph.starts, edges, graph.neighbours)]
    seed, silent = 0, True
    _, owner = kahip.kaffpa(*arrays, parts, _IMBALANCE, silent, seed, kahip.ECO)
    return np.asarray(owner, dtype=np.int64)
