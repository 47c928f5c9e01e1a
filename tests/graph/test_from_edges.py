"""Graphs from pieces: dealt to ranks in any way, they are what ``partition`` makes of the whole."""

from dataclasses import dataclass, replace
from itertools import cycle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.data import Data

import varcomm
from tests.graph.graphs import WORLDS, wild
from tests.graph.parts import differences
from varcomm import ShardSizes
from varcomm.graph import from_edges, partition


@dataclass(frozen=True)
class Pieces:
    """A graph, and which rank brings what of it.

    ``edges_of[r]`` are numbers of the edges that rank r brings, ``nodes_of[r]`` of the nodes; None
    for those that it speaks for. ``owner[i]`` is the rank that is to own node i; None for the one
    that speaks for it.
    """

    data: Data
    sizes: ShardSizes
    edges_of: tuple[torch.Tensor, ...]
    owner: torch.Tensor | None = None
    nodes_of: tuple[torch.Tensor, ...] | None = None
    hops: int = 1

    def whole(self):
        """The graph whose edges are those of rank 0, then those of rank 1, and so on."""
        order = torch.cat(self.edges_of)
        data = self.data.clone()
        for name in ("edge_index", *edge_attributes(data)):
            data[name] = data[name][..., order] if name == "edge_index" else data[name][order]
        return data

    def expected(self, group=None):
        owner = self.owner
        if owner is None:
            owner = self.sizes.owner(torch.arange(self.data.num_nodes))
        return partition(self.whole(), group, owner, hops=self.hops)

    def built(self, rank, group=None):
        mine = self.sizes.range(rank)
        spoken_for = torch.arange(mine.start, mine.stop)
        nodes = spoken_for if self.nodes_of is None else self.nodes_of[rank]
        edges = self.edges_of[rank]
        # who has no rows need not know of attributes that others have rows of
        forget_nodes = not len(nodes) and self.data.num_nodes
        forget_edges = not len(edges) and self.data.num_edges and rank % 2
        return from_edges(
            self.data.edge_index[:, edges],
            self.sizes,
            group,
            node_attrs=None
            if forget_nodes
            else {k: self.data[k][nodes] for k in node_attributes(self.data)},
            edge_attrs={}
            if forget_edges
            else {k: self.data[k][edges] for k in edge_attributes(self.data)},
            node_ids=None if self.nodes_of is None else nodes,
            method="block" if self.owner is None else self.owner[spoken_for],
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


def rich(nodes=24):
    """With attributes of many kinds."""
    data = wild(nodes)
    edges = data.num_edges
    generator = torch.Generator().manual_seed(3)
    data.kind = torch.randint(-9, 9, (nodes,), generator=generator, dtype=torch.int8)
    data.half = torch.randn(nodes, 2, generator=generator).bfloat16()
    data.wave = torch.randn(nodes, 2, 3, dtype=torch.complex64, generator=generator).conj()
    data.strided = torch.randn(5, nodes, generator=generator).T[:, ::2]
    data.nothing = torch.empty(nodes, 0)
    data.edge_number = torch.arange(edges, dtype=torch.int32) * 1000
    data.edge_mask = torch.rand(edges, generator=generator) < 0.5
    data.edge_tensor = torch.randn(edges, 2, 1, 2, generator=generator).half()
    return data


def by_rank(ranks_of, ranks):
    return tuple(torch.nonzero(ranks_of == rank).view(-1) for rank in range(ranks))


def ways_to_deal(count, ranks):
    """Numbers 0 ... count - 1 to ranks: in turn, by chance and in disorder, all to one, to some."""
    generator = torch.Generator().manual_seed(count + ranks)
    order = torch.randperm(count, generator=generator)
    chance = torch.randint(ranks, (count,), generator=generator)
    nobody = torch.empty(0, dtype=torch.int64)
    some = [nobody] * ranks
    some[ranks // 2] = order[: count // 3]
    some[ranks - 1] = torch.cat([some[ranks - 1], order[count // 3 :]])
    return {
        "in turn": by_rank(torch.arange(count) % ranks, ranks),
        "by chance": tuple(order[chance[order] == rank] for rank in range(ranks)),
        "all to the last": (nobody,) * (ranks - 1) + (order,),
        "to some": tuple(some),
    }


def ways_to_speak(nodes, ranks):
    odd = [0] * ranks
    odd[0] += min(1, nodes)
    odd[ranks - 1] += nodes - sum(odd)
    return {
        "balanced": ShardSizes.balanced(nodes, ranks),
        "odd": ShardSizes(odd),
        "all by the first": ShardSizes([nodes, *[0] * (ranks - 1)]),
    }


def ways_to_own(nodes, ranks):
    generator = torch.Generator().manual_seed(nodes * ranks)
    few = torch.randint(max(1, ranks - 1), (nodes,), generator=generator)
    return {
        "who speaks": None,
        "by chance": torch.randint(ranks, (nodes,), generator=generator),
        "the first nothing": few + 1 if ranks > 1 else few,
        "one all": torch.full((nodes,), ranks // 2, dtype=torch.int32),
    }


def cases(data, ranks):
    """Each way to speak with each way to own; ways to deal edges and nodes take turns."""
    nodes = data.num_nodes
    ways_to_name = {"no ids": None} | ways_to_deal(nodes, ranks)
    deals, names = (cycle(ways) for ways in (ways_to_deal(data.num_edges, ranks), ways_to_name))
    for spoken, sizes in ways_to_speak(nodes, ranks).items():
        for owned, owner in ways_to_own(nodes, ranks).items():
            edges, named = next(deals), next(names)
            yield (
                f"edges {edges}, {spoken}, owned by {owned}, nodes {named}",
                Pieces(
                    data,
                    sizes,
                    ways_to_deal(data.num_edges, ranks)[edges],
                    owner,
                    ways_to_name[named],
                ),
            )


def wrong_cases(rank, given):
    return {
        name: wrong
        for name, pieces in given
        if (wrong := differences(pieces.built(rank), pieces.expected()))
    }


@pytest.mark.parametrize("ranks", WORLDS)
def test_pieces_make_what_partition_makes_of_the_whole(worlds, ranks):
    given = list(cases(plain(), ranks))
    assert len(given) == 12
    given.append(next(case for case in cases(rich(), ranks) if "by by chance" in case[0]))
    assert worlds.run(ranks, wrong_cases, given) == [{}] * ranks


NO_EDGES = torch.zeros(2, 0, dtype=torch.int64)


@pytest.mark.parametrize("ranks", WORLDS)
def test_graphs_of_almost_nothing(worlds, ranks):
    graphs = {
        "no nodes": Data(x=torch.rand(0, 2), edge_index=NO_EDGES, edge_attr=torch.rand(0, 1)),
        "no edges": Data(x=torch.rand(7, 2), edge_index=NO_EDGES, edge_attr=torch.rand(0, 1)),
        "one loop": Data(x=torch.rand(1, 2), edge_index=torch.zeros(2, 1, dtype=torch.int64)),
        "no attributes": Data(edge_index=torch.tensor([[0, 4, 4], [4, 0, 4]]), num_nodes=6),
    }
    given = [
        (f"{graph}, {name}", pieces)
        for graph, data in graphs.items()
        for name, pieces in cases(data, ranks)
        if "edges all to the last" in name
    ]
    assert worlds.run(ranks, wrong_cases, given) == [{}] * ranks


@st.composite
def some_pieces(draw, ranks):
    sizes = draw(st.lists(st.integers(0, 6), min_size=ranks, max_size=ranks))
    nodes = sum(sizes)
    node, rank = st.integers(0, max(0, nodes - 1)), st.integers(0, ranks - 1)
    edges = draw(st.lists(st.tuples(node, node, rank), max_size=30 if nodes else 0))
    source, target, reader = torch.tensor(edges, dtype=torch.int64).view(-1, 3).unbind(1)
    owner = draw(st.none() | st.lists(rank, min_size=nodes, max_size=nodes))
    nodes_of = None
    if draw(st.booleans()):
        order = torch.tensor(draw(st.permutations(range(nodes))), dtype=torch.int64)
        names = draw(st.lists(rank, min_size=nodes, max_size=nodes))
        holder = torch.tensor(names, dtype=torch.int64)
        nodes_of = tuple(order[holder == r] for r in range(ranks))
    return Pieces(
        Data(
            edge_index=torch.stack([source, target]),
            num_nodes=nodes,
            x=torch.arange(nodes * 2.0).view(nodes, 2),
            edge_number=torch.arange(len(edges)),
        ),
        ShardSizes(sizes),
        by_rank(reader, ranks),
        None if owner is None else torch.tensor(owner, dtype=torch.int64),
        nodes_of,
        hops=draw(st.integers(1, 3)),
    )


@settings(deadline=None, max_examples=25)
@given(data=st.data())
@pytest.mark.parametrize("ranks", WORLDS)
def test_any_pieces(worlds, ranks, data):
    pieces = data.draw(some_pieces(ranks))
    assert worlds.run(ranks, wrong_cases, [("drawn", pieces)]) == [{}] * ranks


def in_a_subgroup(rank, pieces):
    group = torch.distributed.new_group([2, 1])
    if rank == 0:
        return []
    inner = group.rank()
    with varcomm.debug():
        graph = pieces.built(inner, group)
    return [*differences(graph, pieces.expected(group)), graph.group.size, graph.method]


def test_in_a_subgroup_that_compares_its_calls(worlds):
    (_, pieces), *_ = [case for case in cases(plain(), 2) if "owned by by chance" in case[0]]
    told = worlds.run(3, in_a_subgroup, pieces)
    assert told == [[], [2, "the ranks given"], [2, "the ranks given"]]


def bytes_sent(rank, pieces):
    with varcomm.trace() as calls:
        graph = pieces.built(rank)
    return sum(call.sent for call in calls), graph.owned_ids, graph.halo_ids


@pytest.mark.parametrize("owned", ["who speaks", "by chance"])
def test_nothing_travels_twice(worlds, owned):
    """Each edge and node that moves once; each node that a rank asks for once, and its answer."""
    ranks, data = 3, rich()
    deal = ways_to_deal(data.num_edges, ranks)["by chance"]
    owner = ways_to_own(data.num_nodes, ranks)[owned]
    pieces = Pieces(data, ShardSizes.balanced(data.num_nodes, ranks), deal, owner)
    speaker = pieces.sizes.owner(torch.arange(data.num_nodes))
    owner = speaker if owner is None else owner
    of_edge = 24 + sum(row_bytes(data[name]) for name in edge_attributes(data))
    of_node = 8 + sum(row_bytes(data[name]) for name in node_attributes(data))

    told = worlds.run(ranks, bytes_sent, pieces)
    expected = of_node * int((owner != speaker).sum())
    for rank, (edges, (_, _, halo)) in enumerate(zip(deal, told, strict=True)):
        expected += of_edge * int((owner[data.edge_index[1, edges]] != rank).sum())
        expected += 16 * len(halo)
        if owned == "by chance":
            seen = data.edge_index[:, edges].unique()
            expected += 16 * int((speaker[seen] != rank).sum())
    sent = sum(sent for sent, *_ in told)
    counts = sent - expected  # a number for each rank, a few times
    assert 0 < counts <= 6 * 8 * ranks * (ranks - 1)


def row_bytes(value):
    return value[0].numel() * value.element_size()


class Largest(TorchDispatchMode):
    """Remembers how many entries the largest tensor had that anything gave."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, torch.Tensor):
                self.entries = max(self.entries, value.numel())
        return result


def largest_tensor(rank, many):
    """The first rank has a long path; each other one a few nodes, which hang together."""
    ranks, few = torch.distributed.get_world_size(), 10
    sizes = ShardSizes([many, *[few] * (ranks - 1)])
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
    # the same as if the long path were shorter: what ranks tell each other is what is largest there
    assert others == worlds.run(3, largest_tensor, 10_000)[1:]
    assert all(entries <= 4000 and halo == 1 for entries, halo in others)


def requiring_a_gradient(rank):
    ranks = torch.distributed.get_world_size()
    x = torch.ones(2, 3, requires_grad=True)
    none = torch.zeros(2, 0, dtype=torch.int64)
    graphs = [
        from_edges(none, [2] * ranks, node_attrs={"x": x * 2}, method=method)
        for method in (None, torch.zeros(2, dtype=torch.uint8))
    ]
    return [(graph.method, graph.num_nodes, graph.x.requires_grad) for graph in graphs]


@pytest.mark.parametrize("ranks", [1, 3])
def test_attributes_are_data(worlds, ranks):
    """Whether they travel or stay: neither can be differentiated, nor require a gradient."""
    first, *others = worlds.run(ranks, requiring_a_gradient)
    assert first == [("block", 2, False), ("the ranks given", 2 * ranks, False)]
    assert others == [[("block", 2, False), ("the ranks given", 0, False)]] * (ranks - 1)


UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.float8_e5m2)


def of_odd_dtypes(rank):
    """Which cannot be pickled, or not be compared, so they are made here."""
    values = {str(dtype): (torch.arange(2) + 2 * rank).to(dtype) for dtype in UNSIGNED}
    none = torch.zeros(2, 0, dtype=torch.int64)
    graph = from_edges(none, [2, 2], node_attrs=values, method=torch.tensor([1, 0]))
    return [graph[str(dtype)].to(torch.int64).tolist() for dtype in UNSIGNED]


def test_attributes_of_dtypes_that_torch_half_knows(worlds):
    assert worlds.run(2, of_odd_dtypes) == [[[1, 3]] * 5, [[0, 2]] * 5]


@pytest.mark.parametrize("hops", [2, 3])
def test_halos_of_several_hops(worlds, hops):
    given = [(name, replace(p, hops=hops)) for name, p in cases(plain(), 3) if "in turn" in name]
    assert worlds.run(3, wrong_cases, given) == [{}] * 3
