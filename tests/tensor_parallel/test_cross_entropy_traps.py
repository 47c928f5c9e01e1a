"""Traps of vocabulary-parallel losses that others fell into, each by its name."""

import pytest
import torch
import torch.nn.functional as F

from tests.tensor_parallel.cross_entropy_cases import reference
from tests.tensor_parallel.twins import drawn
from varcomm.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy


def loss_and_gradient(rank, whole, target, sizes, **options):
    shard = whole.split(sizes, -1)[rank].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(shard, target, sizes, **options)
    loss.sum().backward()
    return loss.detach(), shard.grad


def twin(whole, target, **options):
    whole = whole.clone().requires_grad_()
    loss = reference(whole, target, **options)
    loss.sum().backward()
    return loss.detach(), whole.grad


def assert_twins(worlds, whole, target, sizes, rtol=1e-12, atol=1e-12, **options):
    want, gradient = twin(whole, target, **options)
    answers = worlds.run(len(sizes), call, whole, target, sizes, options)
    for (loss, of_shard), expected in zip(answers, gradient.split(sizes, -1), strict=True):
        torch.testing.assert_close(loss, want, rtol=rtol, atol=atol)
        torch.testing.assert_close(loss, answers[0][0], rtol=0, atol=0)  # the same bits
        torch.testing.assert_close(of_shard, expected, rtol=rtol, atol=atol)
    return answers


def call(rank, whole, target, sizes, options):
    return loss_and_gradient(rank, whole, target, sizes, **options)


def test_log_of_softmax(worlds):
    """Gaps of 200 underflow in the softmax, to a loss of infinity; with and without smoothing."""
    for gap in (200.0, 1e4):
        whole = torch.tensor([[0.0, gap, 1.0], [gap, 0.0, -gap], [-gap, -gap, -gap]])
        target = torch.tensor([0, 2, 1])
        for dtype in (torch.float64, torch.float32):
            for smoothing in (0.0, 0.1):
                (loss, _), _ = assert_twins(
                    worlds, whole.to(dtype), target, [2, 1], label_smoothing=smoothing, rtol=1e-6
                )
                assert loss.isfinite().all()


@pytest.mark.parametrize("offset", [1e4, -3e5])
def test_large_logits_that_are_nearly_equal(worlds, offset):
    """In fp32 a log-sum-exp near 1e4 is known to 1e-3 only; the loss must not be."""
    whole = (offset + drawn(0, 20, 9)).float()
    target = torch.arange(20) % 9
    want = F.cross_entropy(whole.double(), target, reduction="none", label_smoothing=0.1)
    answers = worlds.run(3, call, whole, target, [4, 0, 5], {"label_smoothing": 0.1})
    for loss, _ in answers:
        assert (loss - want).abs().max() < 1e-5
    gradient = torch.cat([of_shard for _, of_shard in answers], -1)
    wide = whole.double().requires_grad_()
    F.cross_entropy(wide, target, reduction="sum", label_smoothing=0.1).backward()
    assert (gradient - wide.grad).abs().max() < 1e-6


def after_tanh(rank):
    z = drawn(0, 4, 3 + rank).requires_grad_()
    logits = torch.tanh(z)  # which keeps its result for backward
    loss = vocab_parallel_cross_entropy(logits, torch.tensor([0, 3, 6, 2]), [3, 4])
    loss.sum().backward(retain_graph=True)
    first = z.grad.clone()
    loss.sum().backward()
    return torch.equal(logits, torch.tanh(z)), torch.equal(z.grad, 2 * first), first


def test_logits_overwritten_in_place(worlds):
    """tanh before the loss works, logits are untouched, and a second backward gives the same."""
    whole = torch.cat([drawn(0, 4, 3), drawn(0, 4, 4)], -1).requires_grad_()
    F.cross_entropy(whole.tanh(), torch.tensor([0, 3, 6, 2]), reduction="sum").backward()
    answers = worlds.run(2, after_tanh)
    assert [answer[:2] for answer in answers] == [(True, True)] * 2
    torch.testing.assert_close(torch.cat([a[-1] for a in answers], -1), whole.grad)


def test_nan_and_infinity_come_out_as_in_torch(worlds):
    inf, nan = torch.inf, torch.nan
    whole = torch.tensor([[nan, 0, 0, 0], [0, 0, inf, 0], [-inf] * 4, [0, -inf, 0, 0]]).double()
    target = torch.tensor([1, 0, 3, 1])
    want = F.cross_entropy(whole, target, reduction="none")
    for loss, _ in worlds.run(2, call, whole, target, [2, 2], {}):
        torch.testing.assert_close(loss, want, equal_nan=True)
    smooth = F.cross_entropy(whole[3:], target[3:] - 1, reduction="none", label_smoothing=0.1)
    options = {"label_smoothing": 0.1}
    for loss, _ in worlds.run(2, call, whole[3:], target[3:] - 1, [2, 2], options):
        assert loss.tolist() == smooth.tolist() == [inf]
