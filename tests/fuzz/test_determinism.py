"""The same inputs on the same ranks give the same bits, time after time."""

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn

from tests.graph.graphs import wild
from tests.ops.primitives import PRIMITIVES, case
from varcomm.data_parallel import sum_gradients
from varcomm.graph import distribute, partition

RUNS = 20


def bits(*tensors):
    return [t.detach().reshape(-1).clone().view(torch.uint8) for t in tensors]


def repeated(fn):
    """How many of 20 runs gave other bits than the first."""
    first, *others = [fn() for _ in range(RUNS)]
    return sum(
        not all(torch.equal(a, b) for a, b in zip(first, other, strict=True)) for other in others
    )


def primitives(rank, ranks):
    found = {}
    for name in PRIMITIVES:
        c = case(name, "off by one", ranks)
        op, x = c.bind(), c.input(rank, torch.float32).mul_(1e3)

        def run(op=op, x=x):
            leaf = x.clone().requires_grad_()
            y = op(leaf)
            (gradient,) = torch.autograd.grad(y.sin().sum(), leaf, materialize_grads=True)
            return bits(y, gradient)

        found[name] = repeated(run)
    return found


@pytest.mark.parametrize("ranks", [1, 3])
def test_primitives(worlds, ranks):
    for found in worlds.run(ranks, primitives, ranks):
        assert found == dict.fromkeys(PRIMITIVES, 0)


def graph_network(rank):
    graph = partition(wild(), method="random")

    def run():
        torch.manual_seed(0)
        model = nn.ModuleList([pyg.GATConv(4, 4), pyg.SAGEConv(4, 4)]).double()
        first, second = distribute(model, graph)
        y = second(first(graph.x, graph.edge_index).tanh(), graph.edge_index)
        graph.mean(y.square()).backward()
        sum_gradients(model)
        return bits(y, *(p.grad for p in model.parameters()))

    return repeated(run)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_graph_network(worlds, ranks):
    assert worlds.run(ranks, graph_network) == [0] * ranks
