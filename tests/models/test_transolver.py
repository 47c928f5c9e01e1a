"""Transolver and cross-attention alone, and with points spread over ranks."""

import copy
from functools import partial

import pytest
import torch

import varcomm as vc
from tests.ops.comparing import Failures
from tests.worlds import WORLDS, on_ranks
from varcomm import ArgumentError
from varcomm.data_parallel import sum_gradients
from varcomm.models import PointCrossAttention, Transolver

CLOSE = {"rtol": 1e-9, "atol": 1e-10}
SIZES = {1: [11], 2: [4, 7], 3: [6, 0, 5], 5: [1, 0, 7, 0, 3]}
QUERIES = {1: [3], 2: [3, 0], 3: [0, 2, 1], 5: [0, 1, 0, 0, 2]}


def rows(count, *shape, seed=0):
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(count, *shape, dtype=torch.float64, generator=draws)


def derivatives(model, inputs, call, total, complete):
    """Yield the result, gradients of a loss, and gradients of the squared gradient of inputs."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    parameters = [*model.parameters()]
    out = call(model, *inputs)
    loss = total(out.sin())
    first = torch.autograd.grad(loss, [*inputs, *parameters], create_graph=True)
    squared = sum(total(x.square()) for x in first[: len(inputs)])
    second = torch.autograd.grad(squared, [*inputs, *parameters], allow_unused=True)
    yield "out", [out]
    for name, found in (("first", first), ("second", second)):
        yield f"{name} of inputs", found[: len(inputs)]
        for parameter, gradient in zip(parameters, found[len(inputs) :], strict=True):
            parameter.grad = None if gradient is None else gradient.detach().clone()
        complete(model)
        yield f"{name} of parameters", [p.grad for p in parameters]


def compare(failures, label, model, inputs, sizes, call):
    """Compare `call` on shards of these sizes with the same in one process."""
    whole = derivatives(
        copy.deepcopy(model), inputs, lambda m, *x: m(*x), torch.sum, lambda model: None
    )
    shards = [vc.shard_v(x, rows) for x, rows in zip(inputs, sizes, strict=True)]

    def total(x):
        return vc.all_reduce(x.sum()) / vc.init().size  # identical on all ranks, counted once

    on_ranks = derivatives(copy.deepcopy(model), shards, call, total, sum_gradients)
    for (name, got), (_, wanted) in zip(on_ranks, whole, strict=True):
        for place, (x, y) in enumerate(zip(got, wanted, strict=True)):
            if y is None:
                continue
            if "inputs" in name or name == "out":
                y = vc.shard_v(y, sizes[place])
            with failures.named(label, name, place):
                torch.testing.assert_close(x, y, **CLOSE)


@on_ranks(*WORLDS)
def test_points_on_ranks(rank, ranks):
    failures, sizes = Failures(), SIZES[ranks]
    torch.manual_seed(0)
    shape = {"hidden_channels": 6, "num_blocks": 2, "num_heads": 2, "num_slices": 3}
    model = Transolver(3, 2, **shape, mlp_channels=5).double()
    for label, x in (("points", rows(11, 3)), ("samples", rows(11, 2, 3))):
        with vc.trace() as calls:
            model(vc.shard_v(x, sizes), sizes)
        with failures.named(label, "calls"):
            assert [call.name for call in calls] == ["all_reduce"] * 2
        compare(failures, label, model, [x], [sizes], lambda m, x: m(x, sizes))
    return failures


def called(sizes, model, queries, points):
    return model(queries, points, *sizes)


@pytest.mark.slow
@on_ranks(1, 2, 3, 5)
def test_queries_on_ranks(rank, ranks):
    failures = Failures()
    torch.manual_seed(0)
    model = PointCrossAttention(6, 2).double()
    few, many = QUERIES[ranks], SIZES[ranks]
    for label, sizes in (("few queries", (few, many)), ("few points", (many, few))):
        inputs = [rows(sum(count), 6, seed=seed) for seed, count in enumerate(sizes)]
        inputs[1] *= 40  # scores of hundreds
        compare(failures, label, model, inputs, sizes, partial(called, sizes))
    nothing = model(rows(few[rank], 6), rows(0, 6), few, [0] * ranks)
    with failures.named("no points"):
        torch.testing.assert_close(nothing, model.out.bias.expand(few[rank], 6))
    return failures


@pytest.mark.slow
@on_ranks(3)
def test_bf16(rank):
    """A sum in bf16 over many points would lose them."""
    torch.manual_seed(0)
    model = Transolver(3, 1, hidden_channels=8, num_blocks=1, num_heads=2, num_slices=4)
    x, sizes = torch.rand(5000, 3), [4000, 0, 1000]
    out = copy.deepcopy(model).bfloat16()(vc.shard_v(x, sizes).bfloat16(), sizes)
    assert ((out.float() - vc.shard_v(model(x), sizes)).abs() < 0.05).all()


@on_ranks(3)
def test_refusals(rank):
    model = Transolver(3, 1, hidden_channels=4, num_blocks=1, num_heads=2, num_slices=2)
    with pytest.raises(ArgumentError, match=r"has 2 rows along dim 0"):
        model(torch.rand(2, 3), [1, 1, 1])
    with pytest.raises(ArgumentError, match="sizes of queries and of points"):
        PointCrossAttention(4, 2)(torch.rand(1, 4), torch.rand(1, 4), [1, 1, 1])
    attention, ones = PointCrossAttention(4, 2), torch.ones(1, 4)
    for sizes in ((), ([1, 1, 1], [1, 1, 1])):
        with pytest.raises(ArgumentError, match=r"points must be .*\(rows, 4\).*once per sample"):
            attention(ones, torch.ones(1, 2, 4), *sizes)
    with pytest.raises(ArgumentError, match=r"queries must be .*; got \(1, 3\)"):
        attention(torch.ones(1, 3), ones)
    with pytest.raises(ArgumentError, match="multiple of num_heads"):
        Transolver(3, 1, hidden_channels=5, num_blocks=1, num_heads=2, num_slices=2)
