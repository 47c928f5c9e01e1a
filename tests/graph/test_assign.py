"""``assign`` and ``assign_sharded``: every method, with weights and types, and refusals."""

import importlib.util
import sys
from itertools import product

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.data import Data, HeteroData

import varcomm
from tests.graph.graphs import WORLDS, grid, wild
from tests.graph.parts import refusing
from tests.worlds import on_ranks
from varcomm import ArgumentError, DisagreementError, GroupError, MissingPackageError, ShardSizes
from varcomm.graph import assign, assign_sharded

# Reference partitions: sort all nodes, then walk along them.


def shares(total, parts):
    """Return the start of each share."""
    return ShardSizes.balanced(total, parts).offsets


def behind(weights, cut):
    """Return whether the middle of each node, in order, is behind a cut."""
    start, found = 0, []
    for weight in weights:
        found.append(start + (weight - 1) // 2 >= cut)
        start += weight
    return found


def in_order(order, weights, parts):
    owner = torch.zeros(len(order), dtype=torch.int64)
    ordered = [weights[i] for i in order]
    for cut in shares(sum(weights), parts)[1:]:
        for i, is_behind in zip(order, behind(ordered, cut), strict=True):
            owner[i] += is_behind
    return owner


def hilbert(pos, weights, parts):
    """The order along the curve is that of as many parts as nodes."""
    if len(pos) == 0:
        return torch.zeros(0, dtype=torch.int64)
    order = assign(at(pos), len(pos), "hilbert").argsort().tolist()
    return in_order(order, weights, parts)


def rcb(pos, weights, parts):
    owner = torch.zeros(len(pos), dtype=torch.int64)
    boxes = [(list(range(len(pos))), 0, parts)]
    for nodes, first, count in boxes:
        if count == 1 or not nodes:
            owner[nodes] = first
            continue
        columns = list(zip(*pos[nodes].double().tolist(), strict=True))
        extents = [max(column) / 2 - min(column) / 2 for column in columns]
        along = columns[extents.index(max(extents))]
        order = sorted(range(len(nodes)), key=along.__getitem__)
        ordered = [nodes[i] for i in order]
        half = count // 2
        cut = shares(sum(weights[i] for i in nodes), count)[half]
        right = behind([weights[i] for i in ordered], cut)
        split = right.index(True) if any(right) else len(right)
        boxes += [
            (sorted(ordered[:split]), first, half),
            (sorted(ordered[split:]), first + half, count - half),
        ]
    return owner


def block(pos, weights, parts):
    return in_order(range(len(pos)), weights, parts)


NAIVE = {"hilbert": hilbert, "rcb": rcb, "block": block}


def awkward_positions(seed, nodes, dims):
    """Positions with duplicates, zeros of both signs, and orders of magnitude between them."""
    generator = torch.Generator().manual_seed(seed)
    pos = torch.randn(nodes, dims, generator=generator, dtype=torch.float64)
    kind = seed % 4
    if kind == 1:
        pos = pos.round()  # duplicates, and zeros of both signs
    elif kind == 2:
        pos = pos * 10.0 ** torch.randint(-300, 300, (nodes, 1), generator=generator).double()
    elif kind == 3:
        pos = pos.float()
    return pos


def some_weights(seed, nodes):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randint(0, 4, (nodes,), generator=generator)
    if nodes:
        weights[seed % nodes] += 1 + 20 * (seed % 3 == 0)
    return weights


def at(pos):
    return Data(pos=pos, num_nodes=len(pos))


METHODS = ("metis", "rcb", "hilbert", "block", "random")
PARTS = (1, 2, 3, 8)
EDGES = torch.tensor([[0, 1, 2], [1, 2, 0]])
NAN, INF = float("nan"), float("inf")
TO, WITHIN = ("a", "to", "b"), ("b", "near", "b")


def empty(nodes):
    return Data(
        edge_index=torch.zeros(2, 0, dtype=torch.int64),
        pos=torch.arange(2.0 * nodes).view(nodes, 2),
        num_nodes=nodes,
    )


GRAPHS = {
    "wild": wild(),
    "grid": grid(20, 30),
    "loops": Data(edge_index=torch.arange(6).repeat(2, 2), pos=torch.zeros(6, 2), num_nodes=6),
    "no edges": empty(9),
    "fewer nodes than ranks": empty(2),
    "no nodes": empty(0),
}


def test_every_node_has_a_rank_always_the_same():
    for method, parts in product(METHODS, PARTS):
        for name, data in GRAPHS.items():
            owner = assign(data, parts, method)
            assert (owner.dtype, owner.shape) == (torch.int64, (data.num_nodes,)), name
            counts = torch.bincount(owner, minlength=parts)
            assert len(counts) == parts, "a rank is out of range"
            assert torch.equal(owner, assign(data.clone(), parts, method)), name
            assert method not in NAIVE or counts.max() - counts.min() <= 1


def test_few_edges_are_cut_and_parts_are_even():
    data, method = grid(40, 50), "metis"
    for parts in PARTS:
        owner = assign(data, parts, method)
        counts = torch.bincount(owner, minlength=parts)
        assert counts.max() <= 1.05 * data.num_nodes / parts
        assert counts.min() > 0
        source, target = owner[data.edge_index]
        # strips, the simplest partition of a grid, cut 40 edges at each border
        assert int((source != target).sum()) <= 40 * (parts - 1) * 1.5
    # direction, loops and repeats do not count
    edges = wild().edge_index
    plain = edges[:, edges[0] != edges[1]].unique(dim=1)
    owner = assign(wild(), 3, method)
    for other in (plain, torch.cat([edges, edges.flip(0)], 1)):
        assert torch.equal(owner, assign(Data(edge_index=other, num_nodes=24), 3, method))


def test_the_default_method(monkeypatch):
    counts = torch.bincount(assign(empty(3000), 5, "random"))
    assert counts.min() > 500
    assert counts.max() < 700
    data = grid(6, 5)
    assert torch.equal(assign(data, 3), assign(data, 3, "metis"))
    assert torch.equal(assign(data, 40), assign(data, 40, "block")), "more parts than nodes"
    assert torch.equal(assign(Data(pos=data.pos), 3), assign(data, 3, "rcb"))
    assert torch.equal(assign(Data(num_nodes=30), 3), assign(data, 3, "block"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert torch.equal(assign(data, 3), assign(data, 3, "rcb"))
    monkeypatch.setitem(sys.modules, "pymetis", None)
    with pytest.raises(MissingPackageError, match="pymetis"):
        assign(data, 2, "metis")


@pytest.mark.parametrize("method", NAIVE)
@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    nodes=st.integers(0, 70),
    dims=st.integers(1, 4),
    parts=st.integers(1, 11),
    weighted=st.booleans(),
)
def test_as_if_all_nodes_were_sorted(method, seed, nodes, dims, parts, weighted):
    pos = awkward_positions(seed, nodes, dims)
    weights = some_weights(seed, nodes) if weighted else None
    owner = assign(at(pos), parts, method, node_weight=weights)
    each = [1] * nodes if weights is None else weights.tolist()
    assert torch.equal(owner, NAIVE[method](pos, each, parts))
    if weighted and nodes:
        got = torch.zeros(parts, dtype=torch.int64).index_add(0, owner, weights)
        allowed = int(weights.max()) * (2 if method == "rcb" else 1) + 1
        assert bool(((got - int(weights.sum()) / parts).abs() < allowed).all())


def test_a_node_without_weight_behind_a_box_whose_cut_is_at_its_end():
    """The left box weighs 1, less than its 3 parts; the right box starts with a weightless tie."""
    pos = torch.tensor([[0.0, 0.0], [20.0, 9.0], [19.0, 9.0], [19.5, 0.0]])
    owner = assign(at(pos), 6, "rcb", node_weight=torch.tensor([1, 0, 11, 0]))
    assert owner.tolist() == [0, 3, 4, 3]


def test_the_hilbert_curve_visits_each_cell_once_from_neighbour_to_neighbour():
    for dims, bits in ((1, 6), (2, 1), (2, 4), (3, 1), (3, 3), (4, 2)):
        cells = torch.cartesian_prod(*[torch.arange(1 << bits)] * dims).view(-1, dims)
        for pos in (cells, cells.half(), cells.double() * 2.0**-900 - 3.0**-600):
            place = assign(at(pos), len(cells), "hilbert")
            assert torch.equal(place.sort().values, torch.arange(len(cells)))
            assert bool((cells[place.argsort()].diff(dim=0).abs().sum(1) == 1).all())
    # the most coordinates
    pos = torch.rand(20, 64)
    assert torch.bincount(assign(at(pos[:, :63]), 2, "hilbert")).tolist() == [10, 10]
    assert torch.bincount(assign(at(pos), 2, "rcb")).tolist() == [10, 10]


@pytest.mark.parametrize("method", ["rcb", "hilbert"])
def test_positions(method):
    pos = torch.rand(500, 3, dtype=torch.float64, requires_grad=True)
    owner = assign(at(pos), 6, method)
    assert not owner.requires_grad
    pos, order = pos.detach(), torch.randperm(500)
    assert torch.equal(assign(at(pos[order]), 6, method), owner[order])
    assert torch.equal(assign(at(pos * 2.0**-900), 6, method), owner)
    assert assign(at(torch.ones(7, 2)), 3, method).tolist() == [0, 0, 0, 1, 1, 2, 2]
    line = torch.tensor([3.0, 0.0, 2.0, 1.0])
    for column in (line, line[:, None], line.int()):
        assert assign(at(column), 2, method).tolist() == [1, 0, 1, 0]
    cells = torch.cartesian_prod(*[torch.arange(4.0)] * 3)
    owner = assign(at(cells), 8, method)
    for part in range(8):  # cubes
        mine = cells[owner == part]
        assert (mine.amax(0) - mine.amin(0)).tolist() == [1] * 3


def test_weights_of_metis():
    data = grid(40, 40)
    weight = torch.where(data.pos[:, 1] < 8, 9, 1)  # a fifth of the nodes has most of the weight
    owner = assign(data, 5, "metis", node_weight=weight)
    got = torch.zeros(5, dtype=torch.int64).index_add(0, owner, weight)
    assert int(got.max()) <= 1.04 * int(weight.sum()) / 5
    data = grid(12, 12)
    source, target = data.edge_index
    across = (target - source) > 1  # to the next row
    for expensive in (across, ~across):
        owner = assign(data, 4, "metis", edge_weight=torch.where(expensive, 100, 1))
        assert not bool(((owner[source] != owner[target]) & expensive).any())
    # weights of repeats and of both directions are added, and zero is no edge
    edges, weight = data.edge_index, torch.randint(0, 30, (data.num_edges,))
    pieces = [weight // 3, weight // 4, weight - weight // 3 - weight // 4]
    repeated = Data(edge_index=torch.cat([edges, edges.flip(0), edges], 1), num_nodes=144)
    rest = Data(edge_index=edges[:, weight > 0], num_nodes=144)
    owner = assign(data, 3, "metis", edge_weight=weight)
    assert torch.equal(owner, assign(repeated, 3, "metis", edge_weight=torch.cat(pieces)))
    assert torch.equal(owner, assign(rest, 3, "metis", edge_weight=weight[weight > 0]))
    # fewer nodes than parts: split in order
    line = Data(edge_index=torch.tensor([[0, 1], [1, 2]]), num_nodes=3)
    weights = {"node_weight": torch.tensor([0, 5, 5]), "edge_weight": torch.ones(2).long()}
    assert assign(line, 5, "metis", **weights).tolist() == [0, 1, 3]


def two_types(rows=12, columns=10):
    """A grid with nodes of two types, and the same grid with one type in the same order."""
    whole = grid(rows, columns)
    is_b = torch.arange(whole.num_nodes) % 10 < 3
    order = torch.cat([torch.nonzero(~is_b), torch.nonzero(is_b)]).view(-1)
    place, first = order.argsort(), int((~is_b).sum())
    data, edges = HeteroData(), []
    data["a"].pos, data["b"].pos = whole.pos[~is_b], whole.pos[is_b]
    start, ends = {"a": 0, "b": first}, place[whole.edge_index]
    for kind in (("a", "near", "a"), TO, ("b", "back", "a"), WITHIN):
        source, target = (
            (end >= first) == (name == "b") for end, name in zip(ends, kind[::2], strict=True)
        )
        shift = torch.tensor([[start[kind[0]]], [start[kind[2]]]])
        edges.append(ends[:, source & target])
        data[kind].edge_index = edges[-1] - shift
    return data, Data(pos=whole.pos[order], edge_index=torch.cat(edges, dim=1))


@pytest.mark.parametrize("method", [m for m in METHODS if m != "block"])
def test_types_are_split_together(method):
    data, as_one = two_types()
    nodes = {kind: torch.randint(0, 9, (data[kind].num_nodes,)) for kind in data.node_types}
    weights = {"node_weight": nodes}
    joined = {"node_weight": torch.cat(list(nodes.values()))}
    if method == "metis":
        edges = {kind: torch.randint(0, 9, (data[kind].num_edges,)) for kind in data.edge_types}
        weights["edge_weight"], joined["edge_weight"] = edges, torch.cat(list(edges.values()))
    if method == "random":
        weights, joined = {}, {}
    owner = assign(data, 4, method, **weights)
    assert {kind: len(owner[kind]) for kind in owner} == {"a": 84, "b": 36}
    assert torch.equal(torch.cat(list(owner.values())), assign(as_one, 4, method, **joined))
    data["none"].pos = torch.rand(0, 2)
    assert assign(data, 3, method)["none"].shape == (0,)


def test_blocks_split_each_type():
    data, _ = two_types()
    weight = {"a": torch.arange(84), "b": torch.ones(36).int()}
    owner = assign(data, 5, "block", node_weight=weight)
    alone = assign(Data(pos=data["a"].pos), 5, "block", node_weight=weight["a"])
    assert torch.equal(owner["a"], alone)
    assert torch.bincount(owner["b"]).tolist() == [8, 7, 7, 7, 7]


def square(**changes):
    return Data(**({"num_nodes": 4, "edge_index": EDGES, "pos": torch.rand(4, 2)} | changes))


def typed(kind, **changes):
    data, _ = two_types()
    if isinstance(kind, str):
        data[kind].num_nodes = data[kind].num_nodes
    for name, value in changes.items():
        data[kind][name] = value
    return data


ONES = torch.ones(4, dtype=torch.int64)
POSITIONS = [
    *(None, torch.rand(3, 2), torch.rand(4, 2, 2), torch.rand(4, 0), torch.rand(4, 2) + 0j),
    *(torch.ones(4, 2, dtype=torch.bool), np.ones((4, 2)), torch.tensor([0.0, NAN, 0.0, INF])),
]
WEIGHTS = [ONES.float(), ONES.bool(), ONES[:3], ONES[:, None], ONES - 2, ONES * 2**62]
OF_B = {"b": torch.ones(84).int()}
# the graph, parts, method, other arguments, and words of the message
REFUSED = [
    ({"edge_index": EDGES}, 2, None, {}, "data must be"),
    (HeteroData(), 2, None, {}, "no nodes of any type"),
    (Data(), 2, "block", {}, "num_nodes"),
    (square(), 2, "scotch", {}, "method must be"),
    *((square(), parts, "block", {}, "parts must be") for parts in (0, 2.0, True)),
    *((square(pos=pos), 2, "rcb", {}, "data.pos") for pos in POSITIONS),
    (square(pos=torch.rand(4, 64)), 2, "hilbert", {}, "63"),
    # pymetis would read out of bounds; checked even with nothing to cut
    *(
        (square(edge_index=edges), parts, "metis", {}, "data.edge_index")
        for parts in (1, 2)
        for edges in (None, EDGES.int(), EDGES.T.contiguous(), EDGES[0], EDGES + 2, EDGES - 1)
    ),
    (square(), 2, "rcb", {"edge_weight": ONES[:3]}, "edge_weight"),
    (square(), 2, "random", {"node_weight": ONES}, "node_weight"),
    *(
        (square(edge_index=EDGES[:, [0, 1, 2, 0]]), 2, "metis", {name: weight}, name)
        for name in ("node_weight", "edge_weight")
        for weight in WEIGHTS
    ),
    *((square(), 2, "block", {"node_weight": ONES * by}, "node_weight") for by in (0, 2**60)),
    (typed("b", pos=None), 2, "rcb", {}, r"data\['b'\].pos"),
    (typed("b", pos=torch.rand(36, 3)), 2, "rcb", {}, "coordinates"),
    (typed(TO, edge_index=torch.tensor([[83], [36]])), 2, "metis", {}, "out of range"),
    (typed(("a", "to", "c"), edge_index=torch.tensor([[0], [0]])), 2, "metis", {}, "'c'"),
    *(
        (two_types()[0], 2, "block", {"node_weight": weight}, "node_weight")
        for weight in (OF_B["b"], OF_B | {"a": OF_B["b"]})
    ),
]


def test_refused():
    for data, parts, method, options, words in REFUSED:
        with pytest.raises(ArgumentError, match=words):
            assign(data, parts, method, **options)


SHARDED = ("hilbert", "rcb")


def cases(ranks):
    """Yield positions and weights of all nodes, parts, and the bounds of ranks' shards."""
    for seed in range(15):
        nodes = (0, 1, 2, 7, 60, 113)[seed % 6]
        generator = torch.Generator().manual_seed(seed)
        pos = awkward_positions(seed, nodes, 1 + seed % 3)
        if seed % 5 == 0:
            pos[nodes // 3 :] = pos[:1]  # most of them at one place
        weights = some_weights(seed, nodes) if seed % 2 else None
        starts = torch.randint(0, nodes + 1, (4,), generator=generator)
        if seed % 7 == 0:
            starts = starts[:1].expand(4)  # all but two ranks, or one, have no nodes
        yield pos, weights, 1 + seed % 9, starts
    pos = torch.rand(5011, 3, generator=torch.Generator().manual_seed(0))
    pos[500:900] = pos[:400]
    parts = 97 if ranks in (2, 5) else 13  # each cut takes messages, in the second tier more
    yield pos, None, parts, torch.tensor([1000, 1001, 4000, 4500])
    line = torch.tensor([3.0, 0.0, 2.0, 1.0])
    for column in (line, line[:, None], line.half(), line.int()):
        yield column, None, 2, torch.tensor([2, 2, 3, 4])


@on_ranks(*WORLDS)
def test_as_one_process_with_all_positions(rank, ranks):
    for method in SHARDED:
        for pos, weights, parts, starts in cases(ranks):
            bounds = starts[: ranks - 1].sort().values.tolist()
            mine = pos.tensor_split(bounds)[rank]
            weight = None if weights is None else weights.tensor_split(bounds)[rank]
            before = mine.clone()
            if mine.is_floating_point():
                mine.requires_grad_()
            owner = assign_sharded(mine, parts, method, node_weight=weight)
            assert torch.equal(mine, before), "the positions have changed"
            assert (owner.dtype, owner.requires_grad) == (torch.int64, False)
            expected = assign(at(pos), parts, method, node_weight=weights)
            assert torch.equal(owner, expected.tensor_split(bounds)[rank])


@on_ranks(3)
def test_ranks_of_a_group(rank):
    # equal shares, the larger one first: 0, 1, 2 and 3, 4
    group = dist.new_group([2, 1])  # all ranks create it, and the last rank is its first
    if rank > 0:
        pos, owner = [([0.0, 2.0, 4.0], [0, 0, 1]), ([3.0, 1.0], [1, 0])][rank - 1]
        assert assign_sharded(torch.tensor(pos), 2, "rcb", group).tolist() == owner


def received(rank):
    cost = []
    for method, parts in product(SHARDED, (4, 16)):
        pos = torch.rand(3000, 2, generator=torch.Generator().manual_seed(rank))
        with varcomm.trace() as calls:
            assign_sharded(pos, parts, method)
        cost.append((parts, len(calls), sum(call.received for call in calls)))
    return cost


def test_messages_depend_on_parts_and_not_on_positions(worlds):
    for costs in zip(*worlds.run(3, received), strict=True):
        parts, _, most = map(max, zip(*costs, strict=True))
        assert len({calls for _, calls, _ in costs}) == 1
        # at most 10 rounds of 2 KiB per cut, which other ranks send twice; and a little more
        assert most <= 10 * 2048 * 2 * (parts - 1) + 6000
        assert most < 24 * 16 * 3000, "all positions would have been less"


POS, NONE = torch.tensor([[0.0, 1.0], [2.0, 3.0]]), torch.zeros(0, 2)
TWO = torch.ones(2, dtype=torch.int64)
# the arguments of one rank, where the others pass no rows, and a word of the message
WRONG = [
    *(({"method": "metis"}, "method"), ({"parts": 0}, "parts"), ({"pos": POS.to("meta")}, "meta")),
    *(({"pos": pos}, "pos") for pos in (POS.tolist(), POS + 0j, POS[None], POS[:, :0], POS / 0)),
    ({"pos": torch.zeros(0, 64), "method": "hilbert"}, "63"),
    *(({"node_weight": w}, "node_weight") for w in (TWO.float(), TWO - 2, TWO.to("meta"))),
]
# the arguments of rank 1, where the others have positions, and the difference
DIFFERENT = [
    *(({"pos": torch.zeros(0, 3)}, "coordinates"), ({"pos": NONE.double()}, "dtype")),
    *(({"method": "hilbert"}, "method"), ({"parts": 3}, "parts")),
    ({"node_weight": TWO}, "node_weight"),
]


@on_ranks(3)
def test_refused_on_all_ranks(rank):
    right = {"pos": POS, "parts": 2, "method": "rcb"}

    def assigned(**arguments):
        return assign_sharded(**(right | arguments))

    refused = refusing(assigned, "graph.assign_sharded: ")
    for culprit in (0, 2):
        for wrong, word in WRONG:
            mine = wrong if rank == culprit else {"pos": NONE}
            refused((ArgumentError, GroupError), (word, f"rank {culprit}"), **mine)
    for other, word in DIFFERENT:
        refused(DisagreementError, (word,), **(other if rank == 1 else {}))
    for total in (0, 2**59):  # only the sum over ranks is refused
        refused(ArgumentError, ("node_weight",), node_weight=TWO * total)
    # weights may be zero on a rank, and there may be no nodes
    pos, weight = torch.tensor([2.0 * rank, 2.0 * rank + 1]), TWO * (rank == 1)
    assert not len(assign_sharded(pos[:0], 2, "rcb", node_weight=weight[:0]))
    owner = assign_sharded(pos, 2, "rcb", node_weight=weight)
    assert owner.tolist() == [[0, 0], [0, 1], [1, 1]][rank]
