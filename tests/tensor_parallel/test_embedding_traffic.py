"""What embeddings send, and that narrow gradients are summed in fp32."""

from functools import partial
from itertools import product

import torch

from tests.tensor_parallel.embeddings import H, V, drawn_ids, own_rows
from tests.tensor_parallel.twins import drawn, traced
from tests.worlds import on_ranks
from varcomm import ShardSizes
from varcomm.tensor_parallel import feature_parallel_embedding, vocab_parallel_embedding

ROW = 8 * H


def bytes_of(calls):
    return sum(c.sent for c in calls), sum(c.received for c in calls)


def needs(ids, sizes, parts):
    """``needs[i][j]``: distinct ids of rank i's part of the sequence that rank j owns."""
    owners = ShardSizes(sizes)
    return [
        [len({i for i in part.view(-1).tolist() if i in owners.range(rank)}) for rank in range(3)]
        for part in ids.split(list(parts))
    ]


SIZES, PARTS = ([4, 0, 7], [2, 1, 3])


def bytes_of_forward_and_backward(rank, length, parts, exchange):
    ids, weight = drawn_ids(6, length, seed=9), own_rows(drawn(0, V, H), SIZES, rank)
    weight.requires_grad_()
    fn = partial(vocab_parallel_embedding, ids, weight, SIZES, None, parts, exchange=exchange)
    return tuple(map(bytes_of, traced(fn)))


@on_ranks(3)
def test_rows_to_parts_are_the_bound(rank):
    """Each distinct id's row once to each rank that needs it and does not own it, and back."""
    need = needs(drawn_ids(6, 5, seed=9), SIZES, PARTS)
    received = (sum(need[rank]) - need[rank][rank]) * ROW
    sent = sum(need[other][rank] for other in range(3) if other != rank) * ROW
    found = bytes_of_forward_and_backward(rank, 5, PARTS, "rows")
    assert found == ((sent, received), (received, sent))


@on_ranks(3)
def test_each_distinct_row_travels_once_to_all(rank):
    found = bytes_of_forward_and_backward(rank, 500, None, "rows")
    assert found == ((2 * SIZES[rank] * ROW, (V - SIZES[rank]) * ROW), (0, 0))


@on_ranks(3)
def test_sums_send_rows_of_all_ids(rank):
    """A reduce-scatter, and an all-gather in backward; or an all-reduce."""
    own, others = 5 * PARTS[rank] * ROW, 5 * (6 - PARTS[rank]) * ROW
    found = bytes_of_forward_and_backward(rank, 5, PARTS, "sum")
    assert found == ((others, 2 * own), (2 * own, others))
    each = 2 * 2 * 6 * 500 * ROW // 3
    assert bytes_of_forward_and_backward(rank, 500, None, "sum") == ((each, each), (0, 0))


@on_ranks(2)
def test_narrow_floats_are_summed_in_fp32(rank):
    """In bf16, 256 + 1 is 256: what is summed one by one stays there."""
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    ids = torch.full((1000,), 1)
    calls = [
        vocab_parallel_embedding(ids, weight, [2, 2], None, parts, exchange=exchange)
        for parts, exchange in product((None, [300, 700]), ("rows", "sum"))
    ]
    for rows in calls:
        (gradient,) = torch.autograd.grad(rows, weight, torch.ones_like(rows))
        assert gradient.flatten().tolist() == [0, 0 if rank else 1000]
    rows = feature_parallel_embedding(ids, weight, [1, 1])
    (gradient,) = torch.autograd.grad(rows, weight, torch.ones_like(rows))
    assert gradient.flatten().tolist() == [0, 1000]
