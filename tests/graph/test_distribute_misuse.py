"""What a distributed model refuses when it is called, since it would be wrong without a word."""

import re

import pytest
import torch
import torch_geometric.nn as pyg
from torch_geometric.nn import MessagePassing

import varcomm
from tests.graph.graphs import wild
from varcomm import ArgumentError, DisagreementError
from varcomm.graph import distribute, partition


def seeded_sage(**settings):
    torch.manual_seed(0)
    return pyg.SAGEConv(4, 4, **settings).double()


def misuse(rank, x_of, edges_of, message):
    data = wild()
    graph = partition(data, method="block")
    torch.manual_seed(0)
    layer = distribute(pyg.GATConv(4, 4, add_self_loops=False).double(), graph)
    message = message.format(n=graph.num_owned, h=graph.num_halo, all=data.num_nodes)
    where = f"edge_updater on rank {rank} of 2: "
    with pytest.raises(ArgumentError, match=re.escape(where + message)):
        layer(x_of(data, graph), edges_of(data, graph))
    # the refusal came before any communication: the ranks go on
    assert layer(graph.x, graph.edge_index).shape == (graph.num_owned, 4)


def whole(data, graph):
    return data.x


def own(data, graph):
    return graph.x


def with_halo(data, graph):
    return graph.with_halo(graph.x)


def global_edges(data, graph):
    return data.edge_index


def local_edges(data, graph):
    return graph.edge_index


ROWS = "'alpha' has {} rows, but this rank owns {{n}} nodes. Call the model with the local part"


@pytest.mark.parametrize(
    ("x_of", "edges_of", "message"),
    [
        (whole, local_edges, ROWS.format("{all}")),
        (own, global_edges, "edges reach beyond the "),
        (whole, global_edges, "edges reach beyond the "),
    ],
)
def test_the_whole_graph_in_place_of_the_local_part(worlds, x_of, edges_of, message):
    assert worlds.run(2, misuse, x_of, edges_of, message) == [None] * 2


def misuse_of_sage(rank, edges_of, message):
    graph = partition(wild(), method="block")
    layer = distribute(seeded_sage(), graph)
    with pytest.raises(ArgumentError, match=re.escape(message)):
        layer(graph.x, edges_of(graph))
    assert layer(graph.x, graph.edge_index).shape == (graph.num_owned, 4)


def as_sparse(graph):
    sources, targets = graph.num_owned + graph.num_halo, graph.num_owned
    values = torch.ones(graph.edge_index.shape[1], dtype=torch.float64)
    edges = graph.edge_index.flip(0)
    return torch.sparse_coo_tensor(edges, values, (targets, sources), check_invariants=True)


@pytest.mark.parametrize("edges_of", [as_sparse, lambda graph: "edges"], ids=["sparse", "text"])
def test_edges_must_be_a_dense_tensor(worlds, edges_of):
    message = "edges must be given as graph.edge_index, of shape (2, E); got "
    assert worlds.run(2, misuse_of_sage, edges_of, message) == [None] * 2


def halo_twice(rank):
    """A rank without a halo cannot notice; so each of these two has one."""
    graph = partition(wild(), method="block")
    layer = distribute(seeded_sage(), graph)
    with pytest.raises(ArgumentError, match="halos are added by varcomm"):
        layer(with_halo(None, graph), graph.edge_index)


def test_halos_added_by_hand(worlds):
    assert worlds.run(2, halo_twice) == [None] * 2


def one_is_wrong(rank):
    data = wild()
    graph = partition(data, method="block")
    layer = distribute(seeded_sage(), graph)
    x = graph.x if rank != 1 else data.x
    with varcomm.debug(), pytest.raises(DisagreementError) as caught:
        layer(x, graph.edge_index)
    return str(caught.value)


def test_in_debug_all_ranks_raise_where_one_has_to(worlds):
    for told in worlds.run(3, one_is_wrong):
        assert "not called, since on rank 1: propagate on rank 1 of 3: 'x' has 24 rows" in told


def some_edges(rank):
    """Edges may be left out, as by dropout_edge, and no edges at all are edges too."""
    data = wild()
    graph = partition(data, method="random")
    layer = distribute(seeded_sage(aggr="sum"), graph)
    nothing = layer(graph.x, graph.edge_index[:, :0])
    torch.testing.assert_close(nothing, layer.lin_l.bias + layer.lin_r(graph.x))
    kept = torch.arange(data.num_edges) % 3 > 0
    owned = torch.isin(data.edge_index[1], graph.owned_ids)
    part = layer(graph.x, graph.edge_index[:, kept[owned]])
    del layer.propagate
    alone = layer(data.x, data.edge_index[:, kept])
    torch.testing.assert_close(part, alone[graph.owned_ids], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ranks", [1, 3])
def test_edges_may_be_left_out(worlds, ranks):
    assert worlds.run(ranks, some_edges) == [None] * ranks


class Plain(MessagePassing):
    """A class of its own: making a bare MessagePassing changes what all others are derived from."""


class ThreeSides(MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=(x, x, x))


def shapes(rank):
    graph = partition(wild(), method="block")
    n = graph.num_owned
    sage, own = distribute(seeded_sage(), graph), distribute(Plain(), graph)
    for shape in ((2, n + 1, 4), (n + 1, 4)):
        with pytest.raises(ArgumentError, match=f"'x' has {n + 1} rows, but this rank owns {n} "):
            sage(torch.zeros(shape, dtype=torch.float64), graph.edge_index)
    with pytest.raises(
        ArgumentError, match=r"'x' has shape \(\d+,\), in which .* dimension -2, where"
    ):
        own.propagate(graph.edge_index, x=graph.x[:, 0])
    with pytest.raises(ArgumentError, match=r"must be a tensor or a pair of them, .*; got 3"):
        distribute(ThreeSides(), graph)(graph.x, graph.edge_index)
    return tuple(sage(graph.x, graph.edge_index).shape) == (n, 4)


def test_nodes_must_be_where_the_layer_looks_for_them(worlds):
    assert worlds.run(2, shapes) == [True] * 2


@pytest.mark.parametrize(
    "edges_of",
    [
        lambda graph: graph.edge_index.double(),
        lambda graph: graph.edge_index.T.contiguous(),
        lambda graph: graph.edge_index[0],
    ],
    ids=["floats", "rows", "one row"],
)
def test_edges_must_be_numbers_of_shape_2_e(worlds, edges_of):
    message = "edges must be given as graph.edge_index, of shape (2, E); got Tensor"
    assert worlds.run(2, misuse_of_sage, edges_of, message) == [None] * 2


def test_negative_edges(worlds):
    wrong = lambda graph: graph.edge_index - 30  # noqa: E731
    assert worlds.run(2, misuse_of_sage, wrong, "edges reach beyond the ") == [None] * 2
