"""Aggregations over all nodes of graphs that span ranks: as PyG in one process."""

import pytest
import torch
from torch import nn
from torch_geometric.nn import aggr
from torch_geometric.nn.models import MLP

import varcomm
from tests.graph.batches import FIRST, GRAPHS, SECOND, derivatives, partitions, whole
from tests.graph.pools import curved
from tests.ops.comparing import Failures, assert_none
from tests.worlds import WORLDS
from varcomm import ArgumentError
from varcomm.graph import global_norm, global_readout, replicated

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


def applied(module, x, given, loss, total):
    leaves = [x.clone().requires_grad_(), *module.parameters()]
    return derivatives(lambda: module(leaves[0], **given), leaves, loss, total)


def ways(given, sorted_ids):
    """Ways to call; `ptr` is for rows that are sorted by their graph."""
    yield {"index": given.batch}
    yield {"index": given.batch, "dim_size": GRAPHS}
    yield {}
    if sorted_ids:
        counts = given.batch.bincount(minlength=GRAPHS)
        yield {"ptr": torch.cat([counts.new_zeros(1), counts.cumsum(0)])}


def check(rank):
    failures, seen = Failures(), []
    for name in READOUTS:
        check_readout(failures, seen, name)
    return failures, seen


def check_readout(failures, seen, name):
    given = whole(C)
    given = given.rows(given.batch.argsort(stable=True))
    x = given.x.abs() + 0.1 if name in POSITIVE else given.x
    graphs = partitions()[1:]
    by_pointers = name in ("sum", "max", "softmax", "variance preserving")
    for number, more in enumerate(ways(given, by_pointers)):
        by_index = {"index": given.batch, "dim_size": GRAPHS}  # ptr has no second derivative
        alone = by_index if "ptr" in more else more
        expected = applied(made(name), x, alone, curved, torch.sum)
        with failures.named(name, number, "in one process"):
            torch.testing.assert_close(made(name)(x, **more), expected[0], **FIRST)
        for graph in graphs:
            ids, module = graph.owned_ids, on(made(name), graph)
            own = list(ways(given.rows(ids), by_pointers))[number]

            def loss(out, graph=graph):
                return replicated(curved(out), graph)

            got = applied(module, x[ids], own, loss, graph.sum)
            seen.append(got[0])
            with failures.named(name, number, graph.method):
                torch.testing.assert_close(got[0], expected[0], **FIRST)
            for kind, close in ((1, FIRST), (2, SECOND)):
                mine, *others = got[kind]
                with failures.named(name, number, graph.method, "derivatives", kind):
                    torch.testing.assert_close(mine, expected[kind][0][ids], **close)
                others = [varcomm.all_reduce(gradient) for gradient in others]
                for one, two in zip(others, expected[kind][1:], strict=True):
                    with failures.named(name, number, graph.method, "parameters", kind):
                        torch.testing.assert_close(one, two, **close)


@pytest.mark.parametrize("ranks", WORLDS)
def test_as_in_one_process(worlds, ranks):
    results = worlds.run(ranks, check)
    assert_none([failures for failures, _ in results])
    first, *others = (seen for _, seen in results)
    for other in others:
        assert all(map(torch.equal, first, other)), "ranks differ"


def check_cube(rank):
    """Nodes along the last dimension but one, as PyG has them, or along another."""
    failures, given = Failures(), whole(C)
    cube = torch.stack([given.x.abs(), given.x.cos() + 2])
    for name in sorted(READOUTS.keys() - TWO_DIMENSIONS - {"several, by attention"}):
        for graph in partitions()[1:]:
            ids = graph.owned_ids
            module = on(made(name), graph)
            expected = made(name)(cube, given.batch)
            with failures.named(name):
                torch.testing.assert_close(module(cube[:, ids], given.batch[ids]), expected)
                first = module(cube[:, ids].movedim(1, 0), given.batch[ids], dim=0)
                torch.testing.assert_close(first.movedim(0, 1), expected)
    return failures


def check_halo(rank):
    failures, given = Failures(), whole(C)
    for name in sorted(READOUTS):
        graph = partitions()[0]
        ids = torch.cat([graph.owned_ids, graph.halo_ids])
        x = given.x.abs() + 0.1
        got = on(made(name), graph)(x[ids], given.batch[ids])
        with failures.named(name):
            torch.testing.assert_close(got, made(name)(x, given.batch), **FIRST)
    return failures


def check_narrow(rank):
    failures, given = Failures(), whole(C)
    graph = partitions()[0]
    for name in sorted(READOUTS):
        for dtype, close in {torch.float32: 1e-5, torch.bfloat16: 0.06}.items():
            x = (given.x.abs() + 0.1).to(dtype)
            theirs = made(name).to(dtype)(x, given.batch)
            got = on(made(name).to(dtype), graph)(x[graph.owned_ids], given.batch[graph.owned_ids])
            with failures.named(name, dtype):
                assert got.dtype == theirs.dtype
                precise = made(name).to(dtype).double()(x.double(), given.batch)
                torch.testing.assert_close(got.double(), precise, rtol=close, atol=close)
    return failures


@pytest.mark.parametrize("check", [check_cube, check_halo, check_narrow])
def test_other_rows(worlds, check):
    assert_none(worlds.run(3, check))


class OwnReduce(aggr.SumAggregation):
    def reduce(self, *args, **kwargs):
        return super().reduce(*args, **kwargs) + 1


class OwnForward(aggr.SumAggregation):
    def forward(self, x, *args, **kwargs):
        return super().forward(x + 1, *args, **kwargs)


class OwnName(aggr.SumAggregation):
    pass


@pytest.mark.parametrize(
    ("make", "known"),
    [
        (OwnName, True),
        (OwnReduce, False),
        (OwnForward, False),
        (aggr.MedianAggregation, False),
        (lambda: aggr.LSTMAggregation(C, C), False),
        (lambda: aggr.DeepSetsAggregation(nn.Linear(C, C)), False),
        (lambda: aggr.MultiAggregation(["sum", "median"]), False),
        (attention, True),
        (lambda: attention(dropout=0.1), False),
        (lambda: nn.Linear(1, 1), False),
    ],
)
def test_which_modules_are_known(make, known):
    module = make()
    if known:
        global_readout(module, None)
    else:
        name = type(module).__name__
        with pytest.raises(ArgumentError, match=f"^{name} is not known .* Known are SumAggrega"):
            global_readout(module, None)


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
