"""Checkpoints without output: everything as without them, but memory."""

import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from tests.tensor_parallel.test_checkpoint import Layer, derivatives, splits
from tests.tensor_parallel.twins import drawn
from tests.worlds import WORLDS, on_ranks
from varcomm import ArgumentError
from varcomm.tensor_parallel.checkpoint import CheckpointWithoutOutput, checkpoint


def leaf(seed, *shape):
    return drawn(seed, *shape).requires_grad_()


class Before(Layer):
    """A function that communicates and draws, before a product that keeps its output."""

    def __init__(self, sizes):
        super().__init__(sizes)
        self.last = drawn(8, 3, 3).requires_grad_()

    def used(self, x, y):
        return x + F.linear(y, self.last).sin() * y

    def kept(self, x):
        return self.used(x, self(x))

    def freed(self, x):
        with CheckpointWithoutOutput() as keep:
            return self.used(x, keep.checkpoint(self, x))


class AsMegatron(Before):
    """Without a block: between two calls."""

    def freed(self, x):
        keep = CheckpointWithoutOutput()
        result = self.used(x, keep.checkpoint(self, x))
        keep.discard_output_and_register_recompute(result)
        return result


WAYS = {
    "in a block": (Before, lambda layer: layer.freed),
    "without a block": (AsMegatron, lambda layer: layer.freed),
    # which runs it again, and then the inner one
    "within a checkpoint": (Before, lambda layer: lambda x: checkpoint(layer.freed, x)),
}


def compared(rank, sizes, way):
    make, forward = WAYS[way]
    layer, twin = make(sizes), Before(sizes)
    expected = derivatives(twin, twin.kept, twin.last)
    found = derivatives(layer, forward(layer), layer.last)
    return all(map(torch.equal, found, expected)), layer.runs


@pytest.mark.parametrize("split", ["balanced", "all on one"])
@pytest.mark.parametrize("ranks", WORLDS)
def test_all_is_as_without(worlds, ranks, split):
    """Bit for bit, masks included; and each of the three backwards runs the function once."""
    assert worlds.run(ranks, compared, splits(ranks)[split], "in a block") == [(True, 4)] * ranks


@pytest.mark.parametrize(("way", "runs"), [("within a checkpoint", 7), ("without a block", 4)])
def test_other_ways(worlds, way, runs):
    assert worlds.run(2, compared, (3, 4), way) == [(True, runs)] * 2


@on_ranks(2)
def test_without_a_block(rank):
    """It needs no gradient, and no block around it."""
    layer, x = AsMegatron((3, 4)), drawn(4, 3, 3)
    with torch.no_grad():
        layer.freed(x)
    with CheckpointWithoutOutput() as keep, pytest.raises(ArgumentError, match="leave this call"):
        keep.discard_output_and_register_recompute(keep.checkpoint(torch.exp, x))


def views(x, apply, w):
    y = apply(torch.exp, x)
    parts = F.linear(y.view(2, 2, 5), w[:3]).reshape(4, 3) * y[:, 1:4] * y.t()[2:3, :].t()
    return parts @ y.chunk(2)[1].narrow(1, 0, 3).t() @ w[:2, :2]


def one_after_another(x, apply, w):
    a, b = apply(lambda x: (x.exp(), x.sin()), x)
    c = apply(torch.tanh, a * w[0])
    d = apply(torch.cos, c)
    return (a @ w) * (b @ w) + (c @ w) * (d @ w) + b


def changed_in_place(x, apply, w):
    """What is kept after the change is kept as it is."""
    y = apply(torch.sin, x)
    y.relu_()
    return (y @ w).tanh() * y


def without_its_gradient(x, apply, w):
    y = apply(torch.exp, x)
    return (y.detach() @ w) * y.cos() + y.detach() * (y @ w)


@pytest.mark.parametrize(
    ("forward", "expected"),
    [(views, 2), (one_after_another, 6), (changed_in_place, 2), (without_its_gradient, 2)],
)
def test_uses_of_outputs(forward, expected):
    """Values and gradients with a block are those without, and the function runs twice."""
    w, runs = leaf(3, 5, 5), []

    def counted(function, x):
        return keep.checkpoint(lambda x: runs.append(1) or function(x), x)

    def pulled(y, x):
        return [y.detach(), *torch.autograd.grad(y.sin().sum(), [x, w])]

    x = leaf(6, 4, 5)
    plain = pulled(forward(x, lambda function, x: function(x), w), x)
    with CheckpointWithoutOutput() as keep:
        y = forward(x, counted, w)
    assert all(map(torch.equal, pulled(y, x), plain))
    assert len(runs) == expected


def memory(rank):
    """Where an output is after the forward, and how often it is computed for which gradients."""
    weight, x, runs, gone, counts = leaf(3, 5, 5), leaf(6, 4, 5), [], [], []
    cases = ([weight], weight), ([x], weight.detach()), ([x, weight], weight), ([], weight)
    for leaves, used in cases:
        runs.clear()
        with CheckpointWithoutOutput() as keep:
            y = keep.checkpoint(lambda x: runs.append(1) or x.exp(), x)
            output = StorageWeakRef(y.untyped_storage())
            z = y @ used
        del y
        gone.append(output.expired())
        if leaves:
            torch.autograd.grad(z.sum(), leaves)
        counts.append(len(runs))
    return gone, counts


def test_the_output_is_free_and_computed_when_it_is_needed(worlds):
    worlds.run(1, memory)  # torch's checkpoint imports its compiler at the first call
    assert worlds.run(1, memory) == [([True] * 4, [2, 2, 2, 1])]


def test_other_tensors_go_to_the_hooks_around():
    """And the output does not, nor what torch's checkpoint keeps of it."""
    packed = []

    def pack(x):
        packed.append(tuple(x.shape))
        return x.clone()

    x, weight = leaf(6, 4, 5), leaf(3, 5, 3)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        torch_checkpoint(torch.exp, x, use_reentrant=False)
        of_torch = packed[:]  # x; before torch 2.13 an empty tensor as well
        with CheckpointWithoutOutput() as keep:
            y = (keep.checkpoint(torch.exp, x) @ weight).tanh()
        z = y.exp()
    assert packed == [*of_torch, *of_torch, (5, 3), (4, 3), (4, 3)]
    found = torch.autograd.grad(z.sum(), [x, weight])
    expected = torch.autograd.grad((x.exp() @ weight).tanh().exp().sum(), [x, weight])
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("before", [torch.clone, torch.sigmoid])
def test_a_change_in_place_of_what_is_kept_is_still_an_error(before):
    x, weight = leaf(6, 4, 5), leaf(3, 4, 5)
    with CheckpointWithoutOutput() as keep:
        kept = before(x)
        y = keep.checkpoint(torch.exp, x) * weight * kept
        kept.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_another_output_when_it_is_run_again_is_refused():
    runs = []

    def function(x):
        runs.append(1)
        return x.exp() if len(runs) == 1 else x.exp().t().contiguous().t()

    x, weight = leaf(6, 4, 5), leaf(3, 5, 5)
    with CheckpointWithoutOutput() as keep:
        y = keep.checkpoint(function, x) @ weight
    with pytest.raises(ArgumentError, match="when it was run again"):
        y.sum().backward()
