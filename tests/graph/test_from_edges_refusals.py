"""What ``from_edges`` refuses: one message on every rank, and then the ranks still work."""

import numpy as np
import pytest
import torch

from varcomm import ArgumentError, DisagreementError, GroupError
from varcomm.graph import from_edges

RANKS = 3
SIZES = (2, 1, 3)
EDGES = torch.tensor([[0, 5, 2], [1, 2, 4]])


def right(rank):
    """What each rank gives; three edges, six nodes."""
    return {
        "edge_index": EDGES,
        "sizes": SIZES,
        "node_attrs": {"x": torch.arange(2.0 * SIZES[rank]).view(SIZES[rank], 2)},
        "edge_attrs": {"weight": torch.arange(3)},
        "method": torch.zeros(SIZES[rank], dtype=torch.int64),
    }


def numbers(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


def of_nodes(**attributes):
    return {"node_attrs": attributes}


def of_edges(**attributes):
    return {"edge_attrs": attributes}


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


# What the rank in the middle gives in place of what is right, which speaks for one node; and what
# all are told.
WRONG = {
    "no hops": ({"hops": 0}, "hops must be a positive integer; got 0."),
    "half a hop": ({"hops": 1.5}, "hops must be a positive integer; got 1.5."),
    "a flag for hops": ({"hops": True}, "hops must be a positive integer; got True."),
    "one size": ({"sizes": 6}, "sizes must be a list or tuple of ints, one a rank; got 6."),
    "sizes of two": ({"sizes": [3, 3]}, "sizes must have one entry a rank, 3; got 2: [3, 3]."),
    "a negative size": ({"sizes": [7, -1, 0]}, "sizes must not be negative; got [7, -1, 0]."),
    "half a node": ({"sizes": [2, 1, 3.0]}, "sizes must hold ints; got [2, 1, 3.0]"),
    "edges as lists": (
        {"edge_index": EDGES.tolist()},
        "edge_index must be a tensor of torch.int64; got list.",
    ),
    "edges of numpy": ({"edge_index": EDGES.numpy()}, "of torch.int64; got ndarray."),
    "no edges": ({"edge_index": None}, "edge_index must be a tensor of torch.int64; got NoneType."),
    "edges of int32": ({"edge_index": EDGES.int()}, "got torch.int32 of shape (2, 3)."),
    "nothing, of floats": (
        {"edge_index": torch.empty(2, 0), "edge_attrs": None},
        "got torch.float32 of shape (2, 0). Give an empty one its dtype.",
    ),
    "edges as rows": (
        {"edge_index": EDGES.T},
        "edge_index must have shape (2, E); got (3, 2).",
    ),
    "a matrix": ({"edge_index": torch.eye(6).long().to_sparse()}, "edge_index must be dense"),
    "an edge from no node": (
        {"edge_index": EDGES + numbers([1], [0])},
        "edge_index[0] spans 1...6, out of range for 6 nodes.",
    ),
    "an edge to no node": (
        {"edge_index": EDGES - numbers([0], [2])},
        "edge_index[1] spans -1...2, out of range for 6 nodes.",
    ),
    "ids as a list": ({"node_ids": [2]}, "node_ids must be a torch.Tensor; got list."),
    "ids as floats": (
        {"node_ids": torch.ones(1)},
        "node_ids must be of torch.int64 or torch.int32; got torch.float32.",
    ),
    "ids in a table": (
        {"node_ids": numbers([2])},
        "node_ids must have one dimension; got shape (1, 1).",
    ),
    "ids of no node": (
        {"node_ids": numbers(2, 6)},
        "node_ids spans 2...6, out of range for 6 nodes.",
    ),
    "ids elsewhere": (
        {"node_ids": meta(1, dtype=torch.int64)},
        "node_ids is on meta, and edge_index on cpu.",
    ),
    "attributes without names": (
        {"node_attrs": [torch.ones(1)]},
        "node_attrs must be a mapping from names to tensors; got list.",
    ),
    "a list of values": (
        of_nodes(x=[1.0]),
        "node_attrs['x'] must be a tensor with a row for each of the 1 nodes that this rank "
        "brings; got list.",
    ),
    "rows for another rank": (of_nodes(x=torch.ones(2, 2)), "got torch.float32 of shape (2, 2)."),
    "no rows at all": (of_nodes(x=torch.tensor(1.0)), "got torch.float32 of shape ()."),
    "rows for ids": (
        {"node_ids": numbers(0, 1, 2, 3, 4, 5)},
        "node_attrs['x'] must be a tensor with a row for each of the 6 nodes",
    ),
    "rows for other edges": (
        of_edges(weight=torch.ones(2)),
        "edge_attrs['weight'] must be a tensor with a row for each of the 3 edges that this rank "
        "brings; got torch.float32 of shape (2,).",
    ),
    "a number for a name": (
        {"node_attrs": {3: torch.ones(1)}},
        "node_attrs: names of attributes must be str; got 3.",
    ),
    "numbers of nodes": (
        of_edges(next_index=torch.ones(3, dtype=torch.int64)),
        "edge_attrs.next_index refers to nodes by their numbers, which change.",
    ),
    "a name of the graph's own": (
        of_nodes(sizes=torch.ones(1)),
        "node_attrs.sizes could not be reached: graph.sizes of a PartitionedGraph is its own.",
    ),
    "what Data counts": (of_nodes(num_nodes=torch.ones(1)), "node_attrs.num_nodes could not be"),
    "a name that hides": (of_edges(_w=torch.ones(3)), "edge_attrs._w could not be reached"),
    "sparse rows": (
        of_nodes(x=torch.eye(1).to_sparse()),
        "node_attrs['x'] must be dense; got torch.sparse_coo of torch.float32. Convert it",
    ),
    "nodes elsewhere": (of_nodes(x=meta(1, 2)), "node_attrs['x'] is on meta, and edge_index on"),
    "edges elsewhere": (of_edges(weight=meta(3)), "edge_attrs['weight'] is on meta, and edge_in"),
    "another method": (
        {"method": "metis"},
        "method must be one of block, hilbert, rcb, a tensor of ranks, or None; got metis. The "
        "others of graph.assign need the whole graph.",
    ),
    "a list for a method": ({"method": [0]}, "a tensor of ranks, or None; got list."),
    "numpy for a method": ({"method": np.zeros(1, int)}, "a tensor of ranks, or None; got ndarray"),
    "ranks of all nodes": (
        {"method": torch.zeros(6, dtype=torch.int64)},
        "method, if no name, must hold the rank of each of the 1 nodes that this rank speaks for, "
        "as integers; got torch.int64 of shape (6,).",
    ),
    "ranks as floats": ({"method": torch.zeros(1)}, "as integers; got torch.float32 of shape (1,)"),
    "ranks as a mask": ({"method": torch.zeros(1) > 0}, "as integers; got torch.bool of shape"),
    "no such rank": ({"method": numbers(3)}, "method spans ranks 3...3, out of range for 3 ranks."),
    "a negative rank": ({"method": numbers(-1)}, "method spans ranks -1...-1, out of range"),
    "ranks elsewhere": (
        {"method": meta(1, dtype=torch.int64)},
        "method is on meta, and edge_index on cpu.",
    ),
}

DIFFERENT = {
    "sizes": (
        {"sizes": (3, 1, 2)},
        "graph.from_edges: ranks differ in sizes: rank 0 has (2, 1, 3), rank 1 has (3, 1, 2).",
    ),
    "methods": (
        {"method": None},
        "graph.from_edges: ranks differ in method: rank 0 has 'the ranks given', rank 1 has "
        "'block'.",
    ),
    "hops": ({"hops": 2}, "graph.from_edges: ranks differ in hops: rank 0 has 1, rank 1 has 2."),
    "ids": (
        {"node_ids": numbers(2)},
        "graph.from_edges: ranks differ in use of node_ids: rank 0 has False, rank 1 has True.",
    ),
    "dtypes": (
        of_nodes(x=torch.ones(1, 2, dtype=torch.float64)),
        "graph.from_edges: node_attrs['x'] is torch.float32 of shape (n, 2) on rank 0 and "
        "torch.float64 of shape (n, 2) on rank 1.",
    ),
    "shapes": (
        of_edges(weight=torch.arange(3)[:, None]),
        "graph.from_edges: edge_attrs['weight'] is torch.int64 of shape (n) on rank 0 and "
        "torch.int64 of shape (n, 1) on rank 1.",
    ),
    "names": (
        of_nodes(y=torch.ones(1, 2)),
        "graph.from_edges: rank 0 brings 2 rows without node_attrs['y'], which rank 1 has.",
    ),
    "one too few": (
        {"edge_attrs": None},
        "graph.from_edges: rank 1 brings 3 rows without edge_attrs['weight'], which rank 0 has.",
    ),
    "no attributes": (
        {"node_attrs": {}},
        "graph.from_edges: rank 1 brings 1 rows without node_attrs['x'], which rank 0 has.",
    ),
}


def messages(rank, given, kind):
    """What each of the cases says, where all but the rank in the middle are right."""
    told = {}
    for name, wrong in given.items():
        with pytest.raises(kind) as caught:
            from_edges(**right(rank) | (wrong if rank == 1 else {}))
        told[name] = str(caught.value)
    return told, still_working(rank)


def still_working(rank):
    graph = from_edges(**right(rank))
    return graph.num_nodes, graph.num_edges, int(graph.weight.sum() if rank == 0 else 0)


WORKING = [(6, 9, 9), (0, 0, 0), (0, 0, 0)]


def test_one_rank_is_wrong_and_all_say_so(worlds):
    given = {name: wrong for name, (wrong, _) in WRONG.items()}
    told, working = zip(*worlds.run(RANKS, messages, given, ArgumentError), strict=True)
    assert told[0] == told[1] == told[2]
    for name, (_, message) in WRONG.items():
        assert told[0][name].startswith("graph.from_edges: refused on rank 1 of 3: "), name
        assert message in told[0][name], (name, told[0][name])
    assert list(working) == WORKING


def test_ranks_that_differ(worlds):
    given = {name: wrong for name, (wrong, _) in DIFFERENT.items()}
    told, working = zip(*worlds.run(RANKS, messages, given, DisagreementError), strict=True)
    assert told[0] == told[1] == told[2]
    assert told[0] == {name: message for name, (_, message) in DIFFERENT.items()}
    assert list(working) == WORKING


def elsewhere(rank):
    with pytest.raises(GroupError) as caught:
        from_edges(**right(rank) | ({"edge_index": EDGES.to("meta")} if rank == 1 else {}))
    return str(caught.value), still_working(rank)


def test_edges_where_the_group_does_not_communicate(worlds):
    told, working = zip(*worlds.run(RANKS, elsewhere), strict=True)
    assert told[0] == told[1] == told[2]
    assert "the tensor is on meta, but this group has an engine for cpu and cuda only" in told[0]
    assert list(working) == WORKING


def named_wrongly(rank, ids, attributes):
    with pytest.raises(DisagreementError) as caught:
        from_edges(EDGES[:, :0], SIZES, node_ids=ids[rank], node_attrs=attributes)
    return str(caught.value), still_working(rank)


@pytest.mark.parametrize(
    ("ids", "rank", "message"),
    [
        ([(0, 1, 2), (3,), (5,)], 2, "node 4 was named 0 times."),
        ([(0, 1, 2), (3, 1), (4, 5)], 0, "node 1 was named 2 times."),
        ([(0, 1, 2), (), (2, 3, 4, 5, 2)], 1, "node 2 was named 3 times."),
        ([(), (), ()], 0, "node 0 was named 0 times."),
    ],
)
def test_nodes_named_never_or_twice(worlds, ids, rank, message):
    tensors = [torch.tensor(some, dtype=torch.int64) for some in ids]
    told, working = zip(*worlds.run(RANKS, named_wrongly, tensors, None), strict=True)
    assert told[0] == told[1] == told[2]
    assert told[0].startswith(f"graph.from_edges: refused on rank {rank} of 3")
    assert "node_ids must name each node once, on all ranks together; " + message in told[0]
    assert list(working) == WORKING


def collide(rank):
    """No rank has both, so none can tell alone."""
    of_this = {"node_attrs": {"w": torch.ones(1)}} if rank == 1 else {}
    of_that = {"edge_attrs": {"w": torch.ones(3)}} if rank == 0 else {}
    edges = torch.zeros(2, 3 if rank == 0 else 0, dtype=torch.int64)
    with pytest.raises(ArgumentError) as caught:
        from_edges(edges, (0, 1, 0), **of_this, **of_that)
    return str(caught.value), still_working(rank)


def test_a_name_for_nodes_and_for_edges(worlds):
    told, working = zip(*worlds.run(RANKS, collide), strict=True)
    message = "'w' is in node_attrs and in edge_attrs: graph.w could be either. Rename one."
    assert list(told) == [f"graph.from_edges: {message}"] * 3
    assert list(working) == WORKING


def numbers_of_any_library(rank):
    """Integers of numpy are integers; ranks without rows need not name attributes."""
    graph = from_edges(
        EDGES if rank == 0 else EDGES[:, :0],
        np.array(SIZES),
        edge_attrs={"weight": torch.arange(3)} if rank == 0 else None,
        node_ids=torch.arange(6, dtype=torch.int32) if rank == 2 else torch.empty(0).int(),
        node_attrs={"x": torch.arange(6.0)} if rank == 2 else {},
        hops=np.int64(1) if rank == 0 else 1,
    )
    return graph.x.tolist(), graph.weight.tolist(), graph.hops


def test_what_is_not_refused(worlds):
    assert worlds.run(RANKS, numbers_of_any_library) == [
        ([0.0, 1.0], [0], 1),
        ([2.0], [1], 1),
        ([3.0, 4.0, 5.0], [2], 1),
    ]
