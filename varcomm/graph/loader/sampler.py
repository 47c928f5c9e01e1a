"""Hops of sampling: nodes go to their owners, which pick in-edges and return their sources."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from varcomm.graph.build.pyg_data import ends
from varcomm.graph.draws import Array, hashed
from varcomm.graph.loader.in_edges import InEdges
from varcomm.graph.loader.messages import Messages
from varcomm.graph.loader.stored_rows import Request, StoredRows, ask
from varcomm.graph.partitioned_graph import EdgeType, NodeType
from varcomm.graph.ragged import spread


@dataclass
class Sample:
    """Nodes of each type in the order of their discovery, and edges of each type by hop.

    `nodes` has global numbers. `discovered` counts the nodes added per hop, seeds first. `sources`
    and `targets` are positions in `nodes`; `rows` are edge ids and attributes.
    """

    nodes: dict[NodeType, Array]
    discovered: dict[NodeType, list[int]]
    sources: dict[EdgeType, list[Array]]
    targets: dict[EdgeType, list[Array]]
    rows: dict[EdgeType, list[list[Array]]]


@dataclass(frozen=True, eq=False)
class Sampler:
    """The in-edges and rows of this rank, for samples of all ranks.

    Nodes have global numbers: those of rank 0 come first.
    """

    nodes: Mapping[NodeType, StoredRows]
    edges: Mapping[EdgeType, tuple[InEdges, StoredRows]]
    fan_outs: Mapping[EdgeType, Sequence[int]]
    replace: bool
    induced: bool

    def sample(self, seeds: Mapping[NodeType, Array], key: Array, messages: Messages) -> Sample:
        """Sample the neighbourhood of seeds, global numbers by type; collective."""
        nodes = {kind: seeds.get(kind, np.zeros(0, np.int64)) for kind in self.nodes}
        out = Sample(nodes, {kind: [len(of)] for kind, of in nodes.items()}, *self._no_edges())
        for hop in range(max(map(len, self.fan_outs.values()), default=0)):
            fan_outs = {edge: of[hop] for edge, of in self.fan_outs.items()}
            begin = {kind: len(of) - out.discovered[kind][-1] for kind, of in out.nodes.items()}
            self._hop(out, begin, fan_outs, hashed(key, hop), messages)
        if self.induced:  # replace the picked edges by all edges between the nodes
            whole = Sample(dict(out.nodes), out.discovered, *self._no_edges())
            every = dict.fromkeys(self.edges, -1)
            self._hop(whole, dict.fromkeys(out.nodes, 0), every, key, messages)
            for edge in self.edges:
                inside = whole.sources[edge][0] < len(out.nodes[ends(edge)[0]])
                out.sources[edge] = [whole.sources[edge][0][inside]]
                out.targets[edge] = [whole.targets[edge][0][inside]]
                out.rows[edge] = [[rows[inside] for rows in whole.rows[edge][0]]]
        return out

    def _no_edges(self) -> Iterator[dict[EdgeType, list[Any]]]:
        return ({edge: [] for edge in self.edges} for _ in range(3))

    def _hop(
        self,
        out: Sample,
        begin: Mapping[NodeType, int],
        fan_outs: Mapping[EdgeType, int],
        key: Array,
        messages: Messages,
    ) -> None:
        """Add in-edges of the nodes from `begin` on, and their sources."""
        active = {edge: ends(edge)[1] for edge in self.edges if fan_outs[edge]}
        kinds = [kind for kind in self.nodes if kind in active.values()]
        frontier = [out.nodes[kind][begin[kind] :] for kind in kinds]
        every = np.full(messages.group.size, key.view(np.int64))
        requests, (keys,) = ask([self.nodes[kind] for kind in kinds], frontier, messages, every)
        of_kind = dict(zip(kinds, requests, strict=True))
        targets = {edge: of_kind[kind] for edge, kind in active.items()}
        picks = {edge: self._picked(edge, fan_outs[edge], of, keys) for edge, of in targets.items()}
        degrees = messages.exchange(
            [count.astype(np.int32) for count, _ in picks.values()],
            [of.received for of in targets.values()],
            [of.counts for of in targets.values()],
        )
        parts, sent, expected = [], [], []
        for (edge, of), degree in zip(targets.items(), degrees, strict=True):
            for part in picks[edge][1]:
                parts.append(part)
                sent.append(_sums(picks[edge][0], of.received))
                expected.append(_sums(degree, of.counts))
        received = iter(messages.exchange(parts, sent, expected))
        sources = {edge: np.zeros(0, np.int64) for edge in self.edges}
        for edge in self.edges.keys() - targets.keys():
            out.targets[edge].append(sources[edge])
            out.rows[edge].append(self.edges[edge][1].parts(sources[edge]))
        for (edge, of), degree in zip(targets.items(), degrees, strict=True):
            # reorder by node, so that the result is equal on any number of ranks
            by_node, start = np.empty_like(degree), np.empty(len(degree), np.int64)
            by_node[of.order] = degree
            start[of.order] = np.cumsum(degree) - degree
            picked = spread(start, by_node)
            source, *rows = (next(received)[picked] for _ in picks[edge][1])
            sources[edge] = source.astype(np.int64)
            first = begin[active[edge]]
            out.targets[edge].append(np.repeat(first + np.arange(len(degree)), by_node))
            out.rows[edge].append(rows)
        for kind, nodes in out.nodes.items():
            edges = [edge for edge in self.edges if ends(edge)[0] == kind]
            found = [sources[edge] for edge in edges]
            place, new = _located(nodes, np.concatenate([nodes[:0], *found]))
            out.nodes[kind] = np.concatenate([nodes, new])
            out.discovered[kind].append(len(new))
            cuts = np.cumsum([len(each) for each in found])
            for edge, places in zip(edges, np.split(place, cuts), strict=False):
                out.sources[edge].append(places)

    def _picked(
        self, edge: EdgeType, fan_out: int, request: Request, keys: Array
    ) -> tuple[Array, list[Array]]:
        """Return the number of in-edges picked for each requested node, and their rows."""
        edges, rows = self.edges[edge]
        ids, number = self.nodes[ends(edge)[1]].ids[request.rows], [*self.edges].index(edge)
        key = hashed(np.repeat(keys, request.received), ids, number)
        count, picked = edges.pick(request.rows, fan_out, key, self.replace)
        return count, [edges.source[picked], *rows.parts(edges.place[picked])]


def _sums(values: Array, counts: Array) -> Array:
    """Return the sum of each of consecutive blocks."""
    total = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
    ends = np.cumsum(counts)
    sums: Array = total[ends] - total[ends - counts]
    return sums


def _located(nodes: Array, sources: Array) -> tuple[Array, Array]:
    """Return the position of sources among nodes, and new nodes in the order of discovery."""
    both, known = np.concatenate([nodes, sources]), len(nodes)
    bits = len(both).bit_length()
    keys = np.sort((both << bits) | np.arange(len(both)))  # sorts faster than argsort
    number, place = keys >> bits, keys & ((1 << bits) - 1)
    is_first = np.diff(number, prepend=-1) > 0
    first = place[is_first]  # where each node occurs first
    is_new = np.zeros(len(both), bool)
    is_new[first] = is_new[:known] = True  # seeds may repeat
    position = np.empty_like(place)
    position[place] = (np.cumsum(is_new) - 1)[first][np.cumsum(is_first) - 1]
    is_new[:known] = False
    return position[known:], both[is_new]
