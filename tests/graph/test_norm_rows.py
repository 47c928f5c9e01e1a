"""Normalisation over rows of edges and of each type of nodes; pools of each type."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric.data import Data, HeteroData

import varcomm
from tests.graph.batches import FIRST
from tests.graph.graphs import split_by, wild
from tests.ops.comparing import Failures, assert_none
from tests.worlds import WORLDS
from varcomm import ArgumentError
from varcomm.graph import (
    distribute,
    global_add_pool,
    global_max_pool,
    global_norm,
    global_readout,
    partition,
)

IDLE = "a rank owns nothing"
slow = pytest.mark.slow


def idle(data):
    """Split nodes so that a rank owns nothing."""
    ranks = torch.distributed.get_world_size()
    if isinstance(data, Data):
        return split_by(IDLE, data.num_nodes, ranks)
    return {kind: split_by(IDLE, data[kind].num_nodes, ranks) for kind in data.node_types}


def compared(failures, model, call, whole, part, owned_ids):
    """Train a step, twice over, alone and on ranks: outputs, gradients, running statistics.

    `call` gives results that have rows of nodes, by the type of these, and results of all nodes.
    """
    alone, together = model, copy.deepcopy(model)
    distribute(together, part)
    ids, inputs = owned_ids(part), []
    for net, graph in ((alone, whole), (together, part)):
        call(net, graph)  # running statistics move once more
        rows, pooled, given = call(net, graph)
        own = {key: slice(None) for key in rows} if graph is whole else ids
        inputs.append(given)
        torch.manual_seed(1)
        loss = 0
        for key, value in rows.items():
            weight = torch.randn(len(owners_of(whole, key)), value.shape[1], dtype=value.dtype)
            loss = loss + (value.sin() * weight[own[key]]).sum()
        if graph is whole:
            expected, expected_pooled = rows, pooled
            loss = loss + sum(value.square().sum() for value in pooled.values())
        else:
            # each rank has all pooled values, which count once
            share = torch.distributed.get_world_size()
            loss = loss + sum(value.square().sum() for value in pooled.values()) / share
        loss.backward()
    varcomm.data_parallel.sum_gradients(together)
    with failures.named("outputs"):
        torch.testing.assert_close(rows, {k: v[ids[k]] for k, v in expected.items()}, **FIRST)
        torch.testing.assert_close(pooled, expected_pooled, **FIRST)
    with failures.named("inputs"):
        for key, x in inputs[0].items():
            torch.testing.assert_close(inputs[1][key].grad, x.grad[ids[key]], **FIRST)
    with failures.named("parameters"):
        theirs = dict(alone.named_parameters())
        for key, parameter in together.named_parameters():
            torch.testing.assert_close(parameter.grad, theirs[key].grad, **FIRST)
    with failures.named("running statistics"):
        torch.testing.assert_close(together.state_dict(), alone.state_dict(), **FIRST)
        moved = [value for key, value in alone.named_buffers() if key.endswith("running_mean")]
        assert moved
        assert all(value.abs().sum() > 0 for value in moved)


def owners_of(whole, key):
    return whole.x if isinstance(whole, Data) else whole[key].x


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


def on_edges(model, graph):
    x = graph.x.clone().requires_grad_()
    return {None: model(x, graph.edge_index)}, {}, {None: x}


def check_edges(rank, hops):
    failures, data = Failures(), wild()
    for method in (idle(data),):
        torch.manual_seed(0)
        model = OnEdges().double()
        graph = partition(data, method=method, hops=hops)
        compared(failures, model, on_edges, data, graph, lambda part: {None: part.owned_ids})
    return failures


@pytest.mark.parametrize(
    ("ranks", "hops"), [(3, 1), (3, 2), *(pytest.param(r, 1, marks=slow) for r in (1, 2, 5))]
)
def test_norms_over_edges(worlds, ranks, hops):
    assert_none(worlds.run(ranks, check_edges, hops))


NODES = {"author": 11, "paper": 17}
EDGES = {
    ("author", "writes", "paper"): 40,
    ("paper", "cites", "paper"): 33,
    ("paper", "of", "author"): 29,
}


def papers(nodes=NODES):
    generator = torch.Generator().manual_seed(2)
    data = HeteroData()
    for kind, count in nodes.items():
        data[kind].x = torch.randn(count, 4, generator=generator).double()
        data[kind].batch = torch.arange(count) * 5 % 3
    for key, count in EDGES.items():
        ends = [torch.randint(nodes[end], (count,), generator=generator) for end in key[::2]]
        data[key].edge_index = torch.stack(ends)
    return data


class Hetero(nn.Module):
    """A norm for each type of nodes and, in a layer, of edges; a pool and a readout of each."""

    def __init__(self):
        super().__init__()
        layers = {key: pyg.SAGEConv((4, 4), 6) for key in EDGES}
        layers["paper", "cites", "paper"] = pyg.EdgeConv(pyg.MLP([8, 6, 6]))
        self.layer = pyg.HeteroConv(layers)
        self.norms = nn.ModuleDict({kind: pyg.BatchNorm(6) for kind in NODES})
        self.read = pyg.MultiAggregation(["max", "std"])

    def forward(self, x_dict, edge_index_dict, batch_dict):
        x_dict = self.layer(x_dict, edge_index_dict)
        x_dict = {kind: self.norms[kind](x).tanh() for kind, x in x_dict.items()}
        pooled = {
            kind: torch.cat(
                [pyg.global_mean_pool(x, batch_dict[kind]), self.read(x, batch_dict[kind])], dim=1
            )
            for kind, x in x_dict.items()
        }
        return x_dict, pooled


def on_papers(model, graph):
    x_dict = {kind: graph[kind].x.clone().requires_grad_() for kind in NODES}
    batch_dict = {kind: graph[kind].batch for kind in NODES}
    return *model(x_dict, graph.edge_index_dict, batch_dict), x_dict


def check_hetero(rank):
    failures, data = Failures(), papers()
    for method in (idle(data),):
        torch.manual_seed(0)
        graph = partition(data, method=method)
        ids = {kind: graph[kind].owned_ids for kind in NODES}
        compared(failures, Hetero().double(), on_papers, data, graph, lambda part, ids=ids: ids)
    return failures


@pytest.mark.parametrize("ranks", WORLDS)
def test_norms_and_pools_of_each_type(worlds, ranks):
    assert_none(worlds.run(ranks, check_hetero))


def error_of(fn, *args):
    with pytest.raises(ArgumentError) as caught:
        fn(*args)
    return str(caught.value)


def batch_norm_on(where):
    module = nn.BatchNorm1d(1)
    module.forward = global_norm(module, where)
    return module


def no_row_fits(rank):
    """Rows that fit on one rank alone are refused on all; the next call may be the first to fit."""
    graph = partition(wild(), method="block")
    nodes, edges = torch.ones(graph.num_owned, 1), torch.ones(graph.num_edges, 1)
    norm, rows = batch_norm_on(graph), [nodes, edges]
    told = [
        error_of(norm, torch.ones(1000, 1) if rank == 1 else nodes),
        error_of(norm, rows[rank % 2]),
        error_of(norm, torch.ones(graph.num_owned + graph.num_halo, 1) if rank == 1 else edges),
    ]
    assert norm(edges).shape == edges.shape
    # from now on it serves one kind of rows, and so does a copy
    assert f"rank {rank} of 3" in error_of(norm, nodes)
    assert f"rank {rank} of 3" in error_of(copy.deepcopy(norm), nodes)
    return told


def test_rows_that_do_not_fit_are_refused_on_all_ranks(worlds):
    told, *others = worlds.run(3, no_row_fits)
    assert others == [told] * 2
    one, unlike, halo = told
    assert "BatchNorm1d: refused on rank 1 of 3: x must have one row for each of the" in one
    assert "on rank 0 of nodes, on rank 1 of edges" in unlike
    assert "on rank 0 of edges, on rank 1 of nodes and the halo" in halo


def ambiguous(rank):
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
    return told


@pytest.mark.slow
def test_rows_that_may_be_of_nodes_or_of_edges(worlds):
    for told in worlds.run(2, ambiguous):
        assert told.startswith("BatchNorm1d: on every rank, x may have rows of nodes or of edges")
        assert "varcomm.graph.global_norm(module, graph.nodes)" in told


def which_type(rank):
    data = papers({"author": 9, "paper": 9})
    graph = partition(data, method="block")
    x, batch = graph["paper"].x, graph["paper"].batch
    read = pyg.SumAggregation()
    read.forward = global_readout(read, graph)
    told = [
        error_of(global_add_pool, x, batch, graph),
        error_of(read, x, batch),
        error_of(global_max_pool, torch.ones(100, 1), None, graph),
        # on rank 0 it would do
        error_of(global_add_pool, x if rank == 0 else x[:0], None, graph),
    ]
    read.forward = global_readout(read, graph["paper"])
    expected = pyg.global_add_pool(data["paper"].x, data["paper"].batch)
    torch.testing.assert_close(global_add_pool(x, batch, graph["paper"]), expected, **FIRST)
    torch.testing.assert_close(read(x, batch), expected, **FIRST)
    edges = graph["paper", "cites", "paper"]
    count = global_add_pool(torch.ones(edges.num_owned), None, edges)
    assert count.item() == EDGES["paper", "cites", "paper"]
    return told


def test_pools_of_an_unknown_type_are_refused_on_all_ranks(worlds):
    told, *others = worlds.run(3, which_type)
    assert others == [told] * 2
    many, read, none, unlike = told
    for name, message in (("global_add_pool", many), ("SumAggregation", read)):
        assert message.startswith(f"{name}: x has as many rows as there are nodes of 'author' and")
        assert "graph['author']" in message
    assert "x must have one row for each of the 3 owned nodes of 'author', or for each" in none
    assert "refused on rank 1 of 3" in unlike
