"""What embeddings send, and that narrow gradients are summed in fp32."""

from functools import partial
from itertools import product

import torch

from tests.tensor_parallel.embeddings import H, V, drawn_ids, own_rows
from tests.tensor_parallel.twins import drawn, traced
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


def to_parts(rank):
    ids, weight = drawn_ids(6, 5, seed=9), own_rows(drawn(0, V, H), SIZES, rank)
    fn = partial(vocab_parallel_embedding, ids, weight.requires_grad_(), SIZES, None, PARTS)
    return tuple(map(bytes_of, traced(fn)))


def test_to_parts_is_the_bound(worlds):
    """Each distinct id's row once to each rank that needs it and does not own it, and back."""
    need = needs(drawn_ids(6, 5, seed=9), SIZES, PARTS)
    for rank, (forward, backward) in enumerate(worlds.run(3, to_parts)):
        received = sum(need[rank]) - need[rank][rank]
        sent = sum(need[other][rank] for other in range(3) if other != rank)
        assert forward == (sent * ROW, received * ROW)
        assert backward == (received * ROW, sent * ROW)


def to_all(rank):
    ids, weight = drawn_ids(6, 500, seed=9), own_rows(drawn(0, V, H), SIZES, rank)
    fn = partial(vocab_parallel_embedding, ids, weight.requires_grad_(), SIZES)
    return tuple(map(bytes_of, traced(fn)))


def test_each_distinct_row_travels_once_to_all(worlds):
    distinct = [4, 0, 7]
    for own, answer in zip(distinct, worlds.run(3, to_all), strict=True):
        assert answer == ((2 * own * ROW, (sum(distinct) - own) * ROW), (0, 0))


def by_sums(rank, layout):
    length, parts = (5, PARTS) if layout == "parts" else (500, None)
    ids, weight = drawn_ids(6, length, seed=9), own_rows(drawn(0, V, H), SIZES, rank)
    weight.requires_grad_()
    fn = partial(vocab_parallel_embedding, ids, weight, SIZES, None, parts, exchange="sum")
    return tuple(map(bytes_of, traced(fn)))


def test_sums_send_rows_of_all_ids(worlds):
    """A reduce-scatter, and an all-gather in backward; or an all-reduce."""
    for part, (forward, backward) in zip(PARTS, worlds.run(3, by_sums, "parts"), strict=True):
        own, others = 5 * part * ROW, 5 * (6 - part) * ROW
        assert forward == (others, 2 * own)
        assert backward == (2 * own, others)
    each = 2 * 2 * 6 * 500 * ROW // 3
    assert worlds.run(3, by_sums, "all") == [((each, each), (0, 0))] * 3


def many_copies(rank):
    """In bf16, 256 + 1 is 256: what is summed one by one stays there."""
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    ids, answers = torch.full((1000,), 1), []
    calls = [
        vocab_parallel_embedding(ids, weight, [2, 2], None, parts, exchange=exchange)
        for parts, exchange in product((None, [300, 700]), ("rows", "sum"))
    ]
    for rows in (*calls, feature_parallel_embedding(ids, weight, [1, 1])):
        answers += torch.autograd.grad(rows, weight, torch.ones_like(rows))
    return [grad.view(-1).tolist() for grad in answers]


def test_narrow_floats_are_summed_in_fp32(worlds):
    first, second = worlds.run(2, many_copies)
    assert first == [[0.0, 1000.0]] * 5
    assert second == [[0.0, 0.0]] * 4 + [[0.0, 1000.0]]
