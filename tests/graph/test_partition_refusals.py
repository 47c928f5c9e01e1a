"""What ``partition`` refuses, on every rank with one message though one rank is wrong."""

import math
import re
import sys
from collections import defaultdict
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from tests.graph.graphs import wild
from varcomm import ArgumentError, DisagreementError, MissingPackageError
from varcomm.graph import partition

EDGES = torch.tensor([[0, 1, 2], [1, 2, 0]])


def owner(*ranks, dtype=torch.int64):
    return torch.tensor(ranks, dtype=dtype)


def ring(**attributes):
    return Data(num_nodes=3, **({"edge_index": EDGES} | attributes))


X = torch.zeros(3, 1)


def known(**attributes):
    return ring(**({"x": X} | attributes))


# what one of the ranks passes, and what all of them are told
WRONG = {
    "no Data": (([EDGES], None), "must be a torch_geometric.data.Data or HeteroData; got list."),
    "no edges": ((Data(num_nodes=3), None), "must be a tensor of torch.int64; got NoneType."),
    "edges of int32": (
        (ring(edge_index=EDGES.int()), None),
        "must be a tensor of torch.int64; got torch.int32 of shape (2, 3).",
    ),
    "edges as rows": (
        (ring(edge_index=EDGES.T.contiguous()), None),
        "must have shape (2, E); got (3, 2).",
    ),
    "one row of edges": ((ring(edge_index=EDGES[0]), None), "must have shape (2, E); got (3,)."),
    "an edge to no node": (
        (ring(edge_index=EDGES + 1), None),
        "edge_index[0] spans 1...3, out of range for 3 nodes.",
    ),
    "an edge from no node": (
        (ring(edge_index=EDGES - 1), None),
        "edge_index[0] spans -1...1, out of range for 3 nodes.",
    ),
    "faces": (
        (ring(face=torch.zeros(3, 1, dtype=torch.int64)), None),
        "data.face refers to nodes by their numbers, which change. Remove it: del data.face.",
    ),
    "a batch's ptr": (
        (ring(ptr=torch.tensor([0, 3])), None),
        "data.ptr refers to nodes by their numbers",
    ),
    "another index": (
        (ring(edge_label_index=EDGES), None),
        "data.edge_label_index refers to nodes by their numbers",
    ),
    "numbers of training nodes": (
        (ring(train_idx=torch.tensor([0, 1])), None),
        "data.train_idx refers to nodes by their numbers",
    ),
    "an index in numpy": (
        (ring(my_index=np.arange(2)), None),
        "data.my_index refers to nodes by their numbers",
    ),
    "a list of numbers": ((ring(index=[0, 2]), None), "data.index refers to nodes by their"),
    "a dense matrix": ((ring(adj=torch.ones(3, 3)), None), "data.adj refers to nodes by their"),
    "a name of the graph's own": (
        (ring(mean=torch.zeros(3)), None),
        "data.mean could not be reached: graph.mean of a PartitionedGraph is its own. Rename it: "
        "data.my_mean = data.mean; del data.mean.",
    ),
    "a field of the graph": ((ring(method="euler"), None), "data.method could not be reached"),
    "an array of floats": (
        (ring(), np.zeros(3)),
        "must hold the rank of each of the 3 nodes as integers; got torch.float64 of shape (3,).",
    ),
    "an array of objects": ((ring(), np.array([None] * 3)), "as integers; got torch.float64"),
    "an unknown method": (
        (ring(), "scotch"),
        "must be one of metis, kahip, rcb, hilbert, block, random, a tensor of ranks, or None; got "
        "'scotch'.",
    ),
    "too few ranks of nodes": (
        (ring(), owner(0, 1)),
        "must hold the rank of each of the 3 nodes as integers; got torch.int64 of shape (2,).",
    ),
    "ranks of nodes as floats": (
        (ring(), owner(0, 1, 0, dtype=torch.float32)),
        "as integers; got torch.float32 of shape (3,).",
    ),
    "a mask in place of ranks": (
        (ring(), owner(0, 1, 0, dtype=torch.bool)),
        "as integers; got torch.bool of shape (3,).",
    ),
    "a rank that is not there": (
        (ring(), owner(0, 1, 3)),
        "method spans ranks 0...3, out of range for 3 ranks.",
    ),
    "a negative rank": ((ring(), owner(0, -1, 0)), "method spans ranks -1...0, out of range"),
}


def message_on(rank, culprit, wrong, right, kind):
    data, method = wrong if rank == culprit else right
    with pytest.raises(kind) as caught:
        partition(data, method=method)
    return str(caught.value)


@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.parametrize("what", WRONG)
def test_one_rank_is_wrong_and_all_say_so(worlds, what, culprit):
    wrong, message = WRONG[what]
    told = worlds.run(3, message_on, culprit, wrong, (ring(), "block"), ArgumentError)
    assert told[0].startswith(f"graph.partition: refused on rank {culprit} of 3: ")
    assert re.search(re.escape(message), told[0])
    assert told == told[:1] * 3


def test_a_world_of_one_is_refused_too(worlds):
    told = worlds.run(1, message_on, 0, (ring(), owner(0, 1, 0)), None, ArgumentError)
    assert "method spans ranks 0...1, out of range for 1 ranks." in told[0]


RIGHT = defaultdict(
    lambda: (known(), "block"),
    {
        "data.scale": (known(scale=1.0), "block"),
        "data.table, data.year": (known(year=1998, table=np.ones((1, 5))), "block"),
    },
)


@pytest.mark.parametrize(
    ("another", "method", "differ"),
    [
        (known(edge_index=EDGES.flip(0)), "block", "data.edge_index"),
        (known(edge_index=EDGES[:, :2]), "block", "data.edge_index"),
        (Data(x=X, edge_index=EDGES, num_nodes=4), "block", "data.num_nodes"),
        (known(x=X + 1), "block", "data.x"),
        (known(x=X.double()), "block", "data.x"),
        (known(x=X.T), "block", "data.x"),
        (ring(), "block", "data.x"),
        (known(name="other", pos=X), "block", "data.name, data.pos"),
        (known(scale=2.0), "block", "data.scale"),
        (known(year=1999, table=np.zeros((1, 5))), "block", "data.table, data.year"),
        (known(), "random", "method"),
        (known(), None, "method"),
        (known(), owner(0, 0, 0), "method"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_ranks_with_different_graphs(worlds, another, method, differ):
    told = worlds.run(3, message_on, 1, (another, method), RIGHT[differ], DisagreementError)
    message = f"ranks [1] have other arguments than rank 0; they differ in {differ}."
    assert told == [f"graph.partition: {message}"] * 3


def test_ranks_with_different_ranks_of_nodes(worlds):
    pair = (ring(), owner(0, 1, 2)), (ring(), owner(0, 1, 1))
    told = worlds.run(3, message_on, 2, *pair, DisagreementError)
    assert all(
        "ranks [2] have other arguments than rank 0; they differ in method." in t for t in told
    )


def dense(x):
    return partition(ring(x=x), method="block").x.shape[0]


def any_dtype(rank, dtype):
    """One entry, of odd strides: what tells attributes apart must see the bytes of any tensor."""
    x = torch.ones(5, 3, dtype=dtype)[::2, :1]
    return dense(x), dense(x.T[:1].expand(1, 3).T)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.complex64, torch.int8])
def test_attributes_of_any_dtype(worlds, dtype):
    assert worlds.run(3, any_dtype, dtype) == [(1, 1)] * 3


def test_bisection_without_positions(worlds):
    wrong = ring(), "rcb"
    told = worlds.run(2, message_on, 0, wrong, wrong, ArgumentError)
    assert all(re.search(r"positions of the nodes in data\.pos", text) for text in told)


def test_bisection_with_positions_of_other_nodes(worlds):
    wrong = ring(pos=torch.zeros(2, 2)), "rcb"
    told = worlds.run(2, message_on, 0, wrong, wrong, ArgumentError)
    assert "data.pos has 2 entries, for neither 3 nodes nor 3 edges." in told[0]
    assert told[0] == told[1]


def without_pymetis_on_first_rank(rank):
    """The first rank assigns; without pymetis there, all raise."""
    kept = {name: module for name, module in sys.modules.items() if name.startswith("pymetis")}
    if rank == 0:
        sys.modules.update(dict.fromkeys(kept, None), pymetis=None)
    try:
        with pytest.raises(MissingPackageError) as caught:
            partition(wild(), method="metis")
    finally:
        if rank == 0:
            del sys.modules["pymetis"]
            sys.modules.update(kept)
    return str(caught.value)


def test_metis_without_pymetis(worlds):
    told = worlds.run(2, without_pymetis_on_first_rank)
    assert "refused on rank 0 of 2" in told[0]
    assert 'pip install "varcomm[partition]"' in told[0]
    assert told[0] == told[1]


def missing_attribute(rank):
    graph = partition(ring(x=torch.zeros(3, 1)), method="block")
    with pytest.raises(AttributeError, match=r"no attribute 'z'; its data have .*edge_index"):
        graph.z  # noqa: B018
    return hasattr(graph, "x"), hasattr(graph, "__z__")


def test_an_attribute_that_the_graph_does_not_have(worlds):
    assert worlds.run(2, missing_attribute) == [(True, False)] * 2


def alike(rank):
    """What is the same on all ranks, though it is not equal to itself, is no disagreement."""
    data = ring(
        x=X, scale=math.nan, table=np.full((1, 5), np.nan), leaf_area_index=torch.rand(3) * 0 + 1
    )
    data.refractive_index, data.index_name, data.is_index = 1.3, "WIND", X[:, 0] > 0
    graph = partition(data, method=np.array([0, 1, 0], dtype=np.uint16))
    assert math.isnan(graph.scale)
    assert graph.index_name == "WIND"
    return graph.leaf_area_index.tolist(), graph.method, tuple(graph.node_sizes)


def test_what_is_not_refused(worlds):
    (first, second) = worlds.run(2, alike)
    assert first == ([1.0, 1.0], "the ranks given", (2, 1))
    assert second == ([1.0], "the ranks given", (2, 1))


@pytest.mark.parametrize("method", ["metis", torch.zeros(3), np.zeros(3)])
def test_a_method_in_place_of_the_group(method):
    message = r"group must be None, .*; got \w+\. How nodes are assigned is said by name: method="
    with pytest.raises(ArgumentError, match=message):
        partition(ring(), method)


def changed(rank):
    graph = partition(ring(x=X), method="block")
    for name in ("x", "method", "other"):
        with pytest.raises(FrozenInstanceError, match=f"cannot change '{name}': .* your own"):
            setattr(graph, name, 1)
    with pytest.raises(FrozenInstanceError, match="cannot change 'x'"):
        del graph.x
    return replace(graph, method="mine").method


def test_the_graph_cannot_be_changed(worlds):
    assert worlds.run(2, changed) == ["mine"] * 2
