"""The optimizer that a factory makes of the pieces: of all of them, and nothing else."""

import re

import pytest
import torch
from torch import nn

from tests.data_parallel.sharded_cases import plain
from tests.data_parallel.test_sharded_setup import linear
from varcomm import ArgumentError
from varcomm.data_parallel.sharded import ShardedGradients


def with_foreign(groups):
    return torch.optim.SGD([*groups, {"params": [nn.Parameter(torch.ones(2))]}], lr=0.1)


def with_the_model(groups):
    return torch.optim.SGD(KEPT_MODEL[0].parameters(), lr=0.1)


KEPT_MODEL = []


def lacking(groups):
    return torch.optim.SGD(groups[0]["params"][:1], lr=0.1)


def in_two_groups(groups):
    return torch.optim.SGD([{"params": [p]} for p in groups[0]["params"]], lr=0.1)


def raising(groups):
    raise RuntimeError("no memory, say")


FACTORIES = {
    "foreign": (with_foreign, "the optimizer holds 1 tensors that it was not given, the first of "),
    "the model's": (
        with_the_model,
        "the optimizer holds 2 tensors that it was not given, the first of shape (2, 3).",
    ),
    "lacking": (lacking, "the optimizer lacks 1 of the tensors that it was given: pieces of "),
    "groups": (
        in_two_groups,
        "the optimizer has 2 groups of parameters, and the factory was given",
    ),
    "none": (lambda groups: None, "optimizer_factory must return a torch.optim.Optimizer; got Non"),
    "not callable": (3, "optimizer_factory must be callable as optimizer_factory(groups), as in "),
    "raising": (raising, "no memory, say"),
    "LBFGS": (torch.optim.LBFGS, "LBFGS needs products of whole gradients, and a rank has pieces."),
    "Adafactor": (torch.optim.Adafactor, "Adafactor needs whole matrices. Pass sizes="),
    "Muon": (torch.optim.Muon, "Muon only supports 2D parameters"),
}


def reordered(rank):
    model = linear()
    groups = [{"params": [p], "lr": 0.1 * p.dim()} for p in model.parameters()]
    with pytest.raises(ArgumentError) as caught:
        ShardedGradients(groups, lambda own: torch.optim.SGD(own[:: -1 if rank else 1], lr=0.1))
    return str(caught.value)


def test_groups_in_another_order_are_refused_on_all(worlds):
    start = "data_parallel.ShardedGradients: optimizer_factory: refused on rank 1 of 2: group 0 of "
    assert all(text.startswith(start) for text in worlds.run(2, reordered))


def factory(rank, what):
    model = linear()
    KEPT_MODEL[:] = [model]
    make = FACTORIES[what][0] if rank == 1 or what in ("LBFGS", "Adafactor", "Muon") else plain
    with pytest.raises(ArgumentError) as caught:
        ShardedGradients(model, make, sizes=[1, 7])
    own = ShardedGradients(model, plain, reduce="sum")  # which nothing stands in the way of
    model(torch.ones(1, 3)).sum().backward()
    return str(caught.value), sum(piece.value.grad.sum().item() for piece in own.pieces.values())


@pytest.mark.parametrize("what", FACTORIES)
def test_optimizers_of_something_else_are_refused_on_all(worlds, what):
    told, sums = zip(*worlds.run(2, factory, what), strict=True)
    said = re.escape(FACTORIES[what][1])
    start = (
        rf"data_parallel\.ShardedGradients: optimizer_factory: refused on rank [01] of 2.*: {said}"
    )
    assert all(re.match(start, text) for text in told)
    assert told[0] == told[1]
    assert sum(sums) == 16.0
