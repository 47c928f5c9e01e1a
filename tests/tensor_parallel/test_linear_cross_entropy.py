"""The loss from hidden states and a sharded head, against torch with the whole head."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F

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
from varcomm.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from varcomm.tensor_parallel.cross_entropy import (
    linear_cross_entropy,
    vocab_parallel_cross_entropy,
)
from varcomm.testing import gradcheck, gradgradcheck

WIDTH = 4

# rows of hidden, of 5 in all, on each rank
ROWS = {1: [5], 2: [5, 0], 3: [1, 0, 4], 4: [2, 1, 1, 1], 5: [1, 0, 2, 2, 0]}

OPTIONS = [
    {
        "reduction": reduction,
        "label_smoothing": smoothing,
        "smooth_over": over,
        "z_loss": z_loss,
        "weight": weight,
    }
    for reduction, (smoothing, over, z_loss, weight) in product(
        ("none", "mean"),
        ((0.0, "all", 0.0, None), (0.2, "all", 0.01, class_weights()), (0.2, "wrong", 0.0, None)),
    )
]


def compare(failures, rank, ranks, sizes, shape, options, group=None, sequence=False, **more):
    """Compare loss and gradients of hidden, head and bias with the reference, to 1e-12."""
    whole = [drawn(*shape, WIDTH), drawn(CLASSES, WIDTH, seed=1), drawn(CLASSES, seed=2)]
    whole = [x.requires_grad_() for x in whole]
    target = targets(*shape)
    want = reference(F.linear(*whole), target, **options)
    arriving = drawn(*want.shape, seed=5)
    expected = list(torch.autograd.grad(want, whole, arriving))
    rows = ROWS[ranks]
    own = [
        whole[0].split(rows)[rank] if sequence else whole[0],
        *(x.split(sizes)[rank] for x in whole[1:]),
    ]
    expected[0] = expected[0].split(rows)[rank] if sequence else expected[0]
    expected[1:] = [x.split(sizes)[rank] for x in expected[1:]]
    own = [x.detach().clone().requires_grad_() for x in own]
    options = dict(options)
    got = linear_cross_entropy(
        *own[:2],
        target,
        sizes,
        bias=own[2],
        class_weight=options.pop("weight", None),
        sequence_sizes=rows if sequence else None,
        group=group,
        **options,
        **more,
    )
    found = torch.autograd.grad(got, own, arriving)
    with failures.named(sizes, options, sequence, more):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        for gradient, of_whole in zip(found, expected, strict=True):
            torch.testing.assert_close(gradient, of_whole, rtol=1e-12, atol=1e-12)


def check_options(rank, ranks):
    failures = Failures()
    for sizes in SPLITS[ranks].values():
        for options in OPTIONS:
            for sequence in (False, True):
                compare(failures, rank, ranks, sizes, (5, 2), options, sequence=sequence)
        for chunk_rows in (1, 3, 7, 100):
            compare(failures, rank, ranks, sizes, (5, 2), OPTIONS[1], chunk_rows=chunk_rows)
    return failures


@pytest.mark.parametrize("ranks", WORLDS)
def test_equals_torch_with_the_whole_head(worlds, ranks):
    assert_none(worlds.run(ranks, check_options, ranks))


def check_shapes(rank):
    failures = Failures()
    for shape in ((), (0,), (1,), (2, 3, 2), (2, 0)):
        compare(failures, rank, 3, [5, 0, 6], shape, {}, chunk_rows=2)
    return failures


def test_tokens_of_any_shape(worlds):
    assert_none(worlds.run(3, check_shapes))


def check_against_finite_differences(rank, ranks, sequence):
    """Ranks bring rows of hidden, which are gathered before, or by the loss."""
    sizes, rows = {2: ([2, 3], [1, 2]), 3: ([3, 0, 2], [2, 0, 1])}[ranks]
    target = torch.tensor([4, -100, 2])
    options = {"label_smoothing": 0.3, "class_weight": class_weights(5), "z_loss": 0.1}

    def fn(hidden, head, bias):
        if not sequence:
            hidden = gather_from_sequence_parallel_region(hidden, False, rows)
        loss = linear_cross_entropy(
            hidden,
            head,
            target,
            sizes,
            bias=bias,
            sequence_sizes=rows if sequence else None,
            chunk_rows=2,
            **options,
        )
        return copy_to_tensor_model_parallel_region(loss)

    inputs = (drawn(3, 2).split(rows), drawn(5, 2, seed=1).split(sizes), drawn(5).split(sizes))
    inputs = [x[rank] for x in inputs]
    gradcheck(fn, *inputs, fast_mode=True)
    gradgradcheck(fn, *inputs, fast_mode=True)
    return True


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_first_and_second_derivatives_and_forward_mode(worlds, ranks, sequence):
    done = worlds.run(ranks, check_against_finite_differences, ranks, sequence)
    assert done == [True] * ranks


def penalties(loss, inputs, total, of_hidden):
    """A loss on gradients of gradients of hidden, head and bias; the first one is replicated."""

    def penalty(gradients):
        hidden, *own = gradients
        return of_hidden((hidden**2).sum()) + total(sum((x**2).sum() for x in own))

    first = torch.autograd.grad(loss, inputs, create_graph=True)
    second = torch.autograd.grad(penalty(first), inputs, create_graph=True)
    return torch.autograd.grad(penalty(second), inputs)


def third_order(rank, sizes):
    options = {"reduction": "mean", "label_smoothing": 0.2, "chunk_rows": 2}
    target = targets(5, classes=7)
    parts = (drawn(5, 3), drawn(7, 3, seed=1).split(sizes)[rank], drawn(7).split(sizes)[rank])
    inputs = [x.clone().requires_grad_() for x in parts]
    loss = linear_cross_entropy(*inputs[:2], target, sizes, bias=inputs[2], **options)
    return penalties(loss, inputs, reduce_from_tensor_model_parallel_region, lambda x: x)


def test_third_derivatives(worlds):
    sizes, target = [4, 0, 3], targets(5, classes=7)
    inputs = [x.requires_grad_() for x in (drawn(5, 3), drawn(7, 3, seed=1), drawn(7))]
    loss = reference(F.linear(*inputs), target, reduction="mean", label_smoothing=0.2)
    want = penalties(loss, inputs, lambda x: x, lambda x: x)
    for rank, found in enumerate(worlds.run(3, third_order, sizes)):
        torch.testing.assert_close(found[0], want[0], rtol=1e-11, atol=1e-13)
        for got, whole in zip(found[1:], want[1:], strict=True):
            torch.testing.assert_close(got, whole.split(sizes)[rank], rtol=1e-11, atol=1e-13)


def narrow(rank, autocast):
    """The same as of logits made at once, up to the rounding of gradients to bf16."""
    sizes, target = [40, 0, 23], targets(30, classes=63)
    dtype = torch.float32 if autocast else torch.bfloat16
    hidden = drawn(30, 16, dtype=dtype)
    head = drawn(63, 16, dtype=dtype, seed=1).split(sizes)[rank].clone()

    def both(fn):
        inputs = [hidden.clone().requires_grad_(), head.clone().requires_grad_()]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = fn(*inputs)
        loss.sum().backward()
        return loss.detach(), *(x.grad for x in inputs)

    def at_once(hidden, head):
        used = copy_to_tensor_model_parallel_region(hidden)
        return vocab_parallel_cross_entropy(F.linear(used, head), target, sizes)

    found = both(lambda *x: linear_cross_entropy(*x, target, sizes, chunk_rows=7))
    want = both(at_once)
    failures = Failures()
    for got, of_whole in zip(found, want, strict=True):
        with failures.named(got.shape, got.dtype):
            assert got.dtype == of_whole.dtype
            torch.testing.assert_close(got, of_whole, rtol=2e-2, atol=2e-2)
    with failures.named("loss"):
        torch.testing.assert_close(found[0], want[0], rtol=1e-5, atol=1e-5)
    return failures


@pytest.mark.parametrize("autocast", [False, True])
def test_narrow_floats(worlds, autocast):
    assert_none(worlds.run(3, narrow, autocast))


def overwritten(rank, which):
    inputs = {"hidden": drawn(5, 3).requires_grad_(), "weight": drawn(2, 3).requires_grad_()}
    target = torch.tensor([0, 3, 2, 1, -100])
    loss = linear_cross_entropy(target=target, sizes=[2, 2], **inputs)
    with torch.no_grad():
        inputs[which].zero_()
    try:
        loss.sum().backward()
    except RuntimeError as error:
        return "modified inplace" in str(error) or "by an inplace operation" in str(error)


@pytest.mark.parametrize("which", ["hidden", "weight"])
def test_inputs_that_a_user_overwrites_are_noticed(worlds, which):
    """hidden is not copied, and is read again in backward."""
    assert worlds.run(2, overwritten, which) == [True] * 2
