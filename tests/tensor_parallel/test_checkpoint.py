"""Checkpoints: everything as without them, but memory."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import varcomm
from tests.tensor_parallel.twins import drawn
from tests.worlds import on_ranks
from varcomm import ArgumentError, ShardSizes
from varcomm.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_split_1d_tensor,
    reduce_from_tensor_model_parallel_region,
    split_tensor_into_1d_equal_chunks,
)
from varcomm.tensor_parallel.checkpoint import checkpoint
from varcomm.tensor_parallel.random import RandomStreams

HIDDEN = 7


def splits(ranks):
    return {
        "balanced": tuple(ShardSizes.balanced(HIDDEN, ranks)),
        "all on one": (0,) * (ranks - 1) + (HIDDEN,),
    }


class Layer:
    """Two products whose hidden dimension is sharded, with dropout of both kinds."""

    def __init__(self, sizes):
        rank = dist.get_rank()
        self.first = drawn(1, HIDDEN, 3).split(list(sizes))[rank].clone().requires_grad_()
        self.second = drawn(2, 3, HIDDEN).split(list(sizes), 1)[rank].clone().requires_grad_()
        self.streams, self.runs = RandomStreams(7), 0

    def __call__(self, x):
        self.runs += 1
        hidden = F.linear(copy_to_tensor_model_parallel_region(x), self.first)
        with self.streams.fork("sharded"):
            hidden = F.dropout(hidden.sin(), 0.3)
        y = reduce_from_tensor_model_parallel_region(F.linear(hidden, self.second))
        with self.streams.fork("replicated"):
            return x + F.dropout(y.exp(), 0.3)


def plain(function, *args):
    return function(*args)


def distributed(function, x):
    """The recipe of the docstring: each rank keeps a piece of a replicated input."""

    def from_piece(piece):
        return function(gather_split_1d_tensor(piece, numel).view(shape))

    shape, numel = x.shape, x.numel()
    return checkpoint(from_piece, split_tensor_into_1d_equal_chunks(x))


def derivatives(layer, forward, *more):
    """First derivatives twice from one graph, and second derivatives."""
    x = drawn(6, 4, 3).requires_grad_()
    y = forward(x)
    leaves = [x, layer.first, layer.second, *more]
    loss = (y**2).sum()
    once = torch.autograd.grad(loss, leaves, retain_graph=True)
    with layer.streams.fork("sharded"):  # others draw between the runs
        torch.rand(3)
    again = torch.autograd.grad(loss, leaves, create_graph=True)
    twice = torch.autograd.grad(sum(g.square().sum() for g in again), leaves)
    return [y.detach(), *once, *(g.detach() for g in again), *twice]


WAYS = {
    "whole": checkpoint,
    "distributed": distributed,
    "nested": lambda function, x: checkpoint(lambda x: distributed(function, x), x),
}


@pytest.mark.parametrize(
    ("ranks", "split", "how"),
    [
        (1, "balanced", "distributed"),
        (3, "balanced", "nested"),
        (3, "all on one", "distributed"),
        pytest.param(3, "balanced", "whole", marks=pytest.mark.slow),
        pytest.param(2, "all on one", "nested", marks=pytest.mark.slow),
        pytest.param(5, "balanced", "distributed", marks=pytest.mark.slow),
    ],
)
@on_ranks()
def test_all_is_as_without_a_checkpoint(rank, ranks, split, how):
    """Bit for bit, masks included; and streams are afterwards where they would be without."""
    layer, twin = (Layer(splits(ranks)[split]) for _ in range(2))

    def repeated(apply, layer, x):
        for _ in range(2):
            x = apply(layer, x)
        return x

    expected = derivatives(twin, partial(repeated, plain, twin))
    found = derivatives(layer, partial(repeated, WAYS[how], layer))
    states = [each.streams.state_dict() for each in (twin, layer)]
    assert all(torch.equal(*(state[name]["cpu"] for state in states)) for name in states[0])
    assert all(map(torch.equal, found, expected))
    assert layer.runs > 2


@on_ranks(2, timeout=30)
def test_all_ranks_run_the_function_to_its_end(rank):
    """Only rank 0 keeps something after a collective that is no part of the graph.

    With torch's early stop rank 1 would leave rank 0 waiting.
    """
    weight = torch.full((2,), 2.0, requires_grad=True)

    def function(x):
        y = x * weight
        total = varcomm.all_reduce(y.detach())
        return (y * total).square() if rank == 0 else y + total

    y = checkpoint(function, torch.ones(2))
    y.sum().backward()
    assert weight.grad.tolist() == [1.0 if rank else 64.0] * 2


@on_ranks(1)
def test_a_function_that_forks_others_when_it_is_run_again(rank):
    streams, runs = RandomStreams(7), []

    def function(x):
        runs.append(1)
        if len(runs) > 1:
            with streams.fork("sharded"):
                torch.rand(1)
        return x.exp()

    y = checkpoint(function, torch.ones(1, requires_grad=True))
    with pytest.raises(ArgumentError, match="checkpointed function forks streams in a later"):
        y.backward()
