"""PyG's pools and aggregations by ``graph.batch``: as in one process, through two derivatives."""

from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from torch_geometric.nn import aggr
from torch_geometric.nn.models import MLP
from torch_geometric.utils import scatter, softmax

import varcomm
from tests.graph.against_one import compare
from tests.graph.batches import GRAPHS, SECOND, no_edges, partitions, whole
from tests.ops.comparing import Failures
from tests.worlds import WORLDS, on_ranks
from varcomm import ArgumentError
from varcomm.graph import distribute, partition, replicated

C = 4


def attention():
    both = {"in_channels": C, "out_channels": C, "num_heads": 2}
    return aggr.MultiAggregation(["sum", "mul"], mode="attn", mode_kwargs=both)


READOUTS = {
    "sum": aggr.SumAggregation,
    "mul": aggr.MulAggregation,
    "var, half of its gradient": lambda: aggr.VarAggregation(semi_grad=True),
    "std": aggr.StdAggregation,
    "softmax, half of its gradient": lambda: aggr.SoftmaxAggregation(t=0.5, semi_grad=True),
    "softmax, learned for each": lambda: aggr.SoftmaxAggregation(learn=True, channels=C),
    "power mean, plain": aggr.PowerMeanAggregation,
    "power mean, learned for each": lambda: aggr.PowerMeanAggregation(2.0, True, channels=C),
    "variance preserving": aggr.VariancePreservingAggregation,
    "deep sets": lambda: aggr.DeepSetsAggregation(nn.Linear(C, C), nn.Linear(C, C)),
    "attention by feature": lambda: aggr.AttentionalAggregation(nn.Linear(C, 3), nn.Linear(C, 3)),
    "attention by normalised MLPs": lambda: aggr.AttentionalAggregation(
        MLP([C, 5, 1], norm="batch_norm"), MLP([C, 5, 3], norm="graph_norm")
    ),
    "several": lambda: aggr.MultiAggregation(["sum", "mean", "max", "std", "softmax", "mul"]),
    "several, projected": lambda: aggr.MultiAggregation(
        ["min", "var"], mode="proj", mode_kwargs={"in_channels": C, "out_channels": 3}
    ),
    "several, by attention": attention,
    "several, the largest": lambda: aggr.MultiAggregation(["sum", "min", "mean"], mode="max"),
    "Set2Set": lambda: aggr.Set2Set(C, 2),
}


@on_ranks(*WORLDS)
def test_aggregations(rank):
    data, wrong = whole(C), []
    graph = partitions(data)[1]
    for name, size in product(READOUTS, (None, GRAPHS)):

        def call(module, g, name=name, size=size):
            x = g.x.abs() + 0.1 if name.startswith("power mean") else g.x
            return module(x, g.batch, dim_size=size)

        close = {"rtol": 1e-8, "atol": 1e-8} if "mul" in name else SECOND
        found = compare(READOUTS[name], call, data, graph, second=True, close=close)
        wrong += [f"{name}, {size}: {one}" for one in found]
    return wrong


POOLS = {
    reduce: lambda x, batch, size=None, reduce=reduce: scatter(x, batch, 0, size, reduce)
    for reduce in ("sum", "mean", "max", "min")
} | {"softmax": lambda x, batch, size=None: softmax(x, batch, num_nodes=size)}

# the number of graphs by that of nodes' graphs; the largest more than goes in a single round
BATCHES = {1: None, 150: 700}


@on_ranks(*WORLDS)
def test_pools(rank):
    wrong = []
    for features, is_tied, times in product(((), (2, 3)), (False, True), BATCHES):
        given = whole(*features)
        given.x = (given.x * 1.5).round() / 7 if is_tied else given.x
        given.batch = given.batch * times
        for graph, name in product(partitions(given), POOLS):

            def call(_, g, name=name, times=times):
                return POOLS[name](g.x, g.batch, BATCHES[times])

            found = compare(None, call, given, graph, second=True, close=SECOND)
            wrong += [f"{name}, {features}, {times}, {graph.method}: {one}" for one in found]
    return wrong


@on_ranks(3)
def test_dtypes(rank):
    """Narrow floats and integers."""
    failures, given, graph = Failures(), whole(C), partitions(whole(C))[0]
    ids, narrow = graph.owned_ids, (torch.float32, torch.bfloat16, torch.float16)
    for name, dtype in product(POOLS, (*narrow, torch.int32, torch.uint8)):
        if name in ("mean", "softmax") and dtype not in narrow:
            continue
        x = (given.x * 30).abs().to(dtype)
        expected = POOLS[name](x.double() if dtype in narrow else x, given.batch).to(dtype)
        rows = ids if name == "softmax" else slice(None)
        with failures.named(name, dtype):
            torch.testing.assert_close(POOLS[name](x[ids], graph.batch), expected[rows])
    return failures


@on_ranks(3)
def test_not_finite(rank):
    """Graph 0 has nothing but the lowest value, graph 1 the largest, and graph 3 has a NaN."""
    failures, given = Failures(), whole(C)
    graph = partitions(given)[0]
    ids = graph.owned_ids
    given.x[given.batch == 0, 0] = -torch.inf
    given.x[given.batch == 1, 1] = torch.inf
    for name, spoiled in product(("max", "min"), (False, True)):
        given.x[given.batch == 3, 2] = torch.nan if spoiled else 1.0
        x = given.x.clone().requires_grad_()
        expected = POOLS[name](x, given.batch)
        expected.sum().backward()
        own = given.x[ids].requires_grad_()
        got = POOLS[name](own, graph.batch)
        replicated(got.sum(), graph).backward()
        with failures.named(name, spoiled):
            torch.testing.assert_close(got, expected, equal_nan=True)
            if not spoiled:
                torch.testing.assert_close(own.grad, x.grad[ids])
    return failures


@pytest.mark.slow
@on_ranks(3)
def test_against_finite_differences(rank):
    """Any number of derivatives, and forward mode, against finite differences."""
    given = whole(2)
    graph = partitions(given)[1]
    for name in ("mean", "max", "softmax"):
        pool = partial(POOLS[name], batch=graph.batch)
        varcomm.testing.gradcheck(pool, graph.x, fast_mode=True)
        varcomm.testing.gradgradcheck(
            lambda x, pool=pool: pool(x.sin()) ** 2, graph.x, fast_mode=True
        )


# a pool, the number of graphs, bytes in a single round, and bytes by pieces of a third
SENT = [
    ("sum", 6, 8 * 24, 0),
    ("sum", 1500, 0, 2 * 8 * 6000),
    ("mean", 6, 8 * (24 + 6), 0),
    ("max", 6, (8 + 4) * 24, 0),
    ("max", 1500, 0, (8 + 4 + 8) * 6000),
    ("softmax", 6, (8 + 4 + 8) * 24, 0),
]


@on_ranks(3)
def test_no_more_is_sent_than_is_said(rank):
    graph = partitions(whole(C))[0]
    for name, size, single, pieces in SENT:
        with varcomm.trace() as calls:
            POOLS[name](graph.x, graph.batch, size)
        compared = 2 * 8 * sum(call.name == "all_reduce" for call in calls) if single else 0
        expected = 2 * (single + compared) + 2 * pieces // 3
        assert sum(call.received for call in calls) == expected, name


@on_ranks(3)
def test_a_graph_without_nodes(rank):
    graph = partition(no_edges(0, batch=torch.zeros(0, dtype=torch.int64)), method="block")
    found = [pool(torch.zeros(0, 2), graph.batch, 2).tolist() for pool in POOLS.values()]
    assert found == [[[0.0, 0.0]] * 2] * 4 + [[]]


def maxima_of_zeros(rank, data):
    graph = partition(data, method="block")
    x = torch.zeros(graph.num_owned, 1, requires_grad=True)
    scatter(x, graph.batch, 0, 1, "max").sum().backward()
    return x.grad


def test_maxima_of_zeros_have_the_gradients_of_pyg(worlds):
    """PyG starts from a 0, which takes a share of the gradient in torch 2.13."""
    data = no_edges(9)
    x = torch.zeros(9, 1, requires_grad=True)
    scatter(x, torch.zeros(9, dtype=torch.int64), 0, 1, "max").sum().backward()
    found = torch.cat(worlds.run(3, maxima_of_zeros, data))
    torch.testing.assert_close(found, 3 * x.grad)  # the loss counts once per rank


@on_ranks(3)
def test_readouts_without_a_vector(rank):
    """Inside a distributed model, a readout of rows that no vector shows is refused."""
    graph = partitions(whole(C))[0]
    local = torch.zeros(graph.num_owned, dtype=torch.int64)
    model = distribute(nn.Sequential(aggr.SumAggregation()), graph)
    for given in ({}, {"index": local}, {"ptr": torch.tensor([0, graph.num_owned])}):
        with pytest.raises(ArgumentError, match=r"Give it graph\.batch"):
            model[0](graph.x, **given)
    assert model[0](graph.x, graph.batch).shape == (GRAPHS - 1, C)
