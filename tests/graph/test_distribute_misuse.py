"""Refusals of a distributed model when it is called, and edges that are left out."""

import pytest
import torch
import torch_geometric.nn as pyg
from torch_geometric.nn import MessagePassing

import varcomm
from tests.graph.graphs import wild
from varcomm import ArgumentError, DisagreementError
from varcomm.graph import distribute, partition

DATA = wild()


def seeded_sage(**settings):
    torch.manual_seed(0)
    return pyg.SAGEConv(4, 4, **settings).double()


def as_sparse(graph):
    sources, targets = graph.num_owned + graph.num_halo, graph.num_owned
    values = torch.ones(graph.edge_index.shape[1], dtype=torch.float64)
    edges = graph.edge_index.flip(0)
    return torch.sparse_coo_tensor(edges, values, (targets, sources), check_invariants=True)


ROWS, EDGES = "rows, but this rank owns", "edges must be given as graph.edge_index"

# arguments of a call, and a part of the message
MISUSE = {
    "all rows": (lambda g: (DATA.x, g.edge_index), ROWS),
    "rows with halo": (lambda g: (g.with_halo(g.x), g.edge_index), "halos are added by varcomm"),
    "rows elsewhere": (lambda g: (torch.zeros(2, g.num_owned + 1, 4).double(), g.edge_index), ROWS),
    "all edges": (lambda g: (g.x, DATA.edge_index), "edges reach beyond"),
    "negative edges": (lambda g: (g.x, g.edge_index - 30), "edges reach beyond"),
    "sparse edges": (lambda g: (g.x, as_sparse(g)), EDGES),
    "a string": (lambda g: (g.x, "edges"), EDGES),
    "floats": (lambda g: (g.x, g.edge_index.double()), EDGES),
    "edges in rows": (lambda g: (g.x, g.edge_index.T.contiguous()), EDGES),
    "one row": (lambda g: (g.x, g.edge_index[0]), EDGES),
}


def misuse(rank):
    """Refused on this rank before any communication: the ranks go on."""
    graph = partition(DATA, method="block")
    layer = distribute(seeded_sage(), graph)
    for name, (given, message) in MISUSE.items():
        with pytest.raises(ArgumentError, match=f"propagate on rank {rank} of 3: .*{message}"):
            layer(*given(graph))
        assert layer(graph.x, graph.edge_index).shape == (graph.num_owned, 4), name


def test_arguments_that_do_not_fit(worlds):
    assert worlds.run(3, misuse) == [None] * 3


class Plain(MessagePassing):
    """A class of its own: making a bare MessagePassing changes its subclasses."""


class ThreeSides(MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=(x, x, x))


def shapes(rank):
    graph = partition(wild(), method="block")
    own = distribute(Plain(), graph)
    with pytest.raises(ArgumentError, match=r"'x' has shape \(\d+,\), without a dimension -2"):
        own.propagate(graph.edge_index, x=graph.x[:, 0])
    with pytest.raises(ArgumentError, match=r"must be a tensor or a pair of them, .*; got 3"):
        distribute(ThreeSides(), graph)(graph.x, graph.edge_index)
    turned = distribute(seeded_sage(), graph)
    turned.flow = "target_to_source"
    with pytest.raises(ArgumentError, match="is not supported"):
        turned(graph.x, graph.edge_index)


def test_nodes_must_be_where_the_layer_looks_for_them(worlds):
    assert worlds.run(3, shapes) == [None] * 3


def one_is_wrong(rank):
    graph = partition(DATA, method="block")
    layer = distribute(seeded_sage(), graph)
    with varcomm.debug(), pytest.raises(DisagreementError) as caught:
        layer(graph.x if rank != 1 else DATA.x, graph.edge_index)
    return str(caught.value)


def test_in_debug_all_ranks_raise_where_one_has_to(worlds):
    for told in worlds.run(3, one_is_wrong):
        assert "on rank 1: propagate on rank 1 of 3: 'x' has 24 rows" in told


def some_edges(rank):
    """Edges may be left out, as by dropout_edge, and no edges at all are edges too."""
    data = wild()
    graph = partition(data, method="random")
    layer, alone = distribute(seeded_sage(aggr="sum"), graph), seeded_sage(aggr="sum")
    nothing = layer(graph.x, graph.edge_index[:, :0])
    torch.testing.assert_close(nothing, layer.lin_l.bias + layer.lin_r(graph.x))
    kept = torch.arange(data.num_edges) % 3 > 0
    owned = torch.isin(data.edge_index[1], graph.owned_ids)
    part = layer(graph.x, graph.edge_index[:, kept[owned]])
    expected = alone(data.x, data.edge_index[:, kept])
    torch.testing.assert_close(part, expected[graph.owned_ids], rtol=1e-12, atol=1e-12)


def test_edges_may_be_left_out(worlds):
    assert worlds.run(3, some_edges) == [None] * 3
