"""A graph that one rank alone has becomes what it becomes where all have it."""

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

import varcomm
from tests.graph.graphs import WORLDS, split_by, wild
from tests.graph.parts import differences
from tests.graph.typed import WAYS, owners, typed
from varcomm import ArgumentError, DisagreementError
from varcomm.graph import partition


def rich():
    """With attributes of many kinds, of nodes, of edges and of the graph."""
    data = wild()
    nodes, edges = data.num_nodes, data.num_edges
    data.half, data.small = data.x.bfloat16(), data.x.to(torch.int8)
    data.wave = torch.complex(data.x, -data.x).conj()
    data.strided, data.nothing = data.x.T.contiguous().T[:, ::3], torch.empty(nodes, 0)
    data.depth = np.arange(nodes, dtype=">f4")
    data.leaf_area_index = torch.rand(nodes)
    data.edge_mask, data.edge_tensor = data.edge_weight > 0, torch.rand(edges, 2, 1, 2).half()
    data.scalar, data.level, data.part = torch.tensor(2.5), torch.ones(1, 3), torch.rand(9, 2)[4:5]
    data.weight = torch.ones(1, 2, requires_grad=True) * 2
    data.title, data.year, data.nobody = "a graph", 1998, None
    data.settings = {"depth": [400], "at": torch.arange(3)}
    return data


def both(rank, data, method, src, hops):
    here = rank == src
    graph = partition(data if here else None, method=method if here else None, src=src, hops=hops)
    expected = partition(data, method=method, hops=hops)
    return differences(graph, expected), graph.method == expected.method


@pytest.mark.parametrize("ranks", WORLDS)
def test_from_any_rank(worlds, ranks):
    data = rich()
    data.weight = data.weight.detach()  # the pool sends only leaves
    idle = split_by("a rank owns nothing", data.num_nodes, ranks)
    ways = ["metis", "rcb", "random", None, idle, idle.to(torch.uint8)]
    for src, method in enumerate((ways * 2)[ranks:][:ranks]):
        hops = 1 + src % 2
        assert worlds.run(ranks, both, data, method, src, hops) == [([], True)] * ranks


@pytest.mark.parametrize("ranks", WORLDS)
def test_with_types_from_any_rank(worlds, ranks):
    data = typed()
    for src in range(ranks):
        method = owners(data, WAYS[src % 3], ranks)
        assert worlds.run(ranks, both, data, method, src, 1) == [([], True)] * ranks


NO_EDGES = torch.zeros(2, 0, dtype=torch.int64)
SMALL = {
    "no nodes": Data(x=torch.rand(0, 1), edge_index=NO_EDGES),
    "no edges": Data(x=torch.rand(7, 1), edge_index=NO_EDGES, edge_attr=torch.rand(0, 3)),
    "a loop": Data(edge_index=torch.zeros(2, 1, dtype=torch.int64), num_nodes=1),
}


def small_ones(rank, graphs):
    return [both(rank, data, "block", 1, 1) for data in graphs]


def test_graphs_of_almost_nothing(worlds):
    assert worlds.run(3, small_ones, list(SMALL.values())) == [[([], True)] * 3] * 3


def of_the_graph(rank):
    """A view of much; something that requires a gradient; in a group of some ranks."""
    group = torch.distributed.new_group([2, 1])
    if rank == 0:
        return None
    data = Data(edge_index=torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
    data.part = torch.arange(1e6).view(-1, 4)[7:8]
    data.weight = torch.ones(1, 2, requires_grad=True) * 2
    here = group.rank() == 0  # rank 2 of the world
    with varcomm.debug(), varcomm.trace() as calls:
        graph = partition(data if here else None, group, "block" if here else None, src=0)
    most = max(call.received for call in calls)
    return most < 10_000, graph.part.tolist(), graph.weight.tolist(), graph.weight.requires_grad


def test_what_belongs_to_the_graph(worlds):
    nobody, *parts = worlds.run(3, of_the_graph)
    assert nobody is None
    assert parts == [(True, [[28.0, 29.0, 30.0, 31.0]], [[2.0, 2.0]], True)] * 2


def ring(**attributes):
    return Data(
        edge_index=torch.tensor([[0, 1, 2], [1, 2, 0]]),
        num_nodes=3,
        x=torch.arange(3.0),
        **attributes,
    )


def refused(rank, given, kind):
    """What all are told; `given` maps names to the arguments of each rank."""
    told = {}
    for name, arguments in given.items():
        data, method, src, *hops = arguments[rank]
        with pytest.raises(kind) as caught:
            partition(data, method=method, src=src, hops=hops[0] if hops else 1)
        told[name] = str(caught.value)
    graph = partition(ring() if rank == 2 else None, method="block" if rank == 2 else None, src=2)
    return told, graph.x.tolist()


def only_on(src, *arguments):
    """What all ranks give where one gives these."""
    return [arguments if rank == src else (None, None, *arguments[2:]) for rank in range(3)]


def with_another(rank, *arguments):
    """One rank gives something else, where rank 0 has the graph."""
    given = only_on(0, ring(), "block", 0)
    given[rank] = arguments
    return given


MUST_BE_NONE = "must be None here, since src=0 says that rank 0 has it."
WRONG = {
    "data on another rank": (
        with_another(2, ring(), None, 0),
        2,
        f"data {MUST_BE_NONE}",
    ),
    "a method on another rank": (with_another(1, None, "block", 0), 1, f"method {MUST_BE_NONE}"),
    "nobody has it": (only_on(0, None, None, 0), 0, "must be a torch_geometric.data.Data or Het"),
    "a wrong graph": (
        only_on(1, ring(face=torch.zeros(3, 1, dtype=torch.int64)), "block", 1),
        1,
        "data.face refers to nodes by their numbers",
    ),
    "an unknown method": (only_on(1, ring(), "magic", 1), 1, "a tensor of ranks, or None; got 'ma"),
    "ranks of other nodes": (
        only_on(2, ring(), torch.zeros(4, dtype=torch.int64), 2),
        2,
        "must hold the rank of each of the 3 nodes as integers; got torch.int64 of shape (4,).",
    ),
    "no such rank": (
        only_on(2, ring(), torch.full((3,), 3), 2),
        2,
        "method spans ranks 3...3, out of range for 3 ranks.",
    ),
    "what a method lacks": (only_on(0, ring(), "rcb", 0), 0, "positions of the nodes in data.pos"),
    "a list of names": (
        only_on(0, ring(names=["a", "b", "c"]), "block", 0),
        0,
        "data.names must be a tensor to be sent from one rank; got list. Make it one, or give data",
    ),
    "an array of dates": (
        only_on(2, ring(days=np.zeros(3, dtype="datetime64[D]")), "block", 2),
        2,
        "data.days must be a tensor to be sent from one rank; got ndarray.",
    ),
    "no such src": (
        only_on(0, ring(), None, 3),
        0,
        "src must be a rank of the group, 0...2; got 3",
    ),
    "a negative src": (only_on(0, ring(), None, -1), 0, "src must be a rank of the group, 0...2"),
    "half a rank": (only_on(0, ring(), None, 0.5), 0, "src must be a rank of the group, 0...2"),
    "a flag for src": (only_on(0, ring(), None, True), 0, "src must be a rank of the group, 0...2"),
    "no hops": (only_on(0, ring(), None, 0, 0), 0, "hops must be a positive integer; got 0."),
    "hops with types": (
        only_on(1, typed(), owners(typed(), "by chance", 3), 1, 2),
        1,
        "hops=2 is for graphs with one type of nodes; in others, layers exchange one by one.",
    ),
    "ranks by no type": (
        only_on(1, typed(), torch.zeros(3, dtype=torch.int64), 1),
        1,
        "method, if no name, must be ranks by type of node, ['author', 'paper', 'venue', "
        "'editor', 'reader']; got Tensor.",
    ),
}


def test_all_say_what_is_wrong_with_one(worlds):
    given = {name: arguments for name, (arguments, *_) in WRONG.items()}
    told, x = zip(*worlds.run(3, refused, given, ArgumentError), strict=True)
    assert told[0] == told[1] == told[2]
    for name, (_, rank, message) in WRONG.items():
        assert told[0][name].startswith(f"graph.partition: refused on rank {rank} of 3"), name
        assert message in told[0][name], (name, told[0][name])
    assert list(x) == [[0.0], [1.0], [2.0]]


def test_ranks_that_differ_in_src_or_hops(worlds):
    given = {
        "src": with_another(1, ring(), "block", 1),
        "no src": [(ring(), "block", None), (None, None, 0), (None, None, 0)],
        "src of one": with_another(2, ring(), "block", None),
        "hops": with_another(2, None, None, 0, 2),
    }
    told, x = zip(*worlds.run(3, refused, given, DisagreementError), strict=True)
    message = "graph.partition: ranks differ in src or hops: rank 0 has "
    messages = {
        "src": f"{message}src=0 and hops=1, rank 1 has src=1 and hops=1.",
        "no src": f"{message}src=None and hops=1, rank 1 has src=0 and hops=1.",
        "src of one": f"{message}src=0 and hops=1, rank 2 has src=None and hops=1.",
        "hops": f"{message}src=0 and hops=1, rank 2 has src=0 and hops=2.",
    }
    assert list(told) == [messages] * 3
    assert list(x) == [[0.0], [1.0], [2.0]]


def numbers_of_any_library(rank):
    src, hops = (np.int64(1), np.int32(2)) if rank == 0 else (1, 2)
    graph = partition(
        ring() if rank == 1 else None, method="block" if rank == 1 else None, src=src, hops=hops
    )
    return graph.x.tolist(), graph.hops


def test_src_and_hops_are_integers_of_any_library(worlds):
    assert worlds.run(2, numbers_of_any_library) == [([0.0, 1.0], 2), ([2.0], 2)]


def unpicklable(rank):
    data = ring(scale=1.0, rule=lambda x: x) if rank == 0 else None
    with pytest.raises(ArgumentError) as caught:
        partition(data, method="block" if rank == 0 else None, src=0)
    return str(caught.value), partition(ring(), method="block").x.tolist()


def test_something_of_the_graph_that_cannot_be_sent(worlds):
    """It was an error on this rank alone, and the others waited."""
    (told, first), (other, second) = worlds.run(2, unpicklable)
    assert told == other
    assert told.startswith("graph.partition: refused on rank 0 of 2: data.rule cannot be sent from")
    assert told.endswith("Give data to all ranks, or remove it: del data.rule.")
    assert first + second == [0.0, 1.0, 2.0]
