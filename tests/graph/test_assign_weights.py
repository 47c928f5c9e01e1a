"""What nodes and edges cost, for METIS and KaHIP above all; and weights that will not do."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.data import Data

from tests.graph.graphs import grid
from varcomm import ArgumentError
from varcomm.graph import assign
from varcomm.graph.partitioners.multilevel import Adjacency

MULTILEVEL = ["metis", "kahip"]


def cut(data, owner):
    source, target = owner[data.edge_index]
    return source != target


@settings(deadline=None, max_examples=100)
@given(
    edges=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 3)), max_size=40),
    weighted=st.booleans(),
)
def test_adjacency_is_the_sum_of_all_edges_in_both_directions(edges, weighted):
    matrix = np.zeros((7, 7), dtype=np.int64)
    for source, target, weight in edges:
        if source != target:
            matrix[source, target] += weight if weighted else 1
            matrix[target, source] += weight if weighted else 1
    source, target, weight = np.array(edges, dtype=np.int64).reshape(-1, 3).T
    before = source.copy(), target.copy(), weight.copy()
    graph = Adjacency.from_edges(source, target, 7, weight if weighted else None)
    assert all(map(np.array_equal, before, (source, target, weight)))
    rows = np.repeat(np.arange(7), np.diff(graph.starts))
    assert np.array_equal(np.stack([rows, graph.neighbours]), np.stack(matrix.nonzero()))
    if weighted:
        assert np.array_equal(graph.weights, matrix[matrix > 0])
    else:
        assert graph.weights is None


@pytest.mark.parametrize("method", MULTILEVEL)
@pytest.mark.parametrize("parts", [4, 9, 16])
def test_the_cut_is_smaller_than_that_of_blocks(method, parts):
    data = grid(30, 30)
    by_blocks = int(cut(data, assign(data, parts, "block")).sum())
    assert int(cut(data, assign(data, parts, method)).sum()) < 0.8 * by_blocks


@pytest.mark.parametrize("method", MULTILEVEL)
@pytest.mark.parametrize("parts", [2, 5])
def test_nodes_are_balanced_by_weight(method, parts):
    data = grid(40, 40)
    weight = torch.where(data.pos[:, 1] < 8, 9, 1)  # a fifth of the nodes has most of the weight
    owner = assign(data, parts, method, node_weight=weight)
    got = torch.zeros(parts, dtype=torch.int64).index_add(0, owner, weight)
    assert int(got.max()) <= 1.04 * int(weight.sum()) / parts
    assert torch.bincount(owner).max() > 1.2 * 1600 / parts, "balanced by number, not by weight"


@pytest.mark.parametrize("method", MULTILEVEL)
def test_edges_that_cost_much_are_not_cut(method):
    """In a grid whose edges along one axis cost much, parts are strips along that axis."""
    data = grid(12, 12)
    source, target = data.edge_index
    across = (target - source) > 1  # to the next row
    for expensive in (across, ~across):
        weight = torch.where(expensive, 100, 1)
        owner = assign(data, 4, method, edge_weight=weight)
        assert not bool((cut(data, owner) & expensive).any())
        assert torch.bincount(owner).tolist() == [36] * 4


@pytest.mark.parametrize("method", MULTILEVEL)
def test_weights_of_both_directions_and_of_all_copies_are_added(method):
    data = grid(9, 9)
    edges, weight = data.edge_index, torch.randint(1, 30, (data.num_edges,))
    parts = [weight // 3, weight // 4, weight - weight // 3 - weight // 4]
    split = Data(edge_index=torch.cat([edges, edges.flip(0), edges], 1), num_nodes=81)
    assert torch.equal(
        assign(data, 3, method, edge_weight=weight),
        assign(split, 3, method, edge_weight=torch.cat(parts)),
    )


@pytest.mark.parametrize("method", MULTILEVEL)
def test_edges_without_weight_are_no_edges(method):
    data = grid(9, 9)
    weight = torch.randint(0, 2, (data.num_edges,)).to(torch.uint8)
    rest = Data(edge_index=data.edge_index[:, weight > 0], num_nodes=81)
    owner = assign(data, 3, method, edge_weight=weight)
    assert torch.equal(owner, assign(rest, 3, method, edge_weight=weight[weight > 0]))


@pytest.mark.parametrize("method", MULTILEVEL)
def test_where_there_is_nothing_to_cut_weights_still_count(method):
    """Fewer nodes than parts are split in their order."""
    line = Data(edge_index=torch.tensor([[0, 1], [1, 2]]), num_nodes=3)
    weights = {"node_weight": torch.tensor([0, 5, 5]), "edge_weight": torch.ones(2).long()}
    assert assign(line, 5, method, **weights).tolist() == [0, 1, 3]
    assert assign(line, 1, method, **weights).tolist() == [0, 0, 0]


@pytest.mark.parametrize("weights", ["node_weight", "edge_weight"])
def test_kahip_computes_in_32_bits(weights):
    data = grid(4, 4)
    rows = {"node_weight": 16, "edge_weight": 24}[weights]
    ends = {"node_weight": 1, "edge_weight": 2}[weights]
    most = torch.full((rows,), (2**31 - 1) // (rows * ends))
    parts = torch.bincount(assign(data, 4, "kahip", **{weights: most}), minlength=4)
    assert parts.max() <= 5
    with pytest.raises(ArgumentError, match=r"computes in 32 bits, .* stay below 2147483648\. Div"):
        assign(data, 4, "kahip", **{weights: most + 1})
    owner = assign(data, 4, "metis", **{weights: most * 2**20})
    assert torch.bincount(owner).tolist() == [4] * 4


@pytest.mark.parametrize("method", ["rcb", "hilbert", "block", "random"])
def test_edge_weights_where_there_are_no_edges(method):
    message = f'method="{method}" takes no edge_weight; "metis" and "kahip" do'
    with pytest.raises(ArgumentError, match=message):
        assign(grid(3, 3), 2, method, edge_weight=torch.ones(12).long())


def test_chance_takes_no_weights():
    with pytest.raises(ArgumentError, match=r'"random" takes no node_weight\. Choose another'):
        assign(grid(3, 3), 2, "random", node_weight=torch.ones(9).long())


@pytest.mark.parametrize("name", ["node_weight", "edge_weight"])
@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ([1] * 9, "must be a torch.Tensor; got list"),
        (
            torch.ones(9),
            r"must hold an integer for each of .*; got torch.float32 .* Scale",
        ),
        (torch.ones(9).bool(), r"must hold an integer for each of the \d+ .* got torch.bool of"),
        (torch.ones(8).long(), r"must hold an integer for each of the \d+ .* of shape \(8,\)\.$"),
        (torch.ones(9, 1).long(), r"must hold an integer for each of the .* of shape \(9, 1\)\.$"),
        (torch.tensor([1] * 8 + [-3]), "must not be negative; its least is -3"),
    ],
)
def test_weights_that_will_not_do(name, weight, message):
    data = grid(3, 3)
    data.edge_index = data.edge_index[:, :9]
    with pytest.raises(ArgumentError, match=rf"{name} {message}"):
        assign(data, 2, "metis", **{name: weight})


@pytest.mark.parametrize("method", ["metis", "kahip", "rcb", "hilbert", "block"])
@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.zeros(9).long(), r"node_weight must not be zero everywhere\."),
        (
            torch.full((9,), 2**60),
            r"node_weight adds up to 1\.04e\+19, and must stay below 2\.31e\+18\. Divide",
        ),
    ],
)
def test_weights_that_sum_to_nothing_or_too_much(method, weight, message):
    with pytest.raises(ArgumentError, match=message):
        assign(grid(3, 3), 2, method, node_weight=weight)


def test_edge_weights_that_sum_to_too_much():
    message = r"edge_weight, from both ends, adds up to 5\.53e\+19, and must stay below 4\.61e\+18"
    with pytest.raises(ArgumentError, match=message):
        assign(grid(3, 3), 2, "metis", edge_weight=torch.full((12,), 2**61))


@pytest.mark.parametrize("method", ["rcb", "hilbert", "block"])
def test_weights_as_large_as_they_may_be(method):
    weight = torch.full((9,), 2**57)
    owner = assign(grid(3, 3), 3, method, node_weight=weight)
    assert torch.equal(owner, assign(grid(3, 3), 3, method))
