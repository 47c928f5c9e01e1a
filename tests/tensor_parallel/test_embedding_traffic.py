"""What embeddings send, which method is taken, and that sums are the same at every run."""

from functools import partial

import pytest
import torch

import varcomm
from tests.ops.comparing import Failures, assert_none
from tests.tensor_parallel.embeddings import H, V, drawn_ids, own_rows
from tests.tensor_parallel.twins import drawn, traced
from varcomm import ShardSizes
from varcomm.tensor_parallel import vocab_parallel_embedding

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


def indexed_to_parts(rank, input_is_parallel):
    ids, weight = drawn_ids(6, 5, seed=9), own_rows(drawn(0, V, H), SIZES, rank)
    given = ids.split(PARTS)[rank] if input_is_parallel else ids

    def fn(weight):
        return vocab_parallel_embedding(
            given, weight, SIZES, None, PARTS, input_is_parallel=input_is_parallel
        )

    forward, backward = traced(partial(fn, weight.requires_grad_()))
    of_ids = [call for call in forward if call.name != "exchange"]
    rows = [call for call in forward if call.name == "exchange"]
    return bytes_of(rows), bytes_of(backward), bytes_of(of_ids)


@pytest.mark.parametrize("input_is_parallel", [False, True])
def test_indexed_to_parts_is_the_bound(worlds, input_is_parallel):
    """Each distinct id's row once to each rank that needs it and does not own it, and back."""
    need = needs(drawn_ids(6, 5, seed=9), SIZES, PARTS)
    for rank, (forward, backward, of_ids) in enumerate(
        worlds.run(3, indexed_to_parts, input_is_parallel)
    ):
        received = sum(need[rank]) - need[rank][rank]
        sent = sum(need[other][rank] for other in range(3) if other != rank)
        assert forward == (sent * ROW, received * ROW)
        assert backward == (received * ROW, sent * ROW)
        # each rank's ids, of 8 bytes, to all ranks
        own = PARTS[rank] * 5
        travelled = own * 2 * 8, (30 - own) * 8
        assert of_ids == (travelled if input_is_parallel else (0, 0))


def each_method(rank):
    ids, weight = drawn_ids(6, 500, seed=9), own_rows(drawn(0, V, H), SIZES, rank)
    answers = {}
    for method in ("masked", "indexed"):
        for parts in (None, PARTS):

            def fn(w, method=method, parts=parts):
                return vocab_parallel_embedding(ids, w, SIZES, None, parts, method)

            forward, backward = traced(partial(fn, weight.requires_grad_()))
            answers[method, parts is None] = bytes_of(forward), bytes_of(backward)
    return answers


def test_bytes_of_each_method(worlds):
    tokens, distinct = 3000, [4, 0, 7]
    for rank, answers in enumerate(worlds.run(3, each_method)):
        own, mine = distinct[rank], PARTS[rank] * 500
        others = sum(distinct) - own
        assert answers["indexed", True] == ((2 * own * ROW, others * ROW), (0, 0))
        summed = 2 * (tokens // 3) * 2 * ROW
        assert answers["masked", True] == ((summed, summed), (0, 0))
        there, back = (tokens - mine) * ROW, 2 * mine * ROW
        assert answers["masked", False] == ((there, back), (back, there))


def busiest(ids, weight, sizes, method):
    with varcomm.trace() as calls:
        vocab_parallel_embedding(ids, weight, sizes, method=method)
    moved = varcomm.ShardSizes.from_local(max(bytes_of(calls)))
    return max(moved), next(call.name for call in calls)


def choices(rank):
    """Ids that repeat or do not, of all ranks or of one; one round of sums or two."""
    failures, taken = Failures(), set()
    for tokens in (20, 3000):
        for high in (2, tokens // 2, 5 * tokens):
            for parts in ([1, 1, 1], [0, 1, 9], [1, 0, 0]):
                sizes = ShardSizes(tokens * part for part in parts)
                ids = torch.randperm(sizes.total, generator=torch.Generator().manual_seed(high))
                ids = ids[:tokens].sort().values % high
                weight = own_rows(drawn(0, sizes.total, 5), sizes, rank)
                costs = [busiest(ids, weight, sizes, m) for m in ("auto", "masked", "indexed")]
                taken.add((tokens, costs[0][1]))
                with failures.named(tokens, high, sizes):
                    assert costs[0][0] == min(costs[1][0], costs[2][0])
    return failures, taken


def test_auto_moves_no_more_than_either(worlds):
    answers = worlds.run(3, choices)
    assert_none([failures for failures, _ in answers])
    both = {(n, name) for n in (20, 3000) for name in ("replicated_sum", "parallel_embedding")}
    assert [taken for _, taken in answers] == [both] * 3


def many_copies(rank):
    """In bf16, 256 + 1 is 256: what is summed one by one stays there."""
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    answers = []
    for parts in (None, [300, 700]):
        for method in ("masked", "indexed"):
            ids = torch.full((1000,), 1)
            rows = vocab_parallel_embedding(ids, weight, [2, 2], None, parts, method)
            answers += torch.autograd.grad(rows, weight, torch.ones_like(rows))
    return [grad.view(-1).tolist() for grad in answers]


def test_narrow_floats_are_summed_in_fp32(worlds):
    first, second = worlds.run(2, many_copies)
    assert first == [[0.0, 1000.0]] * 4
    assert second == [[0.0, 0.0]] * 4
