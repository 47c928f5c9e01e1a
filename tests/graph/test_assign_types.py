"""Graphs of several types of nodes, which are split together."""

import re

import pytest
import torch
from torch_geometric.data import Data, HeteroData

from tests.graph.graphs import grid
from varcomm import ArgumentError
from varcomm.graph import assign
from varcomm.graph.partitioners.assign import METHODS, method_used

DICT = "must be a dict with the weights of each of ['a', 'b']; got "
TO, BACK, WITHIN = ("a", "to", "b"), ("b", "back", "a"), ("b", "near", "b")


def two_types(rows=12, columns=10):
    """A grid of which some nodes are of one type, and all others of another; and the grid."""
    whole = grid(rows, columns)
    is_b = torch.arange(whole.num_nodes) % 10 < 3
    data = HeteroData()
    number = torch.where(is_b, is_b.cumsum(0), (~is_b).cumsum(0)) - 1
    data["a"].pos, data["b"].pos = whole.pos[~is_b], whole.pos[is_b]
    source, target = whole.edge_index
    numbered = number[whole.edge_index]
    kinds = {
        ("a", "near", "a"): ~is_b[source] & ~is_b[target],
        TO: ~is_b[source] & is_b[target],
        BACK: is_b[source] & ~is_b[target],
        WITHIN: is_b[source] & is_b[target],
    }
    for kind, edges in kinds.items():
        data[kind].edge_index = numbered[:, edges]
    # the same as one type, its nodes in the order of the types
    order = torch.cat([torch.nonzero(~is_b), torch.nonzero(is_b)]).view(-1)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    edges = [place[whole.edge_index[:, edges]] for edges in kinds.values()]
    return data, Data(pos=whole.pos[order], edge_index=torch.cat(edges, dim=1))


@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("method", [m for m in METHODS if m != "block"])
def test_types_are_split_together(method, parts):
    data, as_one = two_types()
    owner = assign(data, parts, method)
    assert list(owner) == ["a", "b"]
    assert [len(owner[kind]) for kind in owner] == [data["a"].num_nodes, data["b"].num_nodes]
    assert torch.equal(torch.cat(list(owner.values())), assign(as_one, parts, method))


@pytest.mark.parametrize("method", ["metis", "kahip", "rcb", "hilbert"])
def test_weights_of_types(method):
    data, as_one = two_types()
    nodes = {kind: torch.randint(0, 9, (data[kind].num_nodes,)) for kind in data.node_types}
    weights = {"node_weight": nodes}
    joined = {"node_weight": torch.cat(list(nodes.values()))}
    if method in ("metis", "kahip"):
        edges = {kind: torch.randint(0, 9, (data[kind].num_edges,)) for kind in data.edge_types}
        weights["edge_weight"] = edges
        joined["edge_weight"] = torch.cat(list(edges.values()))
    owner = assign(data, 4, method, **weights)
    assert torch.equal(torch.cat(list(owner.values())), assign(as_one, 4, method, **joined))


def test_blocks_split_each_type():
    data, _ = two_types()
    owner = assign(data, 5, "block")
    for kind in ("a", "b"):
        assert torch.equal(owner[kind], assign(Data(pos=data[kind].pos), 5, "block"))
    weight = {"a": torch.arange(84), "b": torch.ones(36).int()}
    owner = assign(data, 5, "block", node_weight=weight)
    lone = assign(Data(pos=data["a"].pos), 5, "block", node_weight=weight["a"])
    assert torch.equal(owner["a"], lone)
    assert torch.bincount(owner["b"]).tolist() == [8, 7, 7, 7, 7]


def test_types_of_other_widths_and_none_at_all():
    data = HeteroData()
    data["a"].pos = torch.rand(5, 2, dtype=torch.float64)
    data["b"].pos = torch.rand(0, 2)
    data["c"].pos = torch.rand(4, 2)
    for method in METHODS:
        if method in ("metis", "kahip"):
            data["a", "to", "c"].edge_index = torch.tensor([[0, 1, 4], [3, 2, 0]])
        owner = assign(data, 3, method)
        assert {kind: len(ranks) for kind, ranks in owner.items()} == {"a": 5, "b": 0, "c": 4}
        assert torch.cat(list(owner.values())).max() < 3


def test_the_default(monkeypatch):
    data, _ = two_types()
    assert method_used(data, 3, None) == "metis"
    assert method_used(data, 120, None) == "block"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert method_used(data, 3, None) == "rcb"
    del data["b"].pos
    data["b"].num_nodes = 36
    assert method_used(data, 3, None) == "block"
    assert torch.equal(assign(data, 3)["b"], torch.arange(3).repeat_interleave(12))


def test_types_without_edges():
    data = HeteroData()
    data["a"].pos, data["b"].pos = torch.rand(6, 2), torch.rand(5, 2)
    assert method_used(data, 2, None) == "rcb"
    owner = assign(data, 2, "metis", edge_weight={})
    assert torch.bincount(torch.cat(list(owner.values()))).tolist() in ([5, 6], [6, 5])


def test_no_types():
    with pytest.raises(ArgumentError, match=r"data has no node types\."):
        assign(HeteroData(), 2)


def without(kind, key):
    data, _ = two_types()
    data[kind].num_nodes = data[kind].num_nodes
    del data[kind][key]
    return data


def with_edges(kind, edge_index):
    data, _ = two_types()
    data[kind].edge_index = edge_index
    return data


def with_wider_positions():
    data, _ = two_types()
    data["b"].pos = torch.rand(36, 3)
    return data


@pytest.mark.parametrize(
    ("data", "method", "message"),
    [
        (without("b", "pos"), "rcb", "needs the positions of the nodes in data['b'].pos."),
        (without("a", "pos"), "hilbert", "needs the positions of the nodes in data['a'].pos."),
        (with_wider_positions(), "rcb", "positions of shapes (84, 2), (36, 3)."),
        (
            with_edges(TO, None),
            "metis",
            "needs data[('a', 'to', 'b')].edge_index, a tensor of torch.int64.",
        ),
        (
            with_edges(TO, torch.tensor([[83], [36]])),
            "metis",
            "data[('a', 'to', 'b')].edge_index spans 36...36, out of range for the 36 nodes of "
            "data['b'].",
        ),
        (
            with_edges(("a", "to", "nobody"), torch.tensor([[0], [0]])),
            "kahip",
            "spans 0...0, out of range for the 0 nodes of data['nobody'].",
        ),
    ],
)
def test_types_that_will_not_do(data, method, message):
    with pytest.raises(ArgumentError, match=re.escape(message)):
        assign(data, 2, method)


def test_a_type_of_unknown_size():
    data = HeteroData()
    data["a"].pos = torch.rand(3, 2)
    data["b"].name = "nobody knows how many"
    with (
        pytest.warns(UserWarning, match="num_nodes"),
        pytest.raises(ArgumentError, match=r"data\['b'\] does not tell how many nodes it has"),
    ):
        assign(data, 2, "block")


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (
            torch.ones(120).int(),
            "must be a dict with the weights of each of ['a', 'b']; got Tensor",
        ),
        (
            {"a": torch.ones(84).int()},
            "must be a dict with the weights of each of ['a', 'b']; got [",
        ),
        (
            {"a": torch.ones(84).int(), "b": torch.ones(84).int()},
            "['b'] must hold an integer for each of the 36 nodes; got torch.int32 of shape (84,).",
        ),
    ],
)
def test_weights_that_will_not_do(weight, message):
    data, _ = two_types()
    with pytest.raises(ArgumentError, match="node_weight" + " ?" + re.escape(message)):
        assign(data, 2, "block", node_weight=weight)
