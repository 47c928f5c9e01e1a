"""Blocks, bisection and the Hilbert curve: what they give, and that shares are equal."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.data import Data

from tests.graph.naive_assign import NAIVE, at, awkward_positions, some_weights
from varcomm import ArgumentError
from varcomm.graph import assign

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("method", NAIVE)
@settings(deadline=None, max_examples=120)
@given(
    seed=st.integers(0, 10_000),
    nodes=st.integers(0, 70),
    dims=st.integers(1, 4),
    parts=st.integers(1, 11),
    weighted=st.booleans(),
)
def test_as_if_everything_were_sorted(method, seed, nodes, dims, parts, weighted):
    pos = awkward_positions(seed, nodes, dims)
    weights = some_weights(seed, nodes) if weighted else None
    owner = assign(at(pos), parts, method, node_weight=weights)
    each = [1] * nodes if weights is None else weights.tolist()
    assert torch.equal(owner, NAIVE[method](pos, each, parts))


@settings(deadline=None, max_examples=120)
@given(
    seed=st.integers(0, 10_000),
    nodes=st.integers(1, 70),
    parts=st.integers(1, 11),
    method=st.sampled_from(["hilbert", "block", "rcb"]),
)
def test_parts_weigh_the_same_but_for_a_node(seed, nodes, parts, method):
    weights = some_weights(seed, nodes)
    owner = assign(at(awkward_positions(seed, nodes, 2)), parts, method, node_weight=weights)
    got = torch.zeros(parts, dtype=torch.int64).index_add(0, owner, weights)
    allowed = int(weights.max()) * (2 if method == "rcb" else 1) + 1
    mean = int(weights.sum()) / parts
    assert bool(((got - mean).abs() < allowed).all())


@pytest.mark.parametrize("method", NAIVE)
@pytest.mark.parametrize("nodes", [0, 1, 2, 50])
def test_weights_of_one_change_nothing(method, nodes):
    data = at(awkward_positions(0, nodes, 3))
    ones = torch.ones(nodes, dtype=torch.uint8)
    assert torch.equal(assign(data, 7, method, node_weight=ones), assign(data, 7, method))


@pytest.mark.parametrize("method", NAIVE)
def test_only_nodes_with_a_weight_are_balanced(method):
    pos = torch.rand(300, 2)
    train = torch.arange(300) % 10 == 3
    owner = assign(at(pos), 5, method, node_weight=train.int())
    assert torch.bincount(owner[train]).tolist() == [6] * 5


def test_a_node_without_weight_behind_a_box_whose_cut_is_at_its_end():
    """The left box weighs 1, less than its 3 parts; the right one starts a tie with no weight."""
    pos = torch.tensor([[0.0, 0.0], [20.0, 9.0], [19.0, 9.0], [19.5, 0.0]])
    weights = torch.tensor([1, 0, 11, 0])
    owner = assign(at(pos), 6, "rcb", node_weight=weights)
    assert torch.equal(owner, NAIVE["rcb"](pos, weights.tolist(), 6))
    assert owner.tolist() == [0, 3, 4, 3]


@pytest.mark.parametrize("method", ["rcb", "hilbert"])
def test_equal_positions_are_split_in_their_order(method):
    pos = torch.ones(7, 2)
    assert assign(at(pos), 3, method).tolist() == [0, 0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("method", ["rcb", "hilbert"])
@pytest.mark.parametrize(("dims", "parts", "side"), [(2, 4, 8), (2, 16, 8), (3, 8, 4)])
def test_parts_of_a_grid_are_squares_and_cubes(method, dims, parts, side):
    """Where parts fit a grid, both methods find them: each spans half or a quarter of each side."""
    pos = torch.cartesian_prod(*[torch.arange(float(side))] * dims)
    shuffled = torch.randperm(len(pos))
    owner = assign(at(pos[shuffled]), parts, method)
    assert torch.bincount(owner).tolist() == [side**dims // parts] * parts
    edge = side // round(parts ** (1 / dims))
    for part in range(parts):
        mine = pos[shuffled][owner == part]
        assert (mine.amax(0) - mine.amin(0)).tolist() == [edge - 1] * dims


@pytest.mark.parametrize("method", ["rcb", "hilbert"])
def test_neither_order_nor_scale_nor_place_matters(method):
    pos = torch.rand(500, 3, dtype=torch.float64)
    owner = assign(at(pos), 6, method)
    order = torch.randperm(500)
    assert torch.equal(assign(at(pos[order]), 6, method), owner[order])
    assert torch.equal(assign(at(pos * 2.0**70), 6, method), owner)
    assert torch.equal(assign(at(pos * 2.0**-900), 6, method), owner)
    moved = (pos * 2**40).round()  # exact, so that nothing is rounded when it moves
    assert torch.equal(
        assign(at(moved - 2.0**41), 6, method), assign(at(moved + 2.0**40), 6, method)
    )


@pytest.mark.parametrize("method", ["rcb", "hilbert"])
def test_positions_as_one_column(method):
    line = torch.tensor([3.0, 0.0, 2.0, 1.0])
    for pos in (line, line[:, None], line.int()):
        assert assign(at(pos), 2, method).tolist() == [1, 0, 1, 0]


def test_positions_need_no_gradient():
    pos = torch.rand(9, 2, requires_grad=True)
    for method in ("rcb", "hilbert"):
        owner = assign(at(pos), 3, method)
        assert not owner.requires_grad
        assert torch.bincount(owner).tolist() == [3] * 3


@pytest.mark.parametrize("method", ["rcb", "hilbert"])
@pytest.mark.parametrize(
    ("pos", "message"),
    [
        (torch.rand(3, 2), r"needs data\.pos of shape \(4, D\), .* got \(3, 2\)\."),
        (torch.rand(4, 2, 2), r"needs data\.pos of shape \(4, D\), .* got \(4, 2, 2\)\."),
        (torch.rand(4, 0), r"needs data\.pos of shape \(4, D\), .* got \(4, 0\)\."),
        (torch.rand(4, 2, dtype=torch.cfloat), r"data\.pos must be .* real numbers; got .*complex"),
        (torch.ones(4, 2, dtype=torch.bool), r"data\.pos must be .* real numbers; got torch\.bool"),
        (torch.rand(4, 2).numpy(), r"data\.pos must be .* real numbers; got ndarray"),
        (
            torch.tensor([[0.0, 0.0], [1.0, NAN], [0.0, 0.0], [0.0, INF]]),
            r"data\.pos must be finite; row 1 is \[1\.0, nan\]\.",
        ),
        (torch.tensor([0.0, 0.0, 0.0, -INF]), r"must be finite; row 3 is \[-inf\]\."),
    ],
)
def test_positions_that_will_not_do(method, pos, message):
    with pytest.raises(ArgumentError, match=message):
        assign(Data(pos=pos, num_nodes=4), 2, method)


@pytest.mark.parametrize("method", ["rcb", "hilbert"])
def test_no_positions(method):
    data = Data(edge_index=torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
    with pytest.raises(ArgumentError, match=rf'"{method}" needs the positions .* data\.pos'):
        assign(data, 2, method)


def test_most_coordinates():
    pos = torch.rand(20, 64)
    with pytest.raises(ArgumentError, match=r"at most 63 coordinates; got 64\. Choose .*rcb"):
        assign(at(pos), 2, "hilbert")
    assert torch.bincount(assign(at(pos[:, :63]), 2, "hilbert")).tolist() == [10, 10]
    assert torch.bincount(assign(at(pos), 2, "rcb")).tolist() == [10, 10]
