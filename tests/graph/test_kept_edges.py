"""What layers make of the edges alone is made once, and is right in every later call."""

import pytest
import torch
import torch_geometric.nn as pyg

import varcomm
from tests.graph.against_one import CLOSE, graph_of
from tests.graph.graphs import wild
from tests.worlds import on_ranks
from varcomm.graph import distribute, partition

LAYERS = {
    "GCNConv": lambda: pyg.GCNConv(4, 3),
    "GCNConv without loops": lambda: pyg.GCNConv(4, 3, add_self_loops=False),
    "GCNConv, improved": lambda: pyg.GCNConv(4, 3, improved=True),
    "GATConv": lambda: pyg.GATConv(4, 3, heads=2),
    "GATv2Conv": lambda: pyg.GATv2Conv(4, 3, heads=2),
}


def made(name):
    torch.manual_seed(0)
    return LAYERS[name]()


def beside_one_process(name, graph, data, dtype=torch.float64, **how):
    """Compare values and gradients with the plain layer on the full graph."""
    layer, plain = distribute(made(name).to(dtype), graph), made(name).to(dtype)
    found = layer(graph.x.to(dtype), graph.edge_index, **how)
    expected = plain(data.x.to(dtype), data.edge_index, **how)
    close = CLOSE if dtype == torch.float64 else {}
    torch.testing.assert_close(found, expected[graph.owned_ids], **close)
    found.square().sum().backward()
    expected.square().sum().backward()
    varcomm.data_parallel.sum_gradients(layer)
    for a, b in zip(layer.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, **close)


@pytest.mark.parametrize("name", LAYERS)
@on_ranks(1, 3)
def test_calls_after_the_first(rank, name):
    data = wild()
    graph = graph_of(data)
    with torch.inference_mode():  # whose tensors autograd does not save
        distribute(made(name).double(), graph)(graph.x, graph.edge_index)
    for dtype in (torch.float64, torch.float32, torch.float64):
        beside_one_process(name, graph, data, dtype)
    other = partition(data, method="block")
    beside_one_process(name, other, data)
    with varcomm.debug():
        beside_one_process(name, graph, data)


@on_ranks(3)
def test_calls_with_other_edges_or_weights(rank):
    data = wild()
    graph = graph_of(data)
    row, col = data.edge_index
    loops = data.clone()
    loops.edge_index = data.edge_index[:, row != col]
    layer, plain = (made("GCNConv").double() for _ in range(2))
    distribute(layer, graph)
    layer(graph.x, graph.edge_index)
    own = graph.edge_index
    weights = graph.edge_attr[:, 0].abs()
    found = layer(graph.x, own, weights)
    expected = plain(data.x, data.edge_index, data.edge_attr[:, 0].abs())
    torch.testing.assert_close(found, expected[graph.owned_ids], **CLOSE)
    found = layer(graph.x, own[:, own[0] != own[1]])
    expected = plain(data.x, loops.edge_index)
    torch.testing.assert_close(found, expected[graph.owned_ids], **CLOSE)


@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv"])
@on_ranks(3)
def test_attention_of_kept_edges(rank, name):
    graph = graph_of(wild())
    layer = distribute(made(name).double(), graph)
    calls = [layer(graph.x, graph.edge_index, return_attention_weights=True)[1] for _ in range(2)]
    assert all(map(torch.equal, *calls))
    assert calls[0][0].shape[1] == len(calls[0][1])
