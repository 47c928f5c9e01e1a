"""Checkpoints without output: everything as without them, but memory."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef

import varcomm
from tests.worlds import WORLDS
from varcomm import ArgumentError, ShardSizes
from varcomm.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from varcomm.tensor_parallel.checkpoint import CheckpointWithoutOutput, checkpoint
from varcomm.tensor_parallel.random import RandomStreams

DOUBLE = torch.float64
HIDDEN = 7


def randn(*shape, seed=6):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=DOUBLE, generator=generator)


class Layer:
    """A function that communicates and draws, before a product that keeps its output."""

    def __init__(self, sizes, group=None):
        self.group = group
        rank = dist.get_rank(group)
        self.first = randn(HIDDEN, 3).split(list(sizes))[rank].clone().requires_grad_()
        self.second = randn(3, HIDDEN).split(list(sizes), 1)[rank].clone().requires_grad_()
        self.last = randn(3, 3, seed=8).requires_grad_()
        self.streams = RandomStreams(7, group)
        self.runs = 0

    def function(self, x):
        self.runs += 1
        hidden = F.linear(copy_to_tensor_model_parallel_region(x, group=self.group), self.first)
        with self.streams.fork("sharded"):
            hidden = F.dropout(hidden.sin(), 0.3)
        y = F.linear(hidden, self.second)
        return reduce_from_tensor_model_parallel_region(y, group=self.group).sin()

    def kept(self, x):
        y = self.function(x)
        return x + F.linear(y, self.last).exp() * y

    def freed(self, x):
        with CheckpointWithoutOutput() as keep:
            y = keep.checkpoint(self.function, x)
            return x + F.linear(y, self.last).exp() * y


def derivatives(layer, forward):
    """First derivatives twice from one graph, and second derivatives."""
    x = randn(2, 2, 3).requires_grad_()
    leaves = [x, layer.first, layer.second, layer.last]
    y = forward(x)
    loss = y.square().sum()
    once = torch.autograd.grad(loss, leaves, retain_graph=True)
    with layer.streams.fork("sharded"):  # others draw between the runs
        torch.rand(3)
    again = torch.autograd.grad(loss, leaves, create_graph=True)
    twice = torch.autograd.grad(sum(g.square().sum() for g in again), leaves)
    return [y.detach(), *once, *(g.detach() for g in again), *twice]


def compared(rank, sizes, around, group=None):
    layer, twin = Layer(sizes, group), Layer(sizes, group)
    forward = (lambda x: checkpoint(layer.freed, x)) if around else layer.freed
    expected = derivatives(twin, twin.kept)
    found = derivatives(layer, forward)
    return all(map(torch.equal, found, expected)), layer.runs


@pytest.mark.parametrize("split", ["balanced", "all on one"])
@pytest.mark.parametrize("ranks", WORLDS)
def test_all_is_as_without(worlds, ranks, split):
    """Bit for bit, masks included; and each of the three backwards runs the function once."""
    sizes = {
        "balanced": tuple(ShardSizes.balanced(HIDDEN, ranks)),
        "all on one": (0,) * (ranks - 1) + (HIDDEN,),
    }[split]
    assert worlds.run(ranks, compared, sizes, False) == [(True, 4)] * ranks


def test_within_a_checkpoint(worlds):
    """The outer one runs it again, and then the inner one."""
    assert worlds.run(2, compared, (3, 4), True) == [(True, 7)] * 2


def weights(*shape):
    return randn(*shape, seed=3).requires_grad_()


def run_alone(forward, *leaves):
    """Return values and gradients with a block and without, and how often the function ran."""
    found = []
    for keep in (None, CheckpointWithoutOutput()):
        runs = []

        def apply(function, *args, keep=keep, runs=runs):
            def counted(*args):
                runs.append(1)
                return function(*args)

            return keep.checkpoint(counted, *args) if keep else function(*args)

        x = randn(4, 5).requires_grad_()
        if keep is None:
            y = forward(x, apply)
        else:
            with keep:
                y = forward(x, apply)
        found.append([y.detach(), *torch.autograd.grad(y.sin().sum(), [x, *leaves])])
    return all(map(torch.equal, *found)), len(runs)


def test_views_of_the_output():
    w, v = weights(3, 5), weights(4, 2)

    def forward(x, apply):
        y = apply(torch.exp, x)
        parts = F.linear(y.view(2, 2, 5), w).reshape(4, 3) * y[:, 1:4] * y.t()[2:3, :].t()
        return parts @ y.chunk(2)[1].narrow(1, 0, 3).t() @ v[:2]

    assert run_alone(forward, w, v) == (True, 2)


def test_several_outputs_and_one_after_another():
    w = weights(5, 5)

    def forward(x, apply):
        a, b = apply(lambda x: (x.exp(), x.sin()), x)
        c = apply(torch.tanh, a * w[0])
        d = apply(torch.cos, c)
        return (a @ w) * (b @ w) + (c @ w) * (d @ w) + b

    assert run_alone(forward, w) == (True, 6)


def test_an_output_that_is_changed_in_place():
    """What is kept after the change is kept as it is."""
    w = weights(5, 5)

    def forward(x, apply):
        y = apply(torch.sin, x)
        y.relu_()
        return (y @ w).tanh() * y

    assert run_alone(forward, w) == (True, 2)


def test_an_output_that_is_used_without_its_gradient():
    w = weights(5, 5)

    def forward(x, apply):
        y = apply(torch.exp, x)
        return (y.detach() @ w) * y.cos() + y.detach() * (y @ w)

    assert run_alone(forward, w) == (True, 2)


def memory(rank):
    """Where an output is after the forward, and how often it is computed for which gradients."""
    runs = []

    def function(x):
        runs.append(1)
        return x.exp()

    weight, x = weights(5, 5), randn(4, 5).requires_grad_()
    gone = []
    for keep in (CheckpointWithoutOutput(), None):
        with keep or torch.enable_grad():
            y = keep.checkpoint(function, x) if keep else checkpoint(function, x)
            output = StorageWeakRef(y.untyped_storage())
            z = y @ weight
        del y
        gone.append(output.expired())
    del z
    counts = []
    for leaves, frozen in (([weight], False), ([x], True), ([x, weight], False), ([], False)):
        runs.clear()
        with CheckpointWithoutOutput() as keep:
            y = keep.checkpoint(function, x)
            z = y @ (weight.detach() if frozen else weight)
        if leaves:
            torch.autograd.grad(z.sum(), leaves)
        counts.append(len(runs))
    return gone, counts


def test_the_output_is_free_and_computed_when_it_is_needed(worlds):
    worlds.run(1, memory)  # torch's checkpoint imports its compiler at the first call
    assert worlds.run(1, memory) == [([True, False], [2, 2, 2, 1])]


def test_other_tensors_go_to_the_hooks_around():
    """And the output does not, nor what torch's checkpoint keeps of it."""
    packed = []

    def pack(x):
        packed.append(tuple(x.shape))
        return x.clone()

    x, weight = randn(4, 5).requires_grad_(), weights(5, 3)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        with CheckpointWithoutOutput() as keep:
            y = (keep.checkpoint(torch.exp, x) @ weight).tanh()
        z = y.exp()
    assert packed == [(4, 5), (5, 3), (4, 3), (4, 3)]
    found = torch.autograd.grad(z.sum(), [x, weight])
    expected = torch.autograd.grad((x.exp() @ weight).tanh().exp().sum(), [x, weight])
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("before", [torch.clone, torch.sigmoid])
def test_a_change_in_place_of_what_is_kept_is_still_an_error(before):
    x, weight = randn(4, 5).requires_grad_(), weights(4, 5)
    with CheckpointWithoutOutput() as keep:
        kept = before(x)
        y = keep.checkpoint(torch.exp, x) * weight * kept
        kept.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_what_does_not_require_a_gradient():
    """Its output is computed again for the gradient of the weight."""
    weight, runs = weights(5, 5), []
    with CheckpointWithoutOutput() as keep:
        y = keep.checkpoint(lambda x: runs.append(1) or x.exp(), randn(4, 5))
        z = y @ weight
    assert not y.requires_grad
    (gradient,) = torch.autograd.grad(z.sum(), weight)
    assert torch.equal(gradient, randn(4, 5).exp().t() @ torch.ones(4, 5, dtype=DOUBLE))
    assert len(runs) == 2


def traffic(rank):
    layer = Layer([2, 5, 0])
    with varcomm.trace() as forward:
        y = layer.freed(randn(2, 3).requires_grad_())
    with varcomm.trace() as backward:
        y.sum().backward()
    return [call.name for call in forward], [call.name for call in backward]


def test_traffic_is_that_of_one_more_run(worlds):
    expected = ["replicated_sum"], ["replicated_sum", "replicated_sum"]
    assert worlds.run(3, traffic) == [expected] * 3


def test_another_output_when_it_is_run_again_is_refused():
    runs = []

    def function(x):
        runs.append(1)
        return x.exp() if len(runs) == 1 else x.exp().t().contiguous().t()

    x, weight = randn(4, 5).requires_grad_(), weights(5, 5)
    with CheckpointWithoutOutput() as keep:
        y = keep.checkpoint(function, x) @ weight
    with pytest.raises(ArgumentError, match="when it was run again"):
        y.sum().backward()
