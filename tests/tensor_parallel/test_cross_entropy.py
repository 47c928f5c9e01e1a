"""Values and gradients, against torch on the whole logits in one process."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.ops.comparing import Failures, assert_none
from tests.tensor_parallel.cross_entropy_cases import (
    CLASSES,
    SPLITS,
    class_weights,
    drawn,
    reference,
    targets,
)
from tests.worlds import WORLDS
from varcomm.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

OPTIONS = [
    {
        "reduction": reduction,
        "label_smoothing": smoothing,
        "smooth_over": over,
        "weight": weight,
        "z_loss": z_loss,
    }
    for reduction, (smoothing, over), weight, z_loss in product(
        ("none", "mean", "sum"),
        ((0.0, "all"), (0.3, "all"), (0.3, "wrong")),
        (None, class_weights()),
        (0.0, 0.01),
    )
]


def compare(failures, rank, sizes, whole, target, group=None, **options):
    """Compare loss and gradient with the reference, to 1e-12."""
    whole = whole.detach().clone().requires_grad_()
    want = reference(whole, target, **options)
    arriving = drawn(*want.shape, seed=5)
    (of_whole,) = torch.autograd.grad(want, whole, arriving)
    logits = whole.detach().split(sizes, -1)[rank].clone().requires_grad_()
    got = vocab_parallel_cross_entropy(logits, target, sizes, group=group, **options)
    (gradient,) = torch.autograd.grad(got, logits, arriving)
    with failures.named(sizes, options):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        expected = of_whole.split(sizes, -1)[rank]
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)
    return got


def check_options(rank, ranks):
    failures = Failures()
    target = targets(3, 4)
    for sizes in SPLITS[ranks].values():
        for options in OPTIONS:
            compare(failures, rank, sizes, 4 * drawn(3, 4, CLASSES), target, **options)
    return failures


@pytest.mark.parametrize("ranks", WORLDS)
def test_equals_torch_on_the_whole_logits(worlds, ranks):
    assert_none(worlds.run(ranks, check_options, ranks))


def in_subgroups(rank):
    failures = Failures()
    mesh = DeviceMesh("cpu", [[1, 2], [3, 4]], mesh_dim_names=("data", "tensor"))
    group = dist.new_group([1, 2, 3, 4])
    pairs = dist.new_group([2, 4])
    if rank == 0:
        return failures
    tensor = mesh["tensor"]
    whole, target = drawn(6, CLASSES, seed=(rank - 1) // 2), targets(6, seed=(rank - 1) // 2)
    compare(failures, tensor.get_local_rank(), [3, 8], whole, target, group=tensor)
    whole, target = drawn(6, CLASSES), targets(6)
    for sizes in SPLITS[4].values():
        options = {"label_smoothing": 0.2, "reduction": "mean"}
        compare(failures, rank - 1, sizes, whole, target, group=group, **options)
    if rank in (2, 4):
        compare(failures, rank // 4, [0, 11], whole, target, group=pairs)
    return failures


@pytest.mark.slow
def test_subgroups_without_rank_0(worlds):
    assert_none(worlds.run(5, in_subgroups))


def sizes_left_out(rank, sizes):
    whole, target = drawn(4, sum(sizes)), targets(4, classes=sum(sizes))
    shard = whole.split(sizes, -1)[rank]
    asked = vocab_parallel_cross_entropy(shard, target)
    return torch.equal(asked, vocab_parallel_cross_entropy(shard, target, sizes))


@pytest.mark.parametrize("sizes", [[2, 0, 5]])
def test_sizes_of_none_asks_the_ranks(worlds, sizes):
    assert worlds.run(3, sizes_left_out, sizes) == [True] * 3


def narrow(rank, dtype):
    """bf16 logits give what the same numbers in fp32 give, rounded once, for the gradient."""
    sizes = [400, 0, 613]
    whole, target = drawn(20, 1013, dtype=dtype), targets(20, classes=1013)
    shard = whole.split(sizes, -1)[rank].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(shard, target, sizes, label_smoothing=0.1)
    loss.sum().backward()
    wide = whole.double().requires_grad_()
    want = reference(wide, target, label_smoothing=0.1)
    want.sum().backward()
    error = (loss - want).abs().max().item()
    of_shard = wide.grad.split(sizes, -1)[rank]
    rounding = torch.finfo(dtype).eps / 2 * of_shard.abs() + 1e-7
    if dtype == torch.float16:
        rounding = rounding + 2.0**-25  # its smallest numbers are this far apart, twice
    within = bool(((shard.grad.double() - of_shard).abs() <= rounding).all())
    return str(loss.dtype), str(shard.grad.dtype), error, within


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_narrow_logits_are_computed_in_fp32(worlds, dtype):
    for of_loss, of_gradient, error, within in worlds.run(3, narrow, dtype):
        assert (of_loss, of_gradient) == ("torch.float32", str(dtype))
        assert error < 2e-6
        assert within


def all_ignored(rank):
    answers = {}
    for reduction in ("none", "sum", "mean"):
        logits = drawn(3, 2 + rank).requires_grad_()
        target = torch.full((3,), -100)
        loss = vocab_parallel_cross_entropy(logits, target, [2, 3], reduction=reduction)
        loss.sum().backward()
        answers[reduction] = loss.tolist(), float(logits.grad.abs().max())
    return answers


def test_all_tokens_ignored(worlds):
    """The mean is NaN, as in torch, and its gradient 0."""
    for answers in worlds.run(2, all_ignored):
        assert answers["none"] == ([0.0] * 3, 0.0)
        assert answers["sum"] == (0.0, 0.0)
        value, gradient = answers["mean"]
        assert value != value
        assert gradient == 0.0
