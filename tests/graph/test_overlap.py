"""Message passing that overlaps with the halo's exchange gives what one process gives."""

from functools import partial

import pytest
import torch
import torch_geometric.nn as pyg
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn.resolver import aggregation_resolver

import varcomm
from tests.graph.graphs import grid, split_by, wild
from tests.ops.comparing import Failures, assert_none
from tests.worlds import WORLDS
from varcomm.graph import edge_update, message_passing, partition
from varcomm.testing import gradcheck, gradgradcheck

AGGREGATIONS = {
    name: lambda name=name: name
    for name in ("sum", "add", "mean", "max", "min", "mul", "std", "var", "softmax", "powermean")
} | {
    "several": lambda: ["mean", "max", "std"],
    "learned softmax": lambda: pyg.aggr.SoftmaxAggregation(t=0.5, learn=True).double(),
    "attention": lambda: pyg.aggr.AttentionalAggregation(torch.nn.Linear(6, 1)).double(),
}
# the others jump where messages are equal, or PyG's own have no second derivative
SMOOTH = ("sum", "mean", "std", "var", "softmax", "powermean", "learned softmax", "attention")


def attributed(edge_index, nodes):
    generator = torch.Generator().manual_seed(2)

    def draw(*shape):
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    edges = edge_index.shape[1]
    return Data(x=draw(nodes, 4), edge_index=edge_index, edge_attr=draw(edges, 3))


def cases(ranks):
    """Graphs, and the rank of each of their nodes."""
    for method in ("random", "a rank owns nothing"):
        yield method, wild(), split_by(method, 24, ranks)
    yield "all on one", wild(), torch.full((24,), ranks - 1)
    node = torch.arange(5 * ranks)
    owner = node // 5
    ring = torch.stack([node, owner * 5 + (node + 1) % 5])
    yield "no boundary", attributed(ring, len(node)), owner
    across = torch.stack([node, (node + 5) % len(node)])
    # on one rank there is nothing but the interior
    across = across[:, across[0] // 5 != across[1] // 5] if ranks > 1 else across
    yield "no interior", attributed(across, len(node)), owner
    # edges come from lower ranks alone: the first one has no boundary, the others have
    rows = grid(2 * ranks, 3)
    yield "one way", attributed(rows.edge_index, 6 * ranks), torch.arange(6 * ranks) // 6


class EdgeMLP(torch.nn.Module):
    """Looks at target, source and edge."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4 + 4 + 3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 6)
        ).double()

    def forward(self, x_i, x_j, edge_attr):
        return self.layers(torch.cat([x_i, x_j, edge_attr], dim=1)).sin() + 1.5


class Model(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        torch.manual_seed(0)
        self.mlp = EdgeMLP()
        self.aggr = AGGREGATIONS[name]()

    def on_parts(self, graph, x, edge_attr):
        return message_passing(graph, self.mlp, x, edge_attr, aggr=self.aggr)

    def alone(self, data, x, edge_attr):
        j, i = data.edge_index
        aggregate = aggregation_resolver(self.aggr)
        return aggregate(self.mlp(x[i], x[j], edge_attr), i, dim_size=len(x), dim=0)


def outcome(model, call, given, weight, orders):
    """The output, its derivatives, and those of a loss on its derivatives."""
    x, edge_attr = (value.clone().requires_grad_() for value in given)
    out = call(x, edge_attr)
    wanted = {"x": x, "edge_attr": edge_attr, **dict(model.named_parameters())}

    def derivatives(loss, order, **how):
        found = torch.autograd.grad(loss, list(wanted.values()), materialize_grads=True, **how)
        return {f"{order} by {name}": g for name, g in zip(wanted, found, strict=True)}

    found = {"output": out.detach()}
    first = derivatives((out**2 * weight[:, : out.shape[1]]).sum(), "first", create_graph=True)
    found |= {name: g.detach() for name, g in first.items()}
    if orders > 1:
        force, of_edges = first["first by x"], first["first by edge_attr"]
        found |= derivatives((force**2).sum() + (of_edges**2).sum(), "second")
    return found


def check_step(failures, name, ranks, orders):
    for case, data, owner in cases(ranks):
        model, graph = Model(name), partition(data, method=owner)
        torch.manual_seed(1)
        weight = torch.randn(data.num_nodes, 32, dtype=torch.float64)
        ids, edge_ids = graph.owned_ids, graph.edges.owned_ids
        given = (data.x, data.edge_attr), (graph.x, graph.edge_attr)
        on_whole, on_parts = partial(model.alone, data), partial(model.on_parts, graph)
        alone = outcome(model, on_whole, given[0], weight, orders)
        parts = outcome(model, on_parts, given[1], weight[ids], orders)
        for what, value in alone.items():
            got, of_what = parts[what], what.split()[-1]
            if of_what in ("output", "x"):
                value = value[ids]
            elif of_what == "edge_attr":
                value = value[edge_ids]
            else:  # a parameter's
                got = varcomm.all_reduce(got)
            bound = 1e-9 if what.startswith("second") else 1e-12
            with failures.named(name, case, what):
                torch.testing.assert_close(got, value, rtol=bound, atol=bound)


def check_steps(rank, ranks, names):
    failures = Failures()
    for name in names:
        check_step(failures, name, ranks, 2 if name in SMOOTH else 1)
    return failures


@pytest.mark.parametrize("ranks", WORLDS)
def test_equals_one_process(worlds, ranks):
    assert_none(worlds.run(ranks, check_steps, ranks, ["sum", "max", "std", "learned softmax"]))


@pytest.mark.slow
def test_other_aggregations(worlds):
    assert_none(worlds.run(3, check_steps, 3, [*AGGREGATIONS]))


def at_edges(rank, ranks):
    failures = Failures()
    for case, data, owner in cases(ranks):
        graph = partition(data, method=owner)
        j, i = graph.edge_index
        x = graph.with_halo(graph.x)
        expected = x[i] * x[j] * graph.edge_attr[:, :1]
        got = edge_update(graph, lambda a, b, e: a * b * e[:, :1], graph.x, graph.edge_attr)
        with failures.named(case):
            assert torch.equal(got, expected)
    return failures


@pytest.mark.parametrize("ranks", WORLDS)
def test_values_at_the_edges(worlds, ranks):
    assert_none(worlds.run(ranks, at_edges, ranks))


def two_steps(graph, x, edge_attr):
    new = edge_update(graph, lambda a, b, e: (a * b).sum(1) + e[:, 0] ** 2, x, edge_attr)
    return message_passing(graph, lambda a, b, e: a * b.sin() * e[:, None], x, new)


def derivatives(rank, ranks):
    for _, data, owner in list(cases(ranks))[1:]:
        graph = partition(data, method=owner)
        for check in (gradcheck, gradgradcheck):
            check(partial(two_steps, graph), graph.x, graph.edge_attr, fast_mode=True)


@pytest.mark.slow
def test_derivatives_and_forward_mode(worlds):
    assert worlds.run(3, derivatives, 3) == [None] * 3


class Logged(torch.autograd.Function):
    """Writes down when it is applied, and when it is differentiated."""

    @staticmethod
    def forward(ctx, x, log, word):
        ctx.log, ctx.word = log, word
        log.append(word)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.log.append(ctx.word)
        return gradient, None, None


def overlapped(rank):
    """A rank that computes for a while keeps no other rank from its own interior messages."""
    log, nodes = [], torch.arange(12)
    data = attributed(torch.stack([nodes, (nodes + 1) % 12]), 12)
    graph = partition(data, method=nodes // 6)  # five edges inside, one from the other rank

    def message(x_i, x_j):
        return Logged.apply(x_i * x_j, log, len(x_j))

    loss = message_passing(graph, message, graph.x.requires_grad_()).sum()
    loss.backward()
    return log


@pytest.mark.slow
def test_interior_messages_come_first_and_last(worlds):
    assert worlds.run(2, overlapped) == [[5, 1, 1, 5]] * 2


def traffic(rank):
    graph = partition(wild(), method="random")
    x = graph.x.requires_grad_()
    target = torch.ones(graph.num_owned, 7, dtype=torch.float64, requires_grad=True)
    with varcomm.trace() as calls:
        out = message_passing(graph, lambda a, b: a[:, :1] * b, (x, target))
    with varcomm.trace() as back:
        out.sum().backward()
    sent, received = graph.plan.nbytes(x), graph.num_halo * 4 * 8
    told = [[(call.sent, call.received) for call in found] for found in (calls, back)]
    return told == [[(sent, received)], [(received, sent)]]


@pytest.mark.parametrize("ranks", WORLDS)
def test_only_what_sources_have_travels_and_once(worlds, ranks):
    assert worlds.run(ranks, traffic) == [True] * ranks


def bipartite(rank):
    generator = torch.Generator().manual_seed(3)
    data = HeteroData()
    data["author"].x = torch.randn(9, 3, dtype=torch.float64, generator=generator)
    data["paper"].x = torch.randn(7, 2, dtype=torch.float64, generator=generator)
    ends = [torch.randint(n, (40,), generator=generator) for n in (9, 7)]
    data["author", "writes", "paper"].edge_index = torch.stack(ends)
    owners = {"author": torch.arange(9) % 3, "paper": 2 - torch.arange(7) // 3}
    graph = partition(data, method=owners)
    edges = graph["author", "writes", "paper"]

    def message(x_i, x_j):
        return x_i[:, :1] * x_j.cos()

    parts = message_passing(edges, message, (graph["author"].x, graph["paper"].x), aggr="mean")
    j, i = ends
    values = message(data["paper"].x[i], data["author"].x[j])
    alone = pyg.aggr.MeanAggregation()(values, i, dim_size=7, dim=0)
    torch.testing.assert_close(parts, alone[graph["paper"].owned_ids], rtol=1e-12, atol=1e-12)
    with pytest.raises(varcomm.ArgumentError, match=r"several types.*author"):
        message_passing(graph, message, data["author"].x)


def test_edges_of_one_type(worlds):
    assert worlds.run(3, bipartite) == [None] * 3


def numbers(step, x):
    """Two steps whose messages are numbers, and the derivatives of a loss on their derivative."""
    x = x.clone().requires_grad_()
    out = step(step(x))
    (force,) = torch.autograd.grad((out**2).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((force**2).sum(), x)
    return out.detach(), force.detach(), second


def check_numbers(rank, ranks):
    failures = Failures()
    for case, data, owner in cases(ranks):
        graph = partition(data, method=owner)

        def product(x_i, x_j):
            return (x_i * x_j**2).sin()

        def alone(x, edge_index=data.edge_index):
            j, i = edge_index
            return torch.zeros_like(x).index_add(0, i, product(x[i], x[j]))

        want = numbers(alone, data.x[:, 0])
        got = numbers(partial(message_passing, graph, product), graph.x[:, 0])
        for what, a, b in zip(("output", "first", "second"), got, want, strict=True):
            with failures.named(case, what):
                torch.testing.assert_close(a, b[graph.owned_ids], rtol=1e-10, atol=1e-10)
    return failures


@pytest.mark.parametrize("ranks", WORLDS)
def test_messages_that_are_numbers(worlds, ranks):
    """On a rank without such edges, an empty tensor of one dimension stays part of the graph."""
    assert_none(worlds.run(ranks, check_numbers, ranks))
