"""Losses of logits, and of hidden states and a head: values and derivatives of all orders."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.ops.comparing import Failures
from tests.tensor_parallel.cross_entropy_cases import (
    ROWS,
    SPLITS,
    class_weights,
    of_hidden,
    of_logits,
    reference,
    targets,
)
from tests.tensor_parallel.twins import compare, drawn
from tests.worlds import WORLDS, on_ranks
from varcomm.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    linear_cross_entropy,
    reduce_from_tensor_model_parallel_region,
    vocab_parallel_cross_entropy,
)
from varcomm.testing import gradcheck

BOUND = {"rtol": 1e-12, "atol": 1e-12}
RICH = {"label_smoothing": 0.3, "weight": class_weights(), "z_loss": 0.01}
OPTIONS = [
    {"reduction": reduction, **others}
    for reduction, others in product(
        ("none", "mean", "sum"),
        ({}, {"z_loss": 0.01}, {"weight": class_weights()}, RICH),
    )
]


@on_ranks(*WORLDS)
def test_equals_torch_on_the_whole_logits(rank, ranks):
    failures = []
    for sizes in SPLITS[ranks]:
        for options in OPTIONS:
            case, second = of_logits(sizes, targets(3, 4), **options), options is OPTIONS[-1]
            failures += compare(*case, bound=BOUND, second=second)
        for options in OPTIONS[3::2]:
            for rows in (None, ROWS[ranks]):
                case = of_hidden(sizes, targets(5, 2), rows, **options)
                failures += compare(*case, bound=BOUND, second=False)
        failures += compare(*of_hidden(sizes, targets(5, 2), **RICH), bound=BOUND)
    return failures


@on_ranks(3)
def test_tokens_of_any_shape(rank):
    cases = [of_hidden([5, 0, 6], targets(*s)) for s in ((), (0,), (2, 3, 2), (2, 0))]
    cases.append(of_logits([5, 0, 6], targets(2, 0)))
    return [failure for case in cases for failure in compare(*case, bound=BOUND)]


@on_ranks(3)
def test_several_chunks(rank):
    """Each rank has 20,000 columns, so that 60 tokens are several chunks."""
    sizes, target = [20_000] * 3, targets(3, 20, classes=60_000)
    options = {"label_smoothing": 0.3, "weight": class_weights(60_000)}
    cases = of_logits(sizes, target, **options), of_hidden(sizes, target, **options)
    return [failure for case in cases for failure in compare(*case, bound=BOUND, second=False)]


@pytest.mark.slow
@on_ranks(5)
def test_subgroups_without_rank_0(rank):
    group, pairs = dist.new_group([1, 2, 3, 4]), dist.new_group([2, 4])
    if rank == 0:
        return []
    failures = compare(*of_logits([0, 7, 0, 4], targets(6), group), group=group)
    if rank in (2, 4):
        failures += compare(*of_logits([0, 11], targets(6), pairs), group=pairs)
    return failures


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@on_ranks(3)
def test_narrow_logits_are_computed_in_fp32(rank, dtype):
    """Narrow logits give the loss of the same numbers in fp32, and a gradient rounded once."""
    sizes = [400, 0, 613]
    whole, target = drawn(0, 20, 1013, dtype=dtype), targets(20, classes=1013)
    shard = whole.split(sizes, -1)[rank].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(shard, target, sizes, label_smoothing=0.1)
    loss.sum().backward()
    wide = whole.double().requires_grad_()
    want = reference(wide, target, label_smoothing=0.1)
    want.sum().backward()
    of_shard = wide.grad.split(sizes, -1)[rank]
    rounding = torch.finfo(dtype).eps / 2 * of_shard.abs() + 1e-7
    assert (loss.dtype, shard.grad.dtype) == (torch.float32, dtype)
    assert (loss - want).abs().max() < 2e-6
    assert bool(((shard.grad.double() - of_shard).abs() <= rounding).all())


@pytest.mark.parametrize("autocast", [False, True])
@on_ranks(3)
def test_narrow_hidden_states(rank, autocast):
    """The same as of logits made at once, up to the rounding of gradients to bf16."""
    sizes, target = [40, 0, 23], targets(30, classes=63)
    dtype, failures = torch.float32 if autocast else torch.bfloat16, Failures()
    given = drawn(0, 30, 16, dtype=dtype), drawn(1, 63, 16, dtype=dtype).split(sizes)[rank]

    def pulled(fn):
        inputs = [x.clone().requires_grad_() for x in given]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = fn(*inputs)
        loss.sum().backward()
        return loss.detach(), *(x.grad for x in inputs)

    def at_once(hidden, head):
        used = copy_to_tensor_model_parallel_region(hidden)
        return vocab_parallel_cross_entropy(F.linear(used, head), target, sizes)

    found = pulled(lambda *x: linear_cross_entropy(*x, target, sizes))
    for got, want, bound in zip(found, pulled(at_once), (1e-5, 2e-2, 2e-2), strict=True):
        with failures.named(got.shape, got.dtype):
            torch.testing.assert_close(got, want, rtol=bound, atol=bound)
    return failures


@on_ranks(2)
def test_all_tokens_ignored(rank):
    """The mean is NaN, as in torch, and its gradient 0."""
    for reduction in ("none", "sum", "mean"):
        logits = drawn(0, 3, 2 + rank).requires_grad_()
        target = torch.full((3,), -100)
        loss = vocab_parallel_cross_entropy(logits, target, [2, 3], reduction=reduction)
        loss.sum().backward()
        assert bool(loss.isnan().all() if reduction == "mean" else (loss == 0).all())
        assert not logits.grad.any()


@on_ranks(*WORLDS[:3])
def test_forward_mode(rank, ranks):
    """Finite differences; results, and rows of hidden states, differ between ranks."""
    sizes, rows = {1: ([5], [3]), 2: ([2, 3], [1, 2]), 3: ([3, 0, 2], [2, 0, 1])}[ranks]
    target, weight = torch.tensor([4, -100, 2]), class_weights(5)
    wholes = drawn(0, 3, 2).split(rows), drawn(1, 5, 2).split(sizes), drawn(0, 5).split(sizes)
    for parts in (rows, None):

        def fn(hidden, head, bias, parts=parts):
            if parts is None:
                hidden = gather_from_sequence_parallel_region(hidden, False, rows)
            options = {"class_weight": weight, "bias": bias, "sequence_sizes": parts}
            loss = linear_cross_entropy(hidden, head, target, sizes, 0.3, z_loss=0.1, **options)
            return copy_to_tensor_model_parallel_region(loss)

        gradcheck(fn, *(x[rank] for x in wholes), fast_mode=ranks != 2)


def second_of(loss, logits, weight=None):
    (first,) = torch.autograd.grad(loss, logits, create_graph=True)
    total = first**2 if weight is None else weight * first
    return first, total.sum()


@on_ranks(3)
def test_second_derivatives_at_minus_infinity(rank):
    """Second derivatives where a shard, or a class, has a probability of 0."""
    inf = torch.inf
    whole = torch.tensor([[1.0, 2.0, -inf, -inf], [-inf, 0.5, 3.0, -inf], [-inf, -inf, 1.0, 2.0]])
    whole, sizes, target = whole.double(), [2, 2, 0], torch.tensor([0, 2, 3])
    logits = whole.split(sizes, -1)[rank].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(logits, target, sizes, reduction="sum")
    first, own = second_of(loss, logits)
    (second,) = torch.autograd.grad(reduce_from_tensor_model_parallel_region(own), logits)
    whole.requires_grad_()
    expected = F.cross_entropy(whole, target, reduction="sum")
    of_first, total = second_of(expected, whole)
    (of_second,) = torch.autograd.grad(total, whole)
    assert torch.allclose(loss, expected, 1e-12)
    assert all(
        torch.allclose(got, x.split(sizes, -1)[rank], 1e-12)
        for got, x in ((first, of_first), (second, of_second))
    )


@on_ranks(2)
def test_second_derivative_of_a_loss_that_differs_between_ranks(rank):
    """A loss that is linear in the gradient on one rank, and leaves it out on the other."""
    whole, target = drawn(0, 3, 6), torch.tensor([5, 0, 2])
    logits = whole.split([2, 4], -1)[rank].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(logits, target, [2, 4], reduction="sum")
    (second,) = torch.autograd.grad(second_of(loss, logits, rank)[1], logits)
    twin = whole.requires_grad_()
    mask = torch.arange(6) >= 2
    _, total = second_of(F.cross_entropy(twin, target, reduction="sum"), twin, mask)
    (of_second,) = torch.autograd.grad(total, twin)
    assert torch.allclose(second, of_second.split([2, 4], -1)[rank], 1e-12)


@on_ranks(2)
def test_inputs_that_a_user_overwrites_are_noticed(rank):
    """The head is not copied, and is read again in backward."""
    hidden, head = drawn(0, 5, 3).requires_grad_(), drawn(1, 2, 3).requires_grad_()
    loss = linear_cross_entropy(hidden, head, targets(5, classes=4), [2, 2])
    with torch.no_grad():
        head.zero_()
    with pytest.raises(RuntimeError, match="inplace"):
        loss.sum().backward()
