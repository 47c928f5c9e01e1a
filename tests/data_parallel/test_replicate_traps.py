"""Traps that others fell into: what a sum of gradients must not do, for each way to get one.

Some are in tests/ops/test_traps.py, for the operations themselves.
"""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.data_parallel.comparing import strides
from varcomm.data_parallel import (
    mark_module_as_shared,
    no_sync,
    replicate,
    sum_gradients,
    sum_hook,
)


def by_replicate(model):
    return replicate(model), no_sync, lambda: None


def by_mark(model):
    return mark_module_as_shared(model), no_sync, lambda: None


def by_hook(model):
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    ddp.register_comm_hook(None, sum_hook)
    return ddp, lambda ddp: ddp.no_sync(), lambda: None


def by_hand(model):
    return model, lambda model: torch.enable_grad(), lambda: sum_gradients(model)


WAYS = {"replicate": by_replicate, "mark": by_mark, "hook": by_hook, "by hand": by_hand}


class Weight(nn.Module):
    """Weights that come into the loss as they are, or through something."""

    def __init__(self, *names, through=lambda x: x * 1.0):
        super().__init__()
        self.through = through
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.ones(2, 3, dtype=torch.float64)))

    def forward(self, *names):
        values = [self.through(getattr(self, name)) for name in names]
        return sum(values[1:], start=values[0])


def micro_batches(rank, way):
    """Two backwards with slope 1 on each of two ranks; a sum of grad itself would give 6."""
    model, paused, end = WAYS[way](Weight("a"))
    with paused(model):
        model("a").sum().backward()
    model("a").sum().backward()
    end()
    return {parameter.grad.unique().item() for parameter in model.parameters()}


@pytest.mark.parametrize("way", WAYS)
def test_all_reduce_of_an_accumulated_gradient(worlds, way):
    assert worlds.run(2, micro_batches, way) == [{4.0}] * 2


def as_view(x):
    return x.view(2, 3)


def two_copies(rank, way, paused):
    """The gradients of both come in as one tensor; written into, it would be summed twice.

    Through views autograd itself makes it ``grad`` of both, where it gets there; so
    DistributedDataParallel is left out.
    """
    model, pause, end = WAYS[way](Weight("a", "b", through=as_view))
    incoming = torch.ones(2, 3, dtype=torch.float64)
    for _ in range(2 if paused else 0):
        with pause(model):
            model("a", "b").backward(incoming)
    model("a", "b").backward(incoming)
    end()
    assert bool((incoming == 1).all())
    return [parameter.grad.unique().item() for parameter in model.parameters()]


@pytest.mark.parametrize("way", ["replicate", "mark", "by hand"])
def test_all_reduce_in_place_on_the_incoming_gradient(worlds, way):
    assert worlds.run(2, two_copies, way, False) == [[2.0, 2.0]] * 2
    if way != "by hand":
        assert worlds.run(2, two_copies, way, True) == [[6.0, 6.0]] * 2


class Transposed(nn.Module):
    """A weight that is not contiguous, nor is what its gradient comes in as."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2, dtype=torch.float64).t())

    def forward(self, x):
        return (self.weight * x).sum()


def of_a_strided_gradient(rank, way):
    model, _, end = WAYS[way](Transposed())
    x = torch.arange(6, dtype=torch.float64).view(2, 3)
    model(x + rank).backward()
    end()
    (parameter,) = model.parameters()
    assert strides(parameter.grad) == strides(parameter)
    return parameter.grad.flatten().tolist()


@pytest.mark.parametrize("way", WAYS)
def test_all_reduce_of_a_contiguous_copy(worlds, way):
    assert worlds.run(2, of_a_strided_gradient, way) == [[1.0, 3.0, 5.0, 7.0, 9.0, 11.0]] * 2


def unused_on_one_rank(rank, way):
    """A hook of each parameter would wait for the rank that does not come to it."""
    model, _, end = WAYS[way](Weight("a", "b", "c"))
    model(*(("a", "b") if rank else ("b",))).sum().backward()
    end()
    return [None if p.grad is None else p.grad.unique().item() for p in model.parameters()]


@pytest.mark.parametrize("way", WAYS)
def test_a_parameter_that_is_unused_on_one_rank(worlds, way):
    nobody = 0.0 if way == "by hand" else None
    assert worlds.run(3, unused_on_one_rank, way) == [[2.0, 3.0, nobody]] * 3
