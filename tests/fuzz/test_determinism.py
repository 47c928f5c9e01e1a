"""The same inputs on the same ranks give the same bits in every run."""

import math

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn

import varcomm
from tests.graph.graphs import wild
from tests.ops.primitives import PRIMITIVES, case
from varcomm.data_parallel import sum_gradients
from varcomm.graph import distribute, partition

RUNS = 12


def bits(*tensors):
    return [t.detach().reshape(-1).clone().view(torch.uint8) for t in tensors]


def repeated(fn):
    """Number of runs with other bits than the first."""
    first, *others = [fn() for _ in range(RUNS)]
    return sum(
        not all(torch.equal(a, b) for a, b in zip(first, other, strict=True)) for other in others
    )


def changes(rank, ranks):
    """Count changes of the bits of each primitive and of a graph network, and their gradients."""
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
    graph = partition(wild(), method="random")

    def network():
        torch.manual_seed(0)
        model = nn.ModuleList([pyg.GATConv(4, 4), pyg.SAGEConv(4, 4)]).double()
        first, second = distribute(model, graph)
        y = second(first(graph.x, graph.edge_index).tanh(), graph.edge_index)
        graph.mean(y.square()).backward()
        sum_gradients(model)
        return bits(y, *(p.grad for p in model.parameters()))

    return found | {"network": repeated(network)}


@pytest.mark.parametrize("ranks", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_primitives_and_a_graph_network(worlds, ranks):
    for found in worlds.run(ranks, changes, ranks):
        assert found == dict.fromkeys([*PRIMITIVES, "network"], 0)


ROWS = 997


def rows(dtype):
    return torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(5)).mul_(1e3).to(dtype)


def sums(rank, ranks, dtype):
    """The sum of all rows, and of their gradients, for any split of rows."""
    own = rows(dtype).tensor_split(ranks)[rank].requires_grad_()
    weight = torch.ones(4, dtype=dtype, requires_grad=True)
    total = varcomm.all_reduce((own * weight).sum(0))
    (total * total.detach() / ranks).sum().backward()  # each rank has the same loss
    sum_gradients([weight])
    return total.detach(), weight.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", [(1, 3), pytest.param((1, 2, 3, 5), marks=pytest.mark.slow)])
def test_across_numbers_of_ranks_sums_differ_by_rounding_alone(worlds, sizes, dtype):
    """However n numbers are added up, the error is below (n - 1) u times the sum of their sizes."""
    exact = rows(dtype).double()
    total = torch.tensor([math.fsum(column) for column in exact.T], dtype=torch.float64)
    size = exact.abs().sum(0)
    bound = ROWS * torch.finfo(dtype).eps / 2 * size
    for ranks in sizes:
        every = worlds.run(ranks, sums, ranks, dtype)
        for found, gradient in every:
            assert torch.equal(found, every[0][0]), "one answer on all ranks"
            assert ((found.double() - total).abs() <= bound).all()
            # the square of the sum, of which the error counts twice
            assert ((gradient.double() - total.square()).abs() <= 3 * bound * size).all()
