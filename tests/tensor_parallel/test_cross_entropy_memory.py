"""What the loss needs beside its input and its gradient, and what it sends."""

import pytest
import torch

import varcomm
from tests.tensor_parallel.cross_entropy_cases import class_weights, drawn, targets
from tests.tensor_parallel.peak_memory import peak_of
from varcomm.tensor_parallel import reduce_from_tensor_model_parallel_region
from varcomm.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

TOKENS, CLASSES = 512, 40_000

# of a chunk, as fp32: what is computed on it exists twice at a time
CHUNK = 4 * 2**19
CHUNKS = 2 * CHUNK

# bytes: some ids, and some numbers of each rank
A_TOKEN = 200


def needed(rank, sizes, dtype, options):
    """Bytes at the peak of forward, of backward beside the gradient, and of the logits."""
    logits = torch.randn(TOKENS, sizes[rank], dtype=dtype).requires_grad_()
    target = targets(TOKENS, classes=sum(sizes))

    def loss():
        return vocab_parallel_cross_entropy(logits, target, sizes, reduction="sum", **options)

    forward, value = peak_of(loss)
    backward, _ = peak_of(value.backward)
    return forward, backward - logits.nbytes, logits.nbytes


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1, "z_loss": 0.1, "weight": class_weights(CLASSES)}]
)
def test_beside_logits_and_their_gradient_a_few_numbers_a_token(worlds, dtype, options):
    weights = 2 * 4 * CLASSES if options else 0  # as fp32, which is once for all tokens
    for forward, backward, logits in worlds.run(2, needed, [15_000, 25_000], dtype, options):
        assert forward <= CHUNKS + A_TOKEN * TOKENS + weights
        assert backward <= CHUNKS + A_TOKEN * TOKENS + weights
        assert logits >= 15_000 * TOKENS * dtype.itemsize


def kept_between(rank):
    """What lives after forward."""
    logits = torch.randn(TOKENS, 20_000).requires_grad_()
    target = targets(TOKENS, classes=40_000)
    with torch.autograd.graph.saved_tensors_hooks(kept_nothing_large, lambda x: x):
        loss = vocab_parallel_cross_entropy(logits, target, [20_000, 20_000])
    loss.sum().backward()
    return True


def kept_nothing_large(x):
    """Logits themselves are kept; nothing else of their size."""
    assert x.is_leaf or x.numel() <= 8 * TOKENS, tuple(x.shape)
    return x


def test_forward_keeps_nothing_of_the_size_of_the_logits(worlds):
    assert worlds.run(2, kept_between) == [True] * 2


def needed_twice(rank):
    """The gradient of a gradient: beside it, and what it is of."""
    logits = torch.randn(TOKENS, 20_000).requires_grad_()
    target = targets(TOKENS, classes=40_000)
    loss = vocab_parallel_cross_entropy(logits, target, [20_000, 20_000], reduction="sum")
    direction = torch.randn_like(logits)
    first, (gradient,) = peak_of(lambda: torch.autograd.grad(loss, logits, create_graph=True))
    second, _ = peak_of(lambda: torch.autograd.grad(gradient, logits, direction))
    return first - logits.nbytes, second - 2 * logits.nbytes


def test_second_derivatives_need_no_more(worlds):
    """Two gradients: of the logits directly, and through their statistics, that are added."""
    for first, second in worlds.run(2, needed_twice):
        assert first <= CHUNKS + A_TOKEN * TOKENS
        assert second <= CHUNKS + A_TOKEN * TOKENS


def sent(rank, ranks, dtype):
    sizes = list(varcomm.ShardSizes.balanced(23, ranks))
    logits = drawn(6, 23, dtype=dtype).split(sizes, -1)[rank].clone().requires_grad_()
    target = targets(6, classes=23)
    options = {"label_smoothing": 0.1, "weight": class_weights(23), "z_loss": 0.1}
    with varcomm.trace() as forward:
        loss = vocab_parallel_cross_entropy(logits, target, sizes, **options)
    with varcomm.trace() as backward:
        loss.sum().backward(retain_graph=True)
    (first,) = torch.autograd.grad(loss.sum(), logits, create_graph=True)
    penalty = reduce_from_tensor_model_parallel_region((first**2).sum())
    with varcomm.trace() as second:
        torch.autograd.grad(penalty, logits)
    return forward, backward, second


@pytest.mark.parametrize(("ranks", "dtype"), [(3, torch.float64), (3, torch.bfloat16)])
def test_one_collective_in_forward_and_none_in_backward(worlds, ranks, dtype):
    """Three numbers a token go to every other rank."""
    width = max(4, dtype.itemsize)
    for forward, backward, second in worlds.run(ranks, sent, ranks, dtype):
        (call,) = forward
        assert call.name == "replicated_gather"
        assert call.sent == call.received == 3 * 6 * width * (ranks - 1)
        assert backward == []
        assert [other.name for other in second] == ["replicated_gather"]
