"""What the loss from hidden states keeps, needs at its peak, and sends."""

import torch

import varcomm
from tests.tensor_parallel.cross_entropy_cases import drawn, targets
from tests.tensor_parallel.peak_memory import peak_of
from varcomm.tensor_parallel.cross_entropy import linear_cross_entropy

TOKENS, H, OF_RANK = 1024, 64, 30_000


def needed(rank):
    """Bytes at the peak of forward and backward, beside gradients."""
    hidden = torch.randn(TOKENS, H).requires_grad_()
    head = torch.randn(OF_RANK, H).requires_grad_()
    target = targets(TOKENS, classes=2 * OF_RANK)
    sizes = [OF_RANK, OF_RANK]
    forward, loss = peak_of(
        lambda: linear_cross_entropy(hidden, head, target, sizes, reduction="sum")
    )
    backward, _ = peak_of(loss.backward)
    return forward, backward - head.nbytes, hidden.nbytes


def test_logits_never_exist(worlds):
    """Of logits of 123 MB, a chunk of 2 MB and what is made of it; the head's gradient once.

    When hidden's are summed there is the rank's own, those of both, and the sum.
    """
    logits, chunk = 4 * TOKENS * OF_RANK, 4 * 2**19
    for forward, backward, of_hidden in worlds.run(2, needed):
        assert forward <= 2 * chunk + 200 * TOKENS
        assert backward <= max(3 * chunk, 3 * of_hidden) + of_hidden + 200 * TOKENS
        assert backward < logits / 10


def kept(rank):
    hidden, head = torch.randn(64, 8).requires_grad_(), torch.randn(3000, 8).requires_grad_()

    def nothing_else(x):
        own = {hidden.data_ptr(), head.data_ptr()}
        assert x.data_ptr() in own or x.numel() <= 6 * 64, tuple(x.shape)
        return x

    with torch.autograd.graph.saved_tensors_hooks(nothing_else, lambda x: x):
        loss = linear_cross_entropy(hidden, head, targets(64, classes=6000), [3000, 3000])
    loss.sum().backward()
    return True


def test_what_is_kept_for_backward(worlds):
    assert worlds.run(2, kept) == [True] * 2


def sent(rank, sequence):
    rows = [1, 0, 4]
    hidden = drawn(5, 3).split(rows)[rank] if sequence else drawn(5, 3)
    inputs = [hidden.clone().requires_grad_(), drawn([2, 5, 4][rank], 3).requires_grad_()]
    with varcomm.trace() as forward:
        loss = linear_cross_entropy(
            *inputs, targets(5), [2, 5, 4], sequence_sizes=rows if sequence else None
        )
    with varcomm.trace() as backward:
        loss.sum().backward()
    return [[(call.name, call.received) for call in calls] for calls in (forward, backward)]


def test_what_travels(worlds):
    """Three numbers a token, and hidden's gradient; hidden itself where each rank has a part."""
    told, width = ("replicated_gather", 3 * 5 * 8 * 2), 3 * 8
    for forward, backward in worlds.run(3, sent, False):
        assert forward == [told]
        assert backward == [("replicated_sum", 2 * 5 * width)]
    for rows, (forward, backward) in zip((1, 0, 4), worlds.run(3, sent, True), strict=True):
        assert forward == [("all_gather_v", (5 - rows) * width), told]
        assert backward == [("reduce_scatter_v", 2 * rows * width)]
