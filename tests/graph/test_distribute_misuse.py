"""Refusals of a distributed model when it is called, and edges that are left out."""

import pytest
import torch
import torch_geometric.nn as pyg

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
    edges = graph.edge_index.plain.flip(0)
    return torch.sparse_coo_tensor(edges, values, (targets, sources), check_invariants=True)


ROWS, EDGES = "rows, but this rank owns", "edges must be given as graph.edge_index"
OTHER = "numbers of another kind"

# arguments of a call, and a part of the message
MISUSE = {
    "all rows": (lambda g: (DATA.x, g.edge_index), ROWS),
    "rows with halo": (lambda g: (g.with_halo(g.x), g.edge_index), ROWS),
    "rows elsewhere": (lambda g: (torch.zeros(2, g.num_owned + 1, 4).double(), g.edge_index), ROWS),
    "all edges": (lambda g: (g.x, DATA.edge_index), EDGES),
    "negative edges": (lambda g: (g.x, g.edge_index - 30), OTHER),
    "sparse edges": (lambda g: (g.x, as_sparse(g)), EDGES),
    "a string": (lambda g: (g.x, "edges"), EDGES),
    "floats": (lambda g: (g.x, g.edge_index.plain.double()), EDGES),
    "edges in rows": (lambda g: (g.x, g.edge_index.T.contiguous()), OTHER),
    "one row": (lambda g: (g.x, g.edge_index[0]), OTHER),
}


def misuse(rank):
    """Refused on this rank before any communication: the ranks go on."""
    graph = partition(DATA, method="block")
    layer = distribute(seeded_sage(), graph)
    for name, (given, message) in MISUSE.items():
        with pytest.raises(
            ArgumentError, match=f"^(propagate|edge_index) on rank {rank} of 3: .*{message}"
        ):
            layer(*given(graph))
        assert layer(graph.x, graph.edge_index).shape == (graph.num_owned, 4), name


def test_arguments_that_do_not_fit(worlds):
    assert worlds.run(3, misuse) == [None] * 3


def one_is_wrong(rank):
    graph = partition(DATA, method="block")
    layer = distribute(seeded_sage(), graph)
    with varcomm.debug(), pytest.raises(DisagreementError) as caught:
        layer(graph.x if rank != 1 else DATA.x, graph.edge_index)
    return str(caught.value)


def test_in_debug_all_ranks_raise_where_one_has_to(worlds):
    for told in worlds.run(3, one_is_wrong):
        assert "on rank 1: edge_index on rank 1 of 3: edges select from 24 rows" in told


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
