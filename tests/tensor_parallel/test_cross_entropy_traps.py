"""Traps of vocabulary-parallel losses that others fell into, each by its name."""

import pytest
import torch
import torch.nn.functional as F

import varcomm
from tests.tensor_parallel.cross_entropy_cases import reference
from tests.tensor_parallel.twins import drawn
from tests.worlds import on_ranks
from varcomm.tensor_parallel import linear_cross_entropy, vocab_parallel_cross_entropy


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


def assert_twin(rank, whole, target, sizes, rtol=1e-12, atol=1e-12, **options):
    want, gradient = twin(whole, target, **options)
    loss, of_shard = loss_and_gradient(rank, whole, target, sizes, **options)
    torch.testing.assert_close(loss, want, rtol=rtol, atol=atol)
    torch.testing.assert_close(of_shard, gradient.split(sizes, -1)[rank], rtol=rtol, atol=atol)
    every = varcomm.all_gather_v(loss, [len(loss)] * len(sizes))
    assert torch.equal(every, loss.repeat(len(sizes)))  # the same bits
    return loss


@on_ranks(2)
def test_log_of_softmax(rank):
    """Gaps of 200 underflow in the softmax, to a loss of infinity; with and without smoothing."""
    for gap in (200.0, 1e4):
        whole = torch.tensor([[0.0, gap, 1.0], [gap, 0.0, -gap], [-gap, -gap, -gap]])
        target = torch.tensor([0, 2, 1])
        for dtype in (torch.float64, torch.float32):
            for smoothing in (0.0, 0.1):
                options = {"label_smoothing": smoothing, "rtol": 1e-6}
                loss = assert_twin(rank, whole.to(dtype), target, [2, 1], **options)
                assert loss.isfinite().all()


@pytest.mark.parametrize("offset", [1e4, -3e5])
@on_ranks(3)
def test_large_logits_that_are_nearly_equal(rank, offset):
    """In fp32 a log-sum-exp near 1e4 is known to 1e-3 only; the loss must not be."""
    sizes, options = [4, 0, 5], {"label_smoothing": 0.1}
    whole, target = (offset + drawn(0, 20, 9)).float(), torch.arange(20) % 9
    want, gradient = twin(whole.double(), target, **options)
    loss, of_shard = loss_and_gradient(rank, whole, target, sizes, **options)
    torch.testing.assert_close(loss.double(), want, rtol=0, atol=1e-5)
    expected = gradient.split(sizes, -1)[rank]
    torch.testing.assert_close(of_shard.double(), expected, rtol=0, atol=1e-6)


@on_ranks(2)
def test_logits_overwritten_in_place(rank):
    """tanh before the loss works, logits are untouched, and a second backward gives the same."""
    whole, target = drawn(0, 4, 7).requires_grad_(), torch.tensor([0, 3, 6, 2])
    F.cross_entropy(whole.tanh(), target, reduction="sum").backward()
    z = whole.detach().split([3, 4], -1)[rank].clone().requires_grad_()
    logits = torch.tanh(z)  # which keeps its result for backward
    loss = vocab_parallel_cross_entropy(logits, target, [3, 4])
    loss.sum().backward(retain_graph=True)
    torch.testing.assert_close(z.grad, whole.grad.split([3, 4], -1)[rank])
    first = z.grad.clone()
    loss.sum().backward()
    assert torch.equal(logits, torch.tanh(z))
    assert torch.equal(z.grad, 2 * first)


@on_ranks(2)
def test_nan_and_infinity_come_out_as_in_torch(rank):
    inf, nan = torch.inf, torch.nan
    whole = torch.tensor([[nan, 0, 0, 0], [0, 0, inf, 0], [-inf] * 4, [0, -inf, 0, 0]]).double()
    target = torch.tensor([1, 0, 3, 1])
    want = F.cross_entropy(whole, target, reduction="none")
    loss, _ = loss_and_gradient(rank, whole, target, [2, 2])
    torch.testing.assert_close(loss, want, equal_nan=True)
    options = {"label_smoothing": 0.1}
    smooth = F.cross_entropy(whole[3:], target[3:] - 1, reduction="none", **options)
    loss, _ = loss_and_gradient(rank, whole[3:], target[3:] - 1, [2, 2], **options)
    assert loss.tolist() == smooth.tolist() == [inf]


def complete(message, call):
    with pytest.raises(varcomm.ArgumentError, match=message) as caught:
        call()
    assert "gather_output=False" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@on_ranks(3, pytest.param(2, marks=pytest.mark.slow))
def test_complete_logits(rank, ranks, dtype):
    """Logits that are complete on each rank: views and products of them, compiled, in debug()."""
    torch.manual_seed(0)
    hidden, head = torch.randn(2, 16, 5, dtype=dtype), torch.randn(11, 5, dtype=dtype)
    target = torch.randint(11, (2, 15)).index_fill(1, torch.tensor([3]), -100)
    options = {"label_smoothing": 0.1, "reduction": "mean"}

    def loss(logits, sizes=None):
        return vocab_parallel_cross_entropy(logits[:, :-1] * 2, target, sizes, **options)

    every = [11] * ranks
    own = head.tensor_split(ranks)[rank]
    whole, part = F.linear(hidden, head).requires_grad_(), F.linear(hidden, own)
    sizes = [len(rows) for rows in head.tensor_split(ranks)]
    if dtype == torch.float64:
        expected = reference(2 * whole[:, :-1], target, **options)
        torch.testing.assert_close(loss(part, sizes), expected)
    for _ in range(2):  # also after a call with proper logits of the same number of classes
        told = complete("complete logits", lambda: loss(whole))
        complete(
            "linear_cross_entropy.*complete",
            lambda: linear_cross_entropy(hidden[:, :-1], head, target),
        )
        assert complete("complete logits", lambda: loss(whole, every)) == told
        loss(whole.detach() + rank, every)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert complete("complete logits", lambda: compiled(whole, every)) == told
    with varcomm.debug():
        assert complete("complete logits", lambda: compiled(whole, every)) == told
        few = whole[:, :2], target[:, :2]
        complete("complete logits", lambda: vocab_parallel_cross_entropy(*few, every))


@on_ranks(2)
def test_equal_logits_that_are_not_complete(rank):
    """A head of zeros, targets of the other rank, and shards that differ afterwards.

    Shards that start equal, with few targets of the first rank, are as in one process if their
    sizes are stated.
    """
    logits, target = torch.zeros(2, 3), torch.tensor([0, 2])
    for sizes in ([3, 3], None):
        loss = vocab_parallel_cross_entropy(logits, target, sizes)
        torch.testing.assert_close(loss, torch.full((2,), 6.0).log())
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    head, hidden, target = torch.eye(3), logits.clone(), torch.tensor([2])
    expected = F.cross_entropy(logits.repeat(1, 2), target, reduction="none")
    compiled = torch.compile(vocab_parallel_cross_entropy, backend="aot_eager")
    for loss in (vocab_parallel_cross_entropy, compiled):
        torch.testing.assert_close(loss(logits, target, [3, 3]), expected)
    torch.testing.assert_close(linear_cross_entropy(hidden, head, target, [3, 3]), expected)
    complete("another seed", lambda: vocab_parallel_cross_entropy(logits, target))
    vocab_parallel_cross_entropy(logits, torch.tensor([5]), [3, 3])
    vocab_parallel_cross_entropy(logits + rank, torch.tensor([0]), [3, 3])
    with varcomm.debug():
        vocab_parallel_cross_entropy(logits - rank, torch.tensor([0]), [3, 3])
        complete("complete", lambda: vocab_parallel_cross_entropy(logits, torch.tensor([0])))
