"""Ranks of which some need a gradient that others do not all raise at their next sum over ranks."""

import pytest
import torch
import torch_geometric.nn as pyg

import varcomm
from tests.graph.graphs import wild
from tests.ops.primitives import PRIMITIVES, case
from tests.worlds import on_ranks, refused_alike
from varcomm import DisagreementError
from varcomm.tensor_parallel import VocabParallelEmbedding, row_parallel_linear

BY_ROOT = {"scatter_v", "broadcast"}  # the root's tensor decides for all ranks
COMPARED = sorted(PRIMITIVES.keys() - BY_ROOT - {"shard_v"})  # which sends nothing
TWO = pytest.param(2, marks=pytest.mark.slow)
ONES = torch.ones(2, dtype=torch.float64)


def refused(program):
    return refused_alike(DisagreementError, program, "Ranks disagree on requires_grad: rank 0 has")


def summed(call):
    """Make a call, then sums over ranks, then its backward where it has one.

    A sum carries 16 bits: one of 65,536 misses a difference.
    """
    y = call()
    for _ in range(2):
        varcomm.all_reduce(ONES)
    if y.requires_grad:
        y.sum().backward()


@pytest.mark.parametrize("pattern", ["even", "one empty"])
@pytest.mark.parametrize("name", COMPARED)
@on_ranks(TWO, 3)
def test_each_primitive(rank, ranks, name, pattern):
    c = case(name, pattern, ranks)
    op = c.bind()
    for culprit in range(ranks):
        x = c.input(rank, torch.float64).requires_grad_(rank == culprit)
        refused(lambda x=x: summed(lambda: op(x)))
        x.requires_grad_(rank != culprit)
        refused(lambda x=x: summed(lambda: op(x)))
        if c.has_async:
            refused(lambda x=x: summed(lambda: op(x, async_op=True).wait()))
        x.requires_grad_()

        def without_gradients(x=x, culprit=culprit):
            with torch.set_grad_enabled(rank != culprit):
                return op(x)

        refused(lambda call=without_gradients: summed(call))
        summed(lambda x=x: op(x))


@on_ranks(2, 3)
def test_a_sum_compares_its_own_input(rank, ranks):
    for culprit in range(ranks):
        x = torch.ones(2, dtype=torch.float64, requires_grad=rank == culprit)
        refused(lambda x=x: varcomm.all_reduce(x))
        refused(lambda x=x: varcomm.all_reduce(x, async_op=True).wait())
        assert varcomm.all_reduce(ONES).tolist() == [ranks, ranks]


@on_ranks(3)
def test_second_derivatives(rank):
    x = torch.ones(2, requires_grad=True)
    y = varcomm.all_gather_v(x, [2, 2, 2]).square().sum()

    def step(create_graph):
        torch.autograd.grad(y, x, create_graph=create_graph, retain_graph=True)
        varcomm.all_reduce(ONES)

    step(create_graph=True)
    refused(lambda: step(create_graph=rank == 0))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@on_ranks(TWO, 3)
def test_compiled_code(rank, ranks, backend):
    """Rank 1 compiles, and compares as the other ranks do."""
    torch._dynamo.reset()

    def gathered(x, async_op=False):
        y = varcomm.all_gather_v(x, [2] * ranks, async_op=async_op)
        return (y.wait() if async_op else y) * 2

    def detached(x):  # a graph without a backward
        return gathered(x).detach()

    def compiled(fn):
        return torch.compile(fn, backend=backend) if rank == 1 else fn

    def without_gradients(fn):
        return torch.no_grad()(compiled(fn))

    def in_flight(x):
        return gathered(x, async_op=True)

    calls = [compiled(gathered), compiled(detached), compiled(in_flight)]
    calls += [without_gradients(gathered), without_gradients(in_flight)]
    for call in calls:
        summed(lambda call=call: call(ONES.clone().requires_grad_()))
        summed(lambda call=call: call(ONES))
    for culprit in range(ranks):
        for call in calls[:3]:
            x = ONES.clone().requires_grad_(rank == culprit)
            refused(lambda call=call, x=x: summed(lambda: call(x)))


@on_ranks(2, 3)
def test_where_ranks_may_differ(rank, ranks):
    """No backward waits for a rank that has none."""
    for name in sorted(BY_ROOT):
        c = case(name, "even", ranks)
        op, root = c.bind(), ranks - 1
        for needs_gradient in (rank == root, rank != root):
            x = c.input(rank, torch.float64).requires_grad_(needs_gradient)
            summed(lambda x=x, op=op: op(x))
    graph = varcomm.graph.partition(wild(), method="random")
    for culprit in range(ranks):
        x = torch.ones(2, 2, requires_grad=rank == culprit)
        summed(lambda x=x: row_parallel_linear(x, torch.ones(3, 2)))
        summed(lambda x=x: graph.mean(graph.x * x.sum()))


@on_ranks(3)
def test_a_call_that_one_rank_refuses_is_not_among_its_calls(rank):
    layer = VocabParallelEmbedding(7, 2)
    if rank == 1:
        with pytest.raises(varcomm.ArgumentError, match="out of range"):
            layer(torch.tensor([7]))
    summed(lambda: layer(torch.tensor([6])))
    varcomm.check()


def step_of_graph(ranks, model, prepare, has_gradients=True):
    """Return a step on a graph, of which the last rank owns no node."""
    torch.manual_seed(0)
    owners = torch.arange(24) % (ranks - 1)
    graph = varcomm.graph.partition(wild(), method=owners)
    model = varcomm.graph.distribute(model().double(), graph)
    prepare(model, graph)

    def step():
        with torch.set_grad_enabled(has_gradients):
            out = model(graph.x, graph.edge_index)
        graph.mean((out - graph.y).square()).backward()

    return step


MODELS = {
    "sums before maps": lambda: pyg.GraphSAGE(4, 6, 2, 2),
    "maps before sums": lambda: pyg.GCN(4, 6, 2, 2),
    "attention": lambda: pyg.GAT(4, 6, 2, 2),
}
PROGRAMS = {
    "a forward under no_grad": lambda wrong: (lambda model, graph: None, not wrong),
    "an input": lambda wrong: (lambda model, graph: graph.x.requires_grad_(not wrong),),
    "a frozen model": lambda wrong: (lambda model, graph: model.requires_grad_(not wrong),),
    "a frozen layer": lambda wrong: (
        lambda model, graph: model.convs[0].requires_grad_(not wrong),
    ),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", PROGRAMS)
@on_ranks(2, 3)
def test_graphs(rank, ranks, name, model):
    # maps have parameters, so what they return needs a gradient on all ranks
    exchanged = name != "an input" or model == "sums before maps"
    for culprit in range(ranks):
        step = step_of_graph(ranks, MODELS[model], *PROGRAMS[name](rank == culprit))
        refused(step) if exchanged else step()
    step_of_graph(ranks, MODELS[model], *PROGRAMS[name](False))()
    varcomm.check()
