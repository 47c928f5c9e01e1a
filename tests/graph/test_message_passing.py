"""Message passing by hand gives what one process gives."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn as pyg
from torch_geometric.data import Data
from torch_geometric.nn.resolver import aggregation_resolver

import varcomm
from tests.graph.against_one import compare, graph_of, two_types
from tests.graph.graphs import grid, split_by, wild
from tests.ops.comparing import Failures
from tests.worlds import WORLDS, on_ranks
from varcomm import ArgumentError, DisagreementError
from varcomm.graph import edge_update, message_passing, partition
from varcomm.testing import gradcheck, gradgradcheck

CLOSE = {"rtol": 1e-10, "atol": 1e-10}

AGGREGATIONS = {
    name: lambda name=name: name
    for name in ("sum", "add", "mean", "max", "min", "mul", "std", "var", "softmax", "powermean")
} | {
    "several": lambda: ["mean", "max", "std"],
    "learned softmax": lambda: pyg.aggr.SoftmaxAggregation(t=0.5, learn=True).double(),
    "attention": lambda: pyg.aggr.AttentionalAggregation(torch.nn.Linear(6, 1)).double(),
}


def attributed(edge_index, nodes):
    generator = torch.Generator().manual_seed(2)
    x, edge_attr = (
        torch.randn(shape, dtype=torch.float64, generator=generator)
        for shape in ((nodes, 4), (edge_index.shape[1], 3))
    )
    return Data(x=x, edge_index=edge_index, edge_attr=edge_attr)


def cases(ranks):
    """Graphs, and the rank of each of their nodes."""
    for method in ("random", "a rank owns nothing"):
        yield method, wild(), split_by(method, 24, ranks)
    yield "all on one", wild(), torch.full((24,), ranks - 1)
    node = torch.arange(5 * ranks)
    owner = node // 5
    ring = torch.stack([node, owner * 5 + (node + 1) % 5])
    twice = torch.tensor([*range(len(node)), 0])  # other numbers of edges than of nodes
    yield "no boundary", attributed(ring[:, twice], len(node)), owner
    across = torch.stack([node, (node + 5) % len(node)])
    # on one rank there is nothing but the interior
    across = across[:, across[0] // 5 != across[1] // 5] if ranks > 1 else across
    across = across[:, twice] if ranks > 1 else across
    yield "no interior", attributed(across, len(node)), owner
    # edges come from lower ranks alone: the first one has no boundary, the others have
    rows = grid(2 * ranks, 3)
    yield "one way", attributed(rows.edge_index, 6 * ranks), torch.arange(6 * ranks) // 6


class Model(torch.nn.Module):
    """An MLP looks at target, source and edge."""

    def __init__(self, name, overlap=False):
        super().__init__()
        self.overlap = overlap
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4 + 4 + 3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 6)
        )
        self.aggr = AGGREGATIONS[name]()

    def message(self, x_i, x_j, edge_attr):
        # near 1, as errors of a product, and of its sine in the loss, grow with the product
        return self.layers(torch.cat([x_i, x_j, edge_attr], dim=1)).sin() / 4 + 1

    def forward(self, g):
        """Aggregate by hand in one process, and by varcomm on a part."""
        if g.graph is not None:
            how = {"aggr": self.aggr, "overlap": self.overlap}
            return message_passing(g.graph, self.message, g.x, g.edge_attr, **how)
        j, i = g.edge_index
        aggregate = aggregation_resolver(self.aggr)
        return aggregate(self.message(g.x[i], g.x[j], g.edge_attr), i, dim_size=len(g.x), dim=0)


def product(x_i, x_j):
    return (x_i * x_j**2).sin()


def numbers(_, g, overlap=False):
    """Two steps; on a rank without such edges, an empty tensor stays part of the graph."""
    x = g.x[:, 0]
    for _ in range(2):
        if g.graph is not None:
            x = message_passing(g.graph, product, x, overlap=overlap)
        else:
            j, i = g.edge_index
            x = torch.zeros_like(x).index_add(0, i, product(x[i], x[j]))
    return x


def check_edges(failures, case, graph):
    j, i = graph.edge_index
    x = graph.with_halo(graph.x)
    for overlap in (False, True):
        values = graph.x, graph.edge_attr
        got = edge_update(graph, lambda a, b, e: a * b * e[:, :1], *values, overlap=overlap)
        with failures.named("at edges", case, overlap):
            assert torch.equal(got, x[i] * x[j] * graph.edge_attr[:, :1])


def check_traffic(failures):
    """Only rows of sources travel, and once; with overlap, messages are computed in between."""
    graph = partition(wild(), method="random")
    x = graph.x.requires_grad_()
    target = torch.ones(graph.num_owned, 7, dtype=torch.float64, requires_grad=True)
    sent, received = graph.plan.nbytes(x), graph.num_halo * 4 * 8
    many = [len(graph.interior), len(graph.boundary)]
    for overlap, expected in (
        (False, [sum(many)]),
        (True, many if dist.get_world_size() > 1 else [sum(many)]),
    ):
        seen = []

        def message(a, b, seen=seen):
            seen.append(len(b))
            return a[:, :1] * b

        with varcomm.trace() as calls:
            out = message_passing(graph, message, (x, target), overlap=overlap)
        with varcomm.trace() as back:
            out.sum().backward()
        with failures.named("traffic", overlap):
            assert seen == expected
            assert [(call.sent, call.received) for call in calls] == [(sent, received)]
            assert [(call.sent, call.received) for call in back] == [(received, sent)]


def check(ranks, names):
    failures = Failures()
    check_traffic(failures)
    for case, data, owner in cases(ranks):
        graph = partition(data, method=owner)
        check_edges(failures, case, graph)
        for overlap in (False, True):
            call = partial(numbers, overlap=overlap)
            wrong = compare(None, call, data, graph, second=True, close=CLOSE)
            failures.extend(f"numbers, {case}, {overlap}: {text}" for text in wrong)
        for number, name in enumerate(names):
            model, by = partial(Model, name, overlap=number % 2 == 0), ("x", "edge_attr")
            wrong = compare(model, lambda m, g: m(g), data, graph, by, put=None)
            failures.extend(f"{name}, {case}: {text}" for text in wrong)
    return failures


@on_ranks(*WORLDS)
def test_equals_one_process(rank, ranks):
    return check(ranks, ["sum", "max", "std", "learned softmax"])


@pytest.mark.slow
@on_ranks(3)
def test_other_aggregations(rank):
    return check(3, AGGREGATIONS)


def two_steps(graph, x, edge_attr):
    new = edge_update(graph, lambda a, b, e: (a * b).sum(1) + e[:, 0] ** 2, x, edge_attr)
    return message_passing(graph, lambda a, b, e: a * b.sin() * e[:, None], x, new)


@pytest.mark.slow
@on_ranks(3)
def test_derivatives_and_forward_mode(rank):
    for _, data, owner in list(cases(3))[1:]:
        graph = partition(data, method=owner)
        for proof in (gradcheck, gradgradcheck):
            proof(partial(two_steps, graph), graph.x, graph.edge_attr, fast_mode=True)


def between(_, g):
    def message(x_i, x_j):
        return x_i[:, :1] * x_j.cos()

    if g.graph is not None:
        of_type, x = g.graph["a", "to", "b"], (g.x_a, g.x_b)
        return message_passing(of_type, message, x, aggr="mean")
    j, i = g.edge_index
    return pyg.aggr.MeanAggregation()(message(g.x_b[i], g.x_a[j]), i, dim_size=len(g.x_b), dim=0)


@on_ranks(3)
def test_edges_of_one_type(rank):
    data = two_types()
    graph = graph_of(data)
    with pytest.raises(ArgumentError, match=r"several types.*'a'"):
        message_passing(graph, product, graph["a"].x)
    return compare(None, between, data, graph, ("x_a", "x_b"))


def difference(x_i, x_j, *edge_values):
    return x_i - x_j


class OwnSum(pyg.aggr.Aggregation):
    def forward(self, x, index=None, ptr=None, dim_size=None, dim=-2):
        return self.reduce(x, index, ptr, dim_size, dim, reduce="sum")


class OwnLSTM(pyg.aggr.LSTMAggregation):
    """A class of one's own does not make an aggregation of PyG another one."""


NO_EXACT = "Aggregation is not known to be exact"

# arguments of message passing after the graph, and a part of the message
REFUSED = [
    (lambda g: (g.x, difference), "a function of x_i, x_j"),
    (lambda g: (difference, (g.x, g.x, g.x)), "x must be a tensor or a pair"),
    (lambda g: (difference, None), "x of sources must be a torch.Tensor"),
    (lambda g: (difference, g.with_halo(g.x)), "x of sources must have 8 rows"),
    (lambda g: (difference, [g.x, g.x[1:]]), "x of targets must have 8 rows"),
    (lambda g: (difference, g.x, g.edge_attr, wild().edge_weight), "edge value 1 must have"),
    (lambda g: (difference, g.x, "edge_attr"), "edge value 0 must"),
    (lambda g: (difference, g.x.to("meta")), "on meta"),
]
REFUSED_AGGREGATIONS = {
    "nonsense": "aggr must be",
    "lstm": "aggr must be",
    ("sum", "nonsense"): "aggr must be",
    torch.sum: "aggr must be",
    "median": f"Median{NO_EXACT}",
    OwnLSTM: f"LSTM{NO_EXACT}",
    "aggregation": NO_EXACT,
}


def made(aggr):
    if isinstance(aggr, tuple):
        return [*aggr]
    return aggr(4, 4) if isinstance(aggr, type) else aggr


def ignored(x_i, x_j):
    """Return the sources' values; a rank without edges makes its own result."""
    return x_j.sin() if len(x_j) else torch.zeros(0, x_j.shape[1], dtype=x_j.dtype)


@on_ranks(3)
def test_a_message_may_ignore_its_rows_on_one_rank(rank):
    """Backward of the exchange is collective, so its rows belong to the result on each rank."""
    graph = graph_of(wild())
    for call in (message_passing, edge_update):
        gradients = []
        for message in (ignored, lambda x_i, x_j: x_j.sin()):
            x = graph.x.clone().requires_grad_()
            with varcomm.debug(timeout=60):
                out = call(graph, message, x)
                (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
                gradients.append((first, *torch.autograd.grad(first.square().sum(), x)))
        torch.testing.assert_close(*gradients, **CLOSE)


@on_ranks(3)
def test_refused_before_any_communication(rank):
    """Rank 1 alone makes the mistake, which moves nothing; then all communicate."""
    graph = partition(wild(), method="block")

    def error_of_rank_1(where, message, step, *given, **more):
        if rank == 1:
            with pytest.raises(ArgumentError, match=f"^graph.{where}.*{message}"):
                step(*given, **more)
        assert message_passing(graph, difference, graph.x).shape == (8, 4)

    where = "message_passing on rank 1 of 3: "
    for given, message in REFUSED:
        error_of_rank_1(where, message, message_passing, graph, *given(graph))
    for aggr, message in REFUSED_AGGREGATIONS.items():
        more = {"aggr": made(aggr)}
        error_of_rank_1(where, message, message_passing, graph, difference, graph.x, **more)
    no_graph = wild(), difference, graph.x
    error_of_rank_1("message_passing: ", "graph must be a Partition", message_passing, *no_graph)
    where = "edge_update on rank 1 of 3: "
    error_of_rank_1(where, "a function of x_i, x_j", edge_update, graph, None, graph.x)
    fewer = graph, difference, graph.x, graph.edge_attr[1:]
    error_of_rank_1(where, "edge value 0 must have", edge_update, *fewer)
    own, pygs = (message_passing(graph, difference, graph.x, aggr=a) for a in (OwnSum(), "sum"))
    assert torch.equal(own, pygs)
    several = partition(wild(), method="block", hops=2)
    with pytest.raises(ArgumentError, match="2 hops"):
        message_passing(several, difference, several.x)


@on_ranks(3)
def test_all_ranks_raise_in_debug(rank):
    graph = partition(wild(), method="block")
    for message in (lambda a, b: a[1:], lambda a, b: a.sum(), lambda a, b: [a]):
        with pytest.raises(ArgumentError, match=r"message must return .*one row for each of"):
            message_passing(graph, message, graph.x)
    told = "on rank 1: graph.message_passing on rank 1 of 3: "
    with varcomm.debug(), pytest.raises(DisagreementError, match=told):
        message_passing(graph, difference, graph.x[rank % 2 :])
