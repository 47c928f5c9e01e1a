"""Aggregations over all nodes of graphs: as in one process; which of them and norms are known."""

from functools import partial
from itertools import product

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric.nn import aggr
from torch_geometric.nn.models import MLP

from tests.graph.against_one import compare
from tests.graph.batches import FIRST, GRAPHS, SECOND, as_data, partitions, plain, whole
from tests.ops.comparing import Failures, assert_none
from tests.worlds import WORLDS
from varcomm import ArgumentError
from varcomm.graph import global_norm, global_readout

C = 4


def attention(**more):
    both = {"in_channels": C, "out_channels": C, "num_heads": 2, **more}
    return aggr.MultiAggregation(["sum", "mul"], mode="attn", mode_kwargs=both)


READOUTS = {
    "sum": aggr.SumAggregation,
    "mean": aggr.MeanAggregation,
    "max": aggr.MaxAggregation,
    "min": aggr.MinAggregation,
    "mul": aggr.MulAggregation,
    "var": aggr.VarAggregation,
    "var, half of its gradient": lambda: aggr.VarAggregation(semi_grad=True),
    "std": aggr.StdAggregation,
    "std, half of its gradient": lambda: aggr.StdAggregation(semi_grad=True),
    "softmax": aggr.SoftmaxAggregation,
    "softmax, half of its gradient": lambda: aggr.SoftmaxAggregation(t=0.5, semi_grad=True),
    "softmax, learned": lambda: aggr.SoftmaxAggregation(t=0.7, learn=True),
    "softmax, learned for each": lambda: aggr.SoftmaxAggregation(learn=True, channels=C),
    "power mean": lambda: aggr.PowerMeanAggregation(p=2.0),
    "power mean, plain": aggr.PowerMeanAggregation,
    "power mean, learned": lambda: aggr.PowerMeanAggregation(p=1.5, learn=True),
    "power mean, learned for each": lambda: aggr.PowerMeanAggregation(2.0, True, channels=C),
    "variance preserving": aggr.VariancePreservingAggregation,
    "attention": lambda: aggr.AttentionalAggregation(nn.Linear(C, 1)),
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
    "one of several": lambda: aggr.MultiAggregation(["median", "sum"][1:]),
}

# these look at the sign of values, or take two dimensions alone
POSITIVE = {name for name in READOUTS if name.startswith("power mean")}
TWO_DIMENSIONS = {name for name in READOUTS if "for each" in name or "MLP" in name}


def made(name):
    torch.manual_seed(0)
    return READOUTS[name]().double()


def on(module, graph):
    """Replace what normalises as well, as a distributed model has it."""
    for part in module.modules():
        if type(part).__name__ in ("BatchNorm", "GraphNorm"):
            part.forward = global_norm(part, graph)
    module.forward = global_readout(module, graph)
    return module


# `ptr` is for rows that are sorted by their graph
WAYS = {
    "index": lambda batch: {"index": batch},
    "number of graphs": lambda batch: {"index": batch, "dim_size": GRAPHS},
    "one graph": lambda batch: {},
    "pointers": lambda batch: {
        "ptr": nn.functional.pad(batch.bincount(minlength=GRAPHS).cumsum(0), (1, 0))
    },
}


def check(rank):
    given, wrong = whole(C), []
    data = as_data(given.rows(given.batch.argsort(stable=True)))
    graph = partitions(data)[1]
    for name, way in product(READOUTS, WAYS):
        if way == "pointers" and name not in ("sum", "max", "softmax", "variance preserving"):
            continue

        def call(module, g, name=name, way=way):
            # in one process, pointers have no second derivative
            way = "number of graphs" if way == "pointers" and g.graph is None else way
            x = g.x.abs() + 0.1 if name in POSITIVE else g.x
            return module(x, **WAYS[way](plain(g.batch)))

        make = partial(made, name)
        found = compare(make, call, data, graph, put=on, second=True, close=SECOND)
        wrong += [f"{name}, {way}: {one}" for one in found]
    return wrong


@pytest.mark.parametrize("ranks", WORLDS)
def test_as_in_one_process(worlds, ranks):
    assert_none(worlds.run(ranks, check))


def check_rows(rank):
    """Other dimensions of nodes, rows of the halo, and narrow floats."""
    failures, given, (graph, idle) = Failures(), whole(C), partitions()
    cube = torch.stack([given.x.abs(), given.x.cos() + 2])
    x, ids = given.x.abs() + 0.1, torch.cat([graph.owned_ids, graph.halo_ids])
    for name in READOUTS:
        with failures.named(name, "halo"):
            got = on(made(name), graph)(x[ids], given.batch[ids])
            torch.testing.assert_close(got, made(name)(x, given.batch), **FIRST)
        for dtype, close in {torch.float32: 1e-5, torch.bfloat16: 0.06}.items():
            narrow, own = x.to(dtype), graph.owned_ids
            theirs = made(name).to(dtype)(narrow, given.batch)
            got = on(made(name).to(dtype), graph)(narrow[own], given.batch[own])
            precise = made(name).to(dtype).double()(narrow.double(), given.batch)
            with failures.named(name, dtype):
                assert got.dtype == theirs.dtype
                torch.testing.assert_close(got.double(), precise, rtol=close, atol=close)
        if name in TWO_DIMENSIONS | {"several, by attention"}:
            continue
        module, own = on(made(name), idle), idle.owned_ids
        expected = made(name)(cube, given.batch)
        with failures.named(name, "cube"):
            torch.testing.assert_close(module(cube[:, own], given.batch[own]), expected)
            first = module(cube[:, own].movedim(1, 0), given.batch[own], dim=0)
            torch.testing.assert_close(first.movedim(0, 1), expected)
    return failures


def test_other_rows(worlds):
    assert_none(worlds.run(3, check_rows))


class OwnReduce(aggr.SumAggregation):
    def reduce(self, *args, **kwargs):
        return super().reduce(*args, **kwargs) + 1


class OwnForward(aggr.SumAggregation):
    def forward(self, x, *args, **kwargs):
        return super().forward(x + 1, *args, **kwargs)


class OwnName(aggr.SumAggregation):
    pass


class OwnNorm(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x) + 1


class OwnNameOfNorm(pyg.GraphNorm):
    pass


KNOWN = [OwnName, attention]
UNKNOWN = [
    OwnReduce,
    OwnForward,
    aggr.MedianAggregation,
    lambda: aggr.LSTMAggregation(C, C),
    lambda: aggr.DeepSetsAggregation(nn.Linear(C, C)),
    lambda: aggr.MultiAggregation(["sum", "median"]),
    lambda: attention(dropout=0.1),
    lambda: nn.Linear(1, 1),
]
UNKNOWN_NORMS = [
    lambda: OwnNorm(C),
    lambda: nn.SyncBatchNorm(C),
    lambda: nn.BatchNorm2d(C),
    lambda: nn.LayerNorm(C),
    lambda: nn.InstanceNorm1d(C),
    lambda: pyg.LayerNorm(C, mode="node"),
    lambda: nn.SyncBatchNorm.convert_sync_batchnorm(pyg.BatchNorm(C)),
    lambda: pyg.MessageNorm(),
]


def test_which_modules_are_known():
    for make in KNOWN:
        global_readout(make(), None)
    global_norm(OwnNameOfNorm(C), None)
    for replace, first, makes in (
        (global_readout, "SumAggrega", UNKNOWN),
        (global_norm, "BatchNorm1d,", UNKNOWN_NORMS),
    ):
        for make in makes:
            module = make()
            message = f"^{type(module).__name__} is not known .* Known are {first}"
            with pytest.raises(ArgumentError, match=message):
                replace(module, None)


REFUSED = [
    (lambda x, index: (x[1:], index[1:]), "x must have one row"),
    (lambda x, index: (x.long(), index), "x must be of floats"),
    (lambda x, index: (x, index[1:]), "index must be of torch.int64"),
    (lambda x, index: (x, index - 1), "numbers in index"),
    (lambda x, index: (x, index + 2, None, 2), "numbers in index"),
]


def refused(rank):
    graph = partitions()[0]
    x, index = torch.ones(graph.num_owned, C), torch.zeros(graph.num_owned, dtype=torch.int64)
    module = on(aggr.SumAggregation(), graph)
    for given, message in REFUSED:
        with pytest.raises(ArgumentError, match=f"^SumAggregation on rank {rank} of 3.*{message}"):
            module(*given(x, index))


def test_refusals(worlds):
    assert worlds.run(3, refused) == [None] * 3
