"""Derivatives of second and third order, forward mode, and torch.func."""

import pytest
import torch
import torch.nn.functional as F

from tests.tensor_parallel.cross_entropy_cases import class_weights, drawn, reference, targets
from tests.worlds import WORLDS
from varcomm.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from varcomm.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from varcomm.testing import gradcheck, gradgradcheck

SIZES = {1: [5], 2: [2, 3], 3: [3, 0, 2]}
RICH = {
    "label_smoothing": 0.3,
    "smooth_over": "wrong",
    "weight": class_weights(5),
    "z_loss": 0.1,
    "reduction": "mean",
}


def check_against_finite_differences(rank, ranks):
    """As an operator whose result every rank uses in another way."""
    sizes = SIZES[ranks]
    target = torch.tensor([4, -100, 2])
    shard = 2 * drawn(3, 5).split(sizes, -1)[rank]
    for options in ({}, RICH):

        def fn(logits, options=options):
            loss = vocab_parallel_cross_entropy(logits, target, sizes, **options)
            return copy_to_tensor_model_parallel_region(loss)

        gradcheck(fn, shard, fast_mode=ranks != 2)
        gradgradcheck(fn, shard, fast_mode=True)
    return True


@pytest.mark.parametrize("ranks", WORLDS[:3])
def test_first_and_second_derivatives_and_forward_mode(worlds, ranks):
    assert worlds.run(ranks, check_against_finite_differences, ranks) == [True] * ranks


def penalties(loss, logits, weights, total):
    """A loss on gradients of gradients: derivatives of the first three orders."""
    (first,) = torch.autograd.grad(loss, logits, weights, create_graph=True)
    second_of = total((first**2).sum())
    second, of_weights = torch.autograd.grad(second_of, (logits, weights), create_graph=True)
    third_of = total((second**3).sum()) + (of_weights**2).sum()
    return first, second, of_weights, torch.autograd.grad(third_of, logits)[0]


def higher_orders(rank, sizes, options):
    whole, target = drawn(4, 7), targets(4, classes=7, seed=3)
    shape = () if options.get("reduction") == "mean" else (4,)
    logits = whole.split(sizes, -1)[rank].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(logits, target, sizes, **options)
    weights = drawn(*shape, seed=9).requires_grad_()
    found = penalties(loss, logits, weights, reduce_from_tensor_model_parallel_region)
    return [x.detach() for x in found]


def test_third_derivatives(worlds):
    whole, target = drawn(4, 7).requires_grad_(), targets(4, classes=7, seed=3)
    for options in ({}, {**RICH, "weight": class_weights(7)}):
        loss = reference(whole, target, **options)
        weights = drawn(*loss.shape, seed=9).requires_grad_()
        first, second, of_weights, third = penalties(loss, whole, weights, lambda x: x)
        for sizes in ([4, 0, 3], [0, 7, 0]):
            answers = worlds.run(3, higher_orders, sizes, options)
            for rank, (a, b, of_w, c) in enumerate(answers):
                torch.testing.assert_close(of_w, of_weights, rtol=1e-12, atol=1e-12)
                for got, want in ((a, first), (b, second), (c, third)):
                    of_shard = want.split(sizes, -1)[rank]
                    torch.testing.assert_close(got, of_shard, rtol=1e-12, atol=1e-12)


def where_nothing_is_possible(rank):
    """Second derivatives where a shard, or a class, has a probability of 0."""
    inf = torch.inf
    whole = torch.tensor([[1.0, 2.0, -inf, -inf], [-inf, 0.5, 3.0, -inf]]).double()
    sizes, target = [2, 2, 0], torch.tensor([0, 2])
    logits = whole.split(sizes, -1)[rank].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(logits, target, sizes)
    (first,) = torch.autograd.grad(loss.sum(), logits, create_graph=True)
    total = reduce_from_tensor_model_parallel_region((first**2).sum())
    (second,) = torch.autograd.grad(total, logits)
    whole = whole.requires_grad_()
    want = F.cross_entropy(whole, target, reduction="sum")
    (of_first,) = torch.autograd.grad(want, whole, create_graph=True)
    (of_second,) = torch.autograd.grad((of_first**2).sum(), whole)
    pairs = ((first, of_first), (second, of_second))
    return all(torch.allclose(got, x.split(sizes, -1)[rank], 1e-12) for got, x in pairs)


def test_second_derivatives_at_minus_infinity(worlds):
    assert worlds.run(3, where_nothing_is_possible) == [True] * 3


def of_a_linear_penalty(rank):
    """A loss that is linear in the gradient on one rank, and leaves it out on the other."""
    whole, target = drawn(3, 6), torch.tensor([5, 0, 2])
    logits = whole.split([2, 4], -1)[rank].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(logits, target, [2, 4], reduction="sum")
    (first,) = torch.autograd.grad(loss, logits, create_graph=True)
    (second,) = torch.autograd.grad(first.sum() if rank else 0 * first.sum(), logits)
    twin = whole.requires_grad_()
    want = F.cross_entropy(twin, target, reduction="sum")
    (of_first,) = torch.autograd.grad(want, twin, create_graph=True)
    (of_second,) = torch.autograd.grad(of_first[:, 2:].sum(), twin)
    return torch.allclose(second, of_second.split([2, 4], -1)[rank], 1e-12)


def test_second_derivative_of_a_loss_that_differs_between_ranks(worlds):
    assert worlds.run(2, of_a_linear_penalty) == [True] * 2
