"""``from_edges``: any pieces on any ranks make the graph that ``partition`` makes."""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch_geometric.data import Data

import varcomm
from tests.graph.graphs import WORLDS, rich, wild
from tests.graph.parts import differences, refusing
from tests.worlds import on_ranks
from varcomm import ArgumentError, DisagreementError, GroupError, ShardSizes
from varcomm.graph import assign, from_edges, partition


@dataclass(frozen=True)
class Pieces:
    """A graph, and its pieces on each rank.

    ``edges_of[r]`` are numbers of the edges of rank r, ``nodes_of[r]`` of its nodes (None: those
    that it describes); ``owner[i]`` is the future rank of node i (None: the describing rank).
    """

    data: Data
    sizes: ShardSizes
    edges_of: tuple[torch.Tensor, ...]
    owner: torch.Tensor | None = None
    nodes_of: tuple[torch.Tensor, ...] | None = None
    hops: int = 1

    def expected(self, group=None):
        """The part of the graph whose edges are those of rank 0, then those of rank 1, ..."""
        order, data = torch.cat(self.edges_of), self.data.clone()
        data.edge_index = data.edge_index[:, order]
        for name in edge_attributes(data):
            data[name] = data[name][order]
        owner = self.owner
        if owner is None:
            owner = self.sizes.owner(torch.arange(self.data.num_nodes))
        return partition(data, group, owner, hops=self.hops)

    def built(self, rank, group=None):
        mine = self.sizes.range(rank)
        described = torch.arange(mine.start, mine.stop)
        nodes = described if self.nodes_of is None else self.nodes_of[rank]
        edges = self.edges_of[rank]
        node_attrs = {k: self.data[k][nodes] for k in node_attributes(self.data)}
        edge_attrs = {k: self.data[k][edges] for k in edge_attributes(self.data)}
        node_attrs = dict(sorted(node_attrs.items(), reverse=rank % 2 == 1))
        return from_edges(
            self.data.edge_index[:, edges],
            self.sizes,
            group,
            node_attrs=node_attrs,
            edge_attrs=edge_attrs,
            node_ids=None if self.nodes_of is None else nodes,
            method="block" if self.owner is None else self.owner[described],
            hops=self.hops,
        )


def edge_attributes(data):
    return [name for name, _ in data if name.startswith("edge_") and name != "edge_index"]


def node_attributes(data):
    return [name for name, _ in data if not name.startswith("edge_") and name != "num_nodes"]


def plain():
    """With an attribute of nodes and one of edges: each costs a message."""
    data = wild()
    return Data(data.x, data.edge_index, edge_number=torch.arange(data.num_edges))


def pieces_of(data, ranks, seed):
    """Deal edges and nodes to some ranks in disorder; others describe and own the nodes."""
    draw, some = torch.Generator().manual_seed(seed), 1 + seed % ranks

    def by_chance(count):
        return (torch.randint(some, (count,), generator=draw) + seed) % ranks

    def dealt(count):
        order, rank_of = torch.randperm(count, generator=draw), by_chance(count)
        return tuple(order[rank_of[order] == rank] for rank in range(ranks))

    nodes = data.num_nodes
    cuts = torch.randint(nodes + 1, (ranks - 1,), generator=draw).sort().values.tolist()
    sizes = ShardSizes(end - start for start, end in pairwise([0, *cuts, nodes]))
    owner = by_chance(nodes) if seed % 3 else None
    owner = owner.int() if seed % 4 == 1 and owner is not None else owner
    nodes_of = None if seed % 2 else dealt(nodes)
    return Pieces(data, sizes, dealt(data.num_edges), owner, nodes_of, hops=1 + seed % 3 % 2)


NO_EDGES = torch.zeros(2, 0, dtype=torch.int64)
SMALL = {
    "no nodes": Data(x=torch.ones(0, 2), edge_index=NO_EDGES, edge_attr=torch.ones(0, 1)),
    "no edges": Data(x=torch.ones(7, 2), edge_index=NO_EDGES, edge_attr=torch.ones(0, 1)),
    "one loop": Data(x=torch.ones(1, 2), edge_index=torch.zeros(2, 1, dtype=torch.int64)),
    "no attributes": Data(edge_index=torch.tensor([[0, 4, 4], [4, 0, 4]]), num_nodes=6),
}


def by_position(rank, ranks):
    """Nodes and edges in uneven pieces; the first rank describes no node."""
    data, found = wild(), {}
    edges, nodes = data.num_edges, data.num_nodes
    sizes = [0, *[nodes // ranks] * (ranks - 1)] if ranks > 1 else [nodes]
    sizes[-1] += nodes - sum(sizes)
    first = sum(sizes[:rank])
    own = slice(edges * rank**2 // ranks**2, edges * (rank + 1) ** 2 // ranks**2)
    for method, shuffled in (("hilbert", False), ("hilbert", True), ("rcb", True)):
        ids = torch.arange(first, first + sizes[rank])
        if shuffled:
            ids = torch.randperm(nodes, generator=torch.Generator().manual_seed(4))[rank::ranks]
        graph = from_edges(
            data.edge_index[:, own],
            sizes,
            node_attrs={key: data[key][ids] for key in ("x", "pos", "y", "train_mask")},
            edge_attrs={key: data[key][own] for key in ("edge_attr", "edge_weight", "edge_type")},
            node_ids=ids if shuffled else None,
            method=method,
        )
        expected = partition(data, method=assign(data, ranks, method))
        found[f"{method}, {shuffled}"] = differences(graph, expected)
    return found


@on_ranks(*WORLDS)
def test_pieces_make_what_partition_makes_of_the_full_graph(rank, ranks):
    seeds = range(24 if ranks in (2, 5) else 12)  # 12 have all remainders
    given = [(f"plain, {seed}", pieces_of(plain(), ranks, seed)) for seed in seeds]
    given += [(f"rich, {seed}", pieces_of(rich(), ranks, seed)) for seed in range(3, 6)]
    for name, data in SMALL.items():
        given += [(f"{name}, {seed}", pieces_of(data, ranks, seed)) for seed in range(6)]
    found = {name: differences(pieces.built(rank), pieces.expected()) for name, pieces in given}
    found |= by_position(rank, ranks)
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


def bytes_sent(rank, pieces):
    with varcomm.trace() as calls:
        graph = pieces.built(rank)
    return sum(call.sent for call in calls), graph.halo_ids


@pytest.mark.parametrize("moves", [False, True])
def test_nothing_travels_twice(worlds, moves):
    """Each edge and node that moves once, and the node's new number; each node asked for once."""
    ranks, data = 3, rich()
    pieces = replace(pieces_of(data, ranks, 2), nodes_of=None, hops=1)
    pieces = pieces if moves else replace(pieces, owner=None)
    deal, describing = pieces.edges_of, pieces.sizes.owner(torch.arange(data.num_nodes))
    owner = pieces.owner if moves else describing
    of_edge = 24 + sum(data[name][0].nbytes for name in edge_attributes(data))
    of_node = 16 + sum(data[name][0].nbytes for name in node_attributes(data))

    told = worlds.run(ranks, bytes_sent, pieces)
    expected = of_node * int((owner != describing).sum())
    for rank, (edges, (_, halo)) in enumerate(zip(deal, told, strict=True)):
        expected += of_edge * int((owner[data.edge_index[1, edges]] != rank).sum())
        expected += 16 * len(halo)
        if moves:
            seen = data.edge_index[:, edges].unique()
            expected += 16 * int((describing[seen] != rank).sum())
    # counts are a number for each rank, a few times
    assert 0 < sum(sent for sent, _ in told) - expected <= 6 * 8 * ranks * (ranks - 1)


class Largest(TorchFunctionMode):
    """The number of entries of the largest tensor that any function returns."""

    entries = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            self.entries = max(self.entries, getattr(value, "numel", int)())
        return result


def largest_tensor(rank, many):
    """The first rank has a long path; each other one a few nodes, which hang together."""
    sizes = ShardSizes([many, 10, 10])
    mine = sizes.range(rank)
    number = torch.arange(mine.start, mine.stop)
    edges = torch.stack([number[:-1], number[1:]])
    before = torch.tensor([[(mine.start - 1) % sizes.total], [mine.start]])
    with Largest() as seen:
        for method in (None, torch.full_like(number, rank)):
            x = {"x": number.double()}
            graph = from_edges(torch.cat([edges, before], 1), sizes, node_attrs=x, method=method)
            graph.with_halo(graph.x)
    return seen.entries, graph.num_halo


def test_ranks_have_no_tensor_of_the_size_of_the_graph(worlds):
    first, *others = worlds.run(3, largest_tensor, 100_000)
    assert first[0] >= 100_000
    # the same as for a shorter path: messages between ranks are the largest tensors
    assert others == worlds.run(3, largest_tensor, 10_000)[1:]
    assert all(entries <= 4000 and halo == 1 for entries, halo in others)


UNSIGNED = (torch.uint16, torch.float8_e5m2)


@on_ranks(3)
def test_attributes_are_data(rank):
    """Attributes with gradients, whether they travel or stay, and of dtypes that few ops take."""
    x = torch.ones(2, 3, requires_grad=True)
    for method in (None, torch.zeros(2, dtype=torch.uint8)):
        graph = from_edges(NO_EDGES, [2] * 3, node_attrs={"x": x * 2}, method=method)
        assert not graph.x.requires_grad
        assert graph.num_owned == (2 if method is None else 6 * (rank == 0))
    values = {str(dtype): (torch.arange(2) + 2 * rank).to(dtype) for dtype in UNSIGNED}
    graph = from_edges(NO_EDGES, [2] * 3, node_attrs=values, method=torch.tensor([1, 0]))
    for dtype in UNSIGNED:
        assert graph[str(dtype)].tolist() == [[1, 3, 5], [0, 2, 4], []][rank]


SIZES = (2, 1, 3)
EDGES = torch.tensor([[0, 5, 2], [1, 2, 4]])


def right(rank):
    """The arguments of each rank; three edges, six nodes."""
    return {
        "edge_index": EDGES,
        "sizes": SIZES,
        "node_attrs": {"x": torch.arange(2.0 * SIZES[rank]).view(SIZES[rank], 2)},
        "edge_attrs": {"weight": torch.arange(3)},
        "method": torch.zeros(SIZES[rank], dtype=torch.int64),
    }


def ids(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


META = torch.empty(1, dtype=torch.int64, device="meta")
ONE = torch.ones(1)
# wrong values of each argument on rank 1, which describes one node
WRONG = {
    "hops": [0, 1.5],
    "sizes": [6, [3, 3], [7, -1, 0]],
    "edge_index": [
        *(EDGES.tolist(), EDGES.int(), EDGES.T, torch.eye(6).long().to_sparse()),
        *(EDGES + ids([1], [0]), EDGES - ids([0], [2])),
    ],
    "node_ids": [[2], ONE, ids([2]), ids(2, 6), META],
    "node_attrs": [
        *({"x": [1.0]}, {"x": torch.ones(2, 2)}, {"x": torch.tensor(1.0)}, {3: ONE}),
        *({"sizes": ONE}, {"x": torch.eye(1).to_sparse()}, {"x": META}),
    ],
    "edge_attrs": [{"weight": torch.ones(2)}, {"next_index": torch.arange(3)}],
    "method": ["metis", [0.5], [0, 0], ids(*[0] * 6), torch.zeros(1), ids(3), META],
}
# what rank 1 passes differently, and a word of the message
DIFFERENT = [
    ({"sizes": (3, 1, 2)}, "sizes"),
    ({"method": None}, "method"),
    ({"hops": 2}, "hops"),
    ({"node_ids": ids(2)}, "node_ids"),
    ({"node_attrs": {"x": torch.ones(1, 2, dtype=torch.float64)}}, "node_attrs"),
    ({"edge_attrs": {"weight": torch.arange(3)[:, None]}}, "edge_attrs"),
    ({"node_attrs": {"y": torch.ones(1, 2)}}, "node_attrs"),
    ({"edge_attrs": None}, "edge_attrs"),
]
TWICE = [[(0, 1, 2), (3,), (5,)], [(0, 1, 2), (3, 1), (4, 5)], [(0, 1, 2), (), (2, 3, 4, 5, 2)]]


@on_ranks(3)
def test_refused_on_all_ranks(rank):
    refused, mine, what = refusing(from_edges), right(rank), "graph.from_edges: "
    for name, values in WRONG.items():
        for value in values:
            words = name, f"{what}refused on rank 1 of 3"
            refused(ArgumentError, words, **(mine | ({name: value} if rank == 1 else {})))
    meta = {"edge_index": EDGES.to("meta")} if rank == 1 else {}
    refused(GroupError, ("meta", what), **(mine | meta))
    for change, word in DIFFERENT:
        refused(DisagreementError, (word, what), **(mine | (change if rank == 1 else {})))
    none = EDGES[:, :0]
    for named in TWICE:
        node_ids = torch.tensor(named[rank], dtype=torch.int64)
        refused(DisagreementError, ("node_ids",), edge_index=none, sizes=SIZES, node_ids=node_ids)
    both = {"node_attrs": {"w": torch.ones(SIZES[rank])}, "edge_attrs": {"w": torch.ones(0)}}
    refused(ArgumentError, ("'w'", what), edge_index=none, sizes=SIZES, **both)
    for value in (None, float("nan") if rank == 1 else 0.0):
        pos = {} if value is None else {"pos": torch.full((SIZES[rank], 2), value)}
        arguments = {"edge_index": none, "sizes": SIZES, "node_attrs": pos}
        refused(ArgumentError, ("pos",), **arguments, method="hilbert")
    # the ranks still work, and take integers of numpy
    here = right(rank) | {"sizes": np.array(SIZES), "hops": np.int64(1) if rank == 0 else 1}
    here["node_ids"] = torch.arange(6 if rank == 2 else 0, dtype=torch.int32)
    graph = from_edges(**(here | {"node_attrs": {"x": torch.arange(6.0 if rank == 2 else 0.0)}}))
    assert (graph.num_owned, graph.edges.num_owned) == ((6, 9) if rank == 0 else (0, 0))
