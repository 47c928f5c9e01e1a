"""Memory that losses need at their peak and keep, and the messages they send."""

import pytest
import torch
from torch.autograd.profiler import profile

from tests.tensor_parallel.cross_entropy_cases import class_weights, targets
from tests.tensor_parallel.twins import drawn, traced
from tests.worlds import on_ranks
from varcomm.tensor_parallel import linear_cross_entropy, vocab_parallel_cross_entropy

TOKENS, CLASSES, WIDTH = 512, 40_000, 64

# of a chunk, as fp32: what is computed on it exists twice at a time
CHUNK = 4 * 2**19

# some ids and some numbers of each rank per token, in bytes
FEW = 200 * TOKENS


def peak_of(fn):
    """Return the most bytes of torch's CPU allocator in use during a call, and its result.

    Each allocation and each release is an event of the profiler, also inside kernels.
    """
    with profile(use_device=None, profile_memory=True) as profiled:
        result = fn()
    events = profiled.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    peak = live = 0
    for _, change in changes:
        live += change
        peak = max(peak, live)
    return peak, result


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
)
@on_ranks(2)
def test_beside_logits_and_their_gradient_a_few_numbers_a_token(rank, dtype):
    sizes, target = [15_000, 25_000], targets(TOKENS, classes=CLASSES)
    rich = {"label_smoothing": 0.1, "z_loss": 0.1, "weight": class_weights(CLASSES)}
    for options in ({}, rich):
        logits = torch.randn(TOKENS, sizes[rank], dtype=dtype).requires_grad_()
        given = {"reduction": "sum", **options}
        forward, loss = peak_of(
            lambda x=logits, given=given: vocab_parallel_cross_entropy(x, target, sizes, **given)
        )
        backward, _ = peak_of(loss.backward)
        weights = 2 * 4 * CLASSES if options else 0  # as fp32, which is once for all tokens
        assert max(forward, backward - logits.nbytes) <= 2 * CHUNK + FEW + weights


@on_ranks(2)
def test_logits_of_hidden_states_never_exist(rank):
    """Of logits of 123 MB, a chunk of 2 MB and its temporaries; the head's gradient once.

    When the gradients of hidden states are summed there is the rank's own, both, and the sum.
    """
    hidden = torch.randn(2 * TOKENS, WIDTH).requires_grad_()
    head = torch.randn(30_000, WIDTH).requires_grad_()
    target, sizes = targets(2 * TOKENS, classes=60_000), [30_000] * 2
    forward, loss = peak_of(
        lambda: linear_cross_entropy(hidden, head, target, sizes, reduction="sum")
    )
    backward, _ = peak_of(loss.backward)
    assert forward <= 2 * CHUNK + 2 * FEW + hidden.nbytes
    most = max(3 * CHUNK, 3 * hidden.nbytes) + hidden.nbytes + 2 * FEW
    assert backward - head.nbytes <= most


@on_ranks(2)
def test_what_is_kept_for_backward(rank):
    """Backward keeps the inputs, a copy of hidden states, and nothing of the size of logits."""
    logits, hidden, head = (
        torch.randn(*shape, requires_grad=True) for shape in ((64, 3000), (64, 8), (3000, 8))
    )
    own = {x.data_ptr() for x in (logits, hidden, head)}

    def pack(x):
        assert x.data_ptr() in own or x.numel() <= 8 * 64, tuple(x.shape)
        return x

    target, sizes = targets(64, classes=6000), [3000, 3000]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = vocab_parallel_cross_entropy(logits, target, sizes).sum()
        loss = loss + linear_cross_entropy(hidden, head, target, sizes).sum()
    loss.backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@on_ranks(3)
def test_one_collective_in_forward_and_none_in_backward(rank, dtype):
    """Three numbers per token go to every other rank, and two for the comparison of calls."""
    sizes = [8, 8, 7]
    logits = drawn(0, 6, 23, dtype=dtype).split(sizes, -1)[rank].clone().requires_grad_()
    options = {"label_smoothing": 0.1, "weight": class_weights(23), "z_loss": 0.1}
    target = targets(6, classes=23)
    forward, backward = traced(
        lambda: vocab_parallel_cross_entropy(logits, target, sizes, **options)
    )
    nbytes = (3 * 6 + 2) * max(4, dtype.itemsize) * 2
    assert [(call.name, call.sent) for call in forward] == [("compared_gather", nbytes)]
    assert not backward


@pytest.mark.parametrize("sequence", [False, True])
@on_ranks(3)
def test_what_travels_of_hidden_states(rank, sequence):
    """Three numbers per token, and hidden's gradient; hidden itself if each rank has a part."""
    rows = [1, 0, 4]
    hidden = drawn(0, 5, 3).split(rows)[rank] if sequence else drawn(0, 5, 3)
    inputs = [hidden.clone().requires_grad_(), drawn(1, [2, 5, 4][rank], 3).requires_grad_()]
    options = {"sequence_sizes": rows if sequence else None}
    found = traced(lambda: linear_cross_entropy(*inputs, targets(5), [2, 5, 4], **options))
    found = [[(call.name, call.received) for call in calls] for calls in found]
    told, width = ("compared_gather", (3 * 5 + 2) * 8 * 2), 3 * 8
    gathered, scattered = (5 - rows[rank]) * width, 2 * rows[rank] * width
    assert found == (
        [[("all_gather_v", gathered), told], [("reduce_scatter_v", scattered)]]
        if sequence
        else [[told], [("replicated_sum", 2 * (5 * width + 16))]]
    )
