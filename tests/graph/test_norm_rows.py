"""Normalisation over rows of edges and of each type of nodes; pools of each type."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric.data import Data

from tests.graph.against_one import compare, graph_of, two_types
from tests.graph.graphs import wild
from tests.worlds import WORLDS, on_ranks
from varcomm import ArgumentError
from varcomm.graph import global_norm, partition

slow = pytest.mark.slow


class OnEdges(nn.Module):
    """A norm over edges in each layer, and one over nodes between them."""

    def __init__(self):
        super().__init__()
        self.first = pyg.EdgeConv(pyg.MLP([8, 16, 16]), aggr="mean")
        self.norm = pyg.BatchNorm(16)
        norms = {"norm": "graph_norm", "act": "tanh"}
        self.second = pyg.EdgeConv(pyg.MLP([32, 8, 3], **norms), aggr="sum")

    def forward(self, x, edge_index):
        return self.second(self.norm(self.first(x, edge_index)), edge_index)


@pytest.mark.parametrize(
    ("ranks", "hops"), [(3, 1), (3, 2), *(pytest.param(r, 1, marks=slow) for r in (1, 2, 5))]
)
@on_ranks()
def test_norms_over_edges(rank, hops):
    data = wild()
    graph = graph_of(data, hops=hops)
    return compare(OnEdges, lambda m, g: m(g.x, g.edge_index), data, graph)


class SomeRows(nn.Module):
    """Norms over edges and nodes of a mask, and over one sample whose length is the nodes."""

    def __init__(self):
        super().__init__()
        self.of_edges, self.of_nodes = nn.BatchNorm1d(4), pyg.BatchNorm(4)
        self.of_sample = nn.BatchNorm1d(4)

    def forward(self, x, edge_index):
        edges = edge_index[:, x[:, 1][edge_index[1]] > 0.3]
        h = self.of_edges(x[edges[0]] - x[edges[1]]).tanh()
        x = torch.zeros_like(x).index_add(0, edges[1], h) + x
        chosen = x[:, 0] > 0
        x = x.index_put((chosen,), self.of_nodes(x[chosen]).tanh())
        return self.of_sample(x.t()[None])[0].t().tanh()


@pytest.mark.parametrize("ranks", WORLDS)
@on_ranks()
def test_norms_over_some_rows(rank):
    """As many as each rank has, in each call other ones."""
    data = wild()
    graph = graph_of(data)

    def twice(m, g):
        return m(g.x, g.edge_index) + m(-g.x, g.edge_index)

    return compare(SomeRows, twice, data, graph)


KEY = ("a", "to", "b")


class Hetero(nn.Module):
    """A norm for each type of nodes and, in a layer, of edges; a pool and a readout of each."""

    def __init__(self):
        super().__init__()
        self.lift = nn.ModuleDict({"a": nn.Linear(4, 6), "b": nn.Linear(3, 6)})
        self.layer = pyg.HeteroConv({KEY: pyg.EdgeConv(pyg.MLP([12, 6, 6]))})
        self.norms = nn.ModuleDict({kind: pyg.BatchNorm(6) for kind in "ab"})
        self.read = pyg.MultiAggregation(["max", "std"])

    def forward(self, x_dict, edge_index_dict, batch_dict):
        x_dict = {kind: self.lift[kind](x) for kind, x in x_dict.items()}
        x_dict = x_dict | self.layer(x_dict, edge_index_dict)
        x_dict = {kind: self.norms[kind](x).tanh() for kind, x in x_dict.items()}
        pooled = {
            kind: torch.cat(
                [pyg.global_mean_pool(x, batch_dict[kind]), self.read(x, batch_dict[kind])], dim=1
            )
            for kind, x in x_dict.items()
        }
        return x_dict, pooled


def on_types(m, g):
    x_dict, edges = {"a": g.x_a, "b": g.x_b}, {KEY: g.edge_index}
    x_dict, pooled = m(x_dict, edges, {"a": g.batch_a, "b": g.batch_b})
    return (*x_dict.values(), *pooled.values())


@on_ranks(*WORLDS)
def test_norms_and_pools_of_each_type(rank):
    data = two_types()
    return compare(Hetero, on_types, data, graph_of(data), ("x_a", "x_b"))


def error_of(fn, *args):
    with pytest.raises(ArgumentError) as caught:
        fn(*args)
    return str(caught.value)


def batch_norm_on(where):
    module = nn.BatchNorm1d(1)
    module.forward = global_norm(module, where)
    return module


@pytest.mark.slow
@on_ranks(2)
def test_rows_that_may_be_of_nodes_or_of_edges(rank):
    """Two nodes and four edges on each of two ranks, with two more nodes in the halo."""
    node = torch.arange(4)
    both_ways = torch.cat(
        [torch.stack([node, node.roll(1)]), torch.stack([node, node.roll(-1)])], 1
    )
    graph = partition(Data(edge_index=both_ways, num_nodes=4), method="block")
    # as values of nodes with the halo, these have another mean
    x = torch.arange(4.0).view(4, 1) ** 2
    told = error_of(batch_norm_on(graph), x)
    norm, nodes = batch_norm_on(graph.edges), batch_norm_on(graph.nodes)
    norm(x)
    assert norm.running_mean.item() == pytest.approx(0.1 * 3.5)
    assert "x must have one row for each" in error_of(nodes, x)
    assert nodes(x[:2]).shape == (2, 1)
    assert told.startswith("BatchNorm1d: on every rank, x may have rows of nodes or of edges")
    assert "varcomm.graph.global_norm(module, graph.nodes)" in told


@on_ranks(3)
def test_rows_that_do_not_fit_are_refused_on_all_ranks(rank):
    """Rows that fit on one rank alone are refused on all; the next call may be the first to fit."""
    graph = partition(wild(), method="block")
    nodes, edges = torch.ones(graph.num_owned, 1), torch.ones(graph.edges.num_owned, 1)
    norm, rows = batch_norm_on(graph), [nodes, edges]
    with_halo = torch.ones(graph.num_owned + graph.num_halo, 1)
    for x, message in (
        (
            torch.ones(1000, 1) if rank == 1 else nodes,
            "refused on rank 1 of 3: x must have one row for each",
        ),
        (rows[rank % 2], "no rows of the same kind on all ranks"),
        (with_halo if rank == 1 else edges, "no rows of the same kind on all ranks"),
    ):
        assert message in error_of(norm, x)
    assert norm(edges).shape == edges.shape
    # from now on it serves one kind of rows, and so does a copy
    for module in (norm, copy.deepcopy(norm)):
        assert f"rank {rank} of 3" in error_of(module, nodes)
