"""Each way to say which rank owns which node."""

import builtins
import importlib.util
import re

import pytest
import torch
from torch_geometric.data import Data

from tests.graph.graphs import grid, wild
from varcomm import ArgumentError, MissingPackageError
from varcomm.graph import assign

METHODS = ("metis", "kahip", "rcb", "hilbert", "block", "random")
PARTS = (1, 2, 3, 5, 8)
EDGES = torch.tensor([[0, 1, 2], [1, 2, 0]])


def empty(nodes):
    return Data(
        edge_index=torch.zeros(2, 0, dtype=torch.int64),
        pos=torch.arange(2.0 * nodes).view(nodes, 2),
        num_nodes=nodes,
    )


GRAPHS = {
    "wild": wild(),
    "grid": grid(20, 30),
    "only self loops": Data(
        edge_index=torch.arange(6).repeat(2, 2), pos=torch.zeros(6, 2), num_nodes=6
    ),
    "no edges": empty(9),
    "fewer nodes than ranks": empty(2),
    "one node": empty(1),
    "no nodes": empty(0),
}


def counts(owner, parts):
    return torch.bincount(owner, minlength=parts)


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("method", METHODS)
def test_every_node_has_a_rank_always_the_same(method, graph, parts):
    data = GRAPHS[graph]
    owner = assign(data, parts, method)
    assert (owner.dtype, owner.shape) == (torch.int64, (data.num_nodes,))
    assert len(counts(owner, parts)) == parts, "a rank is out of range"
    assert torch.equal(owner, assign(data.clone(), parts, method))


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("method", ["rcb", "hilbert", "block"])
def test_parts_differ_by_one_node(method, graph, parts):
    many = counts(assign(GRAPHS[graph], parts, method), parts)
    assert many.max() - many.min() <= 1


@pytest.mark.parametrize("method", ["metis", "kahip"])
@pytest.mark.parametrize("parts", PARTS)
def test_few_edges_are_cut_and_parts_are_even(parts, method):
    data = grid(40, 50)
    owner = assign(data, parts, method)
    assert counts(owner, parts).max() <= 1.05 * data.num_nodes / parts
    source, target = owner[data.edge_index]
    # strips of the grid, the simplest partition there is, cut 40 edges at each border
    assert int((source != target).sum()) <= 40 * (parts - 1) * 1.5
    assert counts(owner, parts).min() > 0


def test_blocks_keep_the_order():
    assert assign(empty(7), 3, "block").tolist() == [0, 0, 0, 1, 1, 2, 2]


def test_bisection_cuts_across_the_widest_extent():
    wide = assign(grid(2, 6), 2, "rcb").view(2, 6)
    assert wide.tolist() == [[0, 0, 0, 1, 1, 1]] * 2
    thirds = assign(grid(9, 2), 3, "rcb").view(9, 2)
    assert thirds.tolist() == [[0, 0]] * 3 + [[1, 1]] * 3 + [[2, 2]] * 3


def test_random_uses_all_ranks():
    many = counts(assign(empty(3000), 5, "random"), 5)
    assert many.min() > 500
    assert many.max() < 700


@pytest.mark.parametrize("method", ["metis", "kahip"])
def test_a_directed_graph_is_seen_as_undirected(method):
    data = grid(10, 10)
    both = Data(edge_index=torch.cat([data.edge_index, data.edge_index.flip(0)], 1), num_nodes=100)
    assert torch.equal(assign(data, 4, method), assign(both, 4, method))


@pytest.mark.parametrize("method", ["metis", "kahip"])
def test_neither_self_loops_nor_multi_edges_are_seen(method):
    data = wild()
    plain = data.edge_index[:, data.edge_index[0] != data.edge_index[1]].unique(dim=1)
    plain = Data(edge_index=plain, num_nodes=data.num_nodes)
    assert torch.equal(assign(data, 3, method), assign(plain, 3, method))


def test_the_default_is_what_there_is(monkeypatch):
    data = grid(6, 5)
    assert torch.equal(assign(data, 3), assign(data, 3, "metis"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert torch.equal(assign(data, 3), assign(data, 3, "rcb"))
    del data.pos
    data.num_nodes = 30
    assert torch.equal(assign(data, 3), assign(data, 3, "block"))


@pytest.mark.parametrize("parts", [1, 3])
def test_the_default_of_positions_without_edges(parts):
    data = Data(pos=torch.rand(12, 2))
    assert torch.equal(assign(data, parts), assign(data, parts, "rcb"))
    assert torch.equal(assign(Data(num_nodes=12), parts), assign(data, parts, "block"))


@pytest.mark.parametrize(
    ("method", "package", "extra"),
    [("metis", "pymetis", "partition"), ("kahip", "kahip", "kahip")],
)
def test_without_the_package(monkeypatch, method, package, extra):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == package:
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    message = rf'method="{method}" needs {package}: pip install "varcomm\[{extra}\]"'
    with pytest.raises(MissingPackageError, match=message):
        assign(grid(3, 3), 2, method)


def test_unknown_method():
    names = "metis, kahip, rcb, hilbert, block, random"
    with pytest.raises(ArgumentError, match=rf"must be one of {names}, or None; got 'scotch'\."):
        assign(grid(3, 3), 2, "scotch")


def test_what_is_no_graph():
    with pytest.raises(ArgumentError, match="data must be a Data or a HeteroData; got dict"):
        assign({"edge_index": EDGES}, 2)


def test_a_graph_of_unknown_size():
    with (
        pytest.warns(UserWarning, match="num_nodes"),
        pytest.raises(
            ArgumentError, match=r"data does not tell how many nodes it has: set num_nodes\."
        ),
    ):
        assign(Data(), 2, "block")


@pytest.mark.parametrize("method", ["metis", "kahip"])
@pytest.mark.parametrize("parts", [1, 2, 9])
@pytest.mark.parametrize(
    ("edge_index", "message"),
    [
        (None, "needs data.edge_index, a tensor of torch.int64."),
        (EDGES.int(), "needs data.edge_index, a tensor of torch.int64."),
        (EDGES.T.contiguous(), "data.edge_index must have shape (2, E); got (3, 2)."),
        (EDGES[0], "data.edge_index must have shape (2, E); got (3,)."),
        (EDGES + 2, "data.edge_index spans 2...4, out of range for the 4 nodes of data."),
        (EDGES - 1, "data.edge_index spans -1...1, out of range for the 4 nodes of data."),
    ],
)
def test_edges_that_will_not_do(method, parts, edge_index, message):
    """Whatever is out of range would be read out of bounds by the packages."""
    with pytest.raises(ArgumentError, match=re.escape(message)):
        assign(Data(edge_index=edge_index, num_nodes=4), parts, method)


@pytest.mark.parametrize("parts", [0, -1, 2.0, True])
def test_parts_must_be_a_positive_integer(parts):
    with pytest.raises(ArgumentError, match=rf"parts must be a positive integer; got {parts!r}"):
        assign(grid(3, 3), parts, "block")
