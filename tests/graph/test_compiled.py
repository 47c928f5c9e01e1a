"""Distributed models in one graph of torch.compile, forward and backward, and moved to others."""

import copy
import sys

import pytest
import torch
import torch.nn.functional as F
from torch_geometric import nn as pyg
from torch_geometric.utils import dropout_edge

import varcomm
from tests.graph.graphs import split_by, wild
from varcomm.data_parallel import replicate, sum_gradients
from varcomm.errors import ArgumentError
from varcomm.graph import distribute, partition
from varcomm.models.mesh_graph_net import MeshGraphNet

CLOSE = {"rtol": 1e-12, "atol": 1e-12}

MODELS = {
    "SAGE": lambda: pyg.GraphSAGE(4, 6, 2, 2),
    "GAT": lambda: pyg.GAT(4, 6, 2, 2, heads=2),
    "GCN": lambda: pyg.GCN(4, 6, 2, 2),
    "MeshGraphNet": lambda: MeshGraphNet(4, 3, 2, hidden_channels=6, num_blocks=2),
}


def stats():
    """Return how often graphs have been compiled, and how often they broke."""
    counters = torch._dynamo.utils.counters
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def fresh():
    """Forget what was compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


class Step(torch.nn.Module):
    """A model and its loss, on a graph that may be exchanged."""

    def __init__(self, model, graph):
        super().__init__()
        self.model, self.graph = model, graph

    def forward(self, x, edge_index, edge_attr, y, mask):
        more = (edge_attr,) if isinstance(self.model, MeshGraphNet) else ()
        out = self.model(x, edge_index, *more)
        return out, self.graph.mean(F.mse_loss(out, y, reduction="none"), mask)


def outcome(step, call, graph):
    """Return outputs, loss, gradients."""
    x = graph.x.clone().requires_grad_()
    out, loss = call(x, graph.edge_index, graph.edge_attr, graph.y, graph.train_mask)
    return out, loss, torch.autograd.grad(loss, [x, *step.parameters()])


def check(rank, name, backend, dynamic, cases, ranks):
    fresh()
    torch.manual_seed(0)
    model, counts = MODELS[name]().double(), []
    graphs = [
        partition(wild(nodes), method=split_by(method, nodes, ranks)) for nodes, method in cases
    ]
    step = Step(distribute(model, graphs[0]), graphs[0])
    # before anything has run
    fast = torch.compile(step, backend=backend, fullgraph=True, dynamic=dynamic)
    for graph in graphs:
        distribute(model, graph)
        step.graph = graph
        got, want = outcome(step, fast, graph), outcome(step, step, graph)
        torch.testing.assert_close(got, want, **CLOSE)
        counts.append(stats())
    return counts


# Of sizes no two of which are the same by chance: of equal ones torch.compile makes one.
CASES = [(24, "random"), (31, "block"), (43, "random")]


@pytest.mark.parametrize("name", MODELS)
def test_other_graphs_run_through_the_same_code(worlds, name):
    """Of other sizes, with other neighbours: nothing is compiled again, and nothing breaks."""
    counts = worlds.run(2, check, name, "aot_eager", True, CASES, 2, timeout=300)
    assert counts == [[(1, 0)] * 3] * 2


@pytest.mark.parametrize("ranks", [1, 3])
def test_in_other_worlds_and_where_a_rank_owns_nothing(worlds, ranks):
    cases = [(24, "random"), (31, "a rank owns nothing"), (43, "block")]
    counts = worlds.run(ranks, check, "SAGE", "aot_eager", True, cases, ranks, timeout=300)
    # of sizes that are 0, torch.compile makes constants
    assert all(broken == 0 and compiled <= 2 for rank in counts for compiled, broken in rank)


@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor(worlds, dynamic):
    counts = worlds.run(2, check, "GAT", "inductor", dynamic, CASES[:1], 2, timeout=300)
    assert counts == [[(1, 0)]] * 2
