"""What plans are made of and what they do: against numpy, for needs of every shape."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import varcomm
from tests.plan.naive import SHAPES, WORLDS, all_to_all_needs, in_a_ring, some_needs
from varcomm import ExchangePlan


def by_both_ways(rank, needs):
    """Make the plan in both ways; describe what they are and do."""
    return [
        described(plan, needs, rank)
        for plan in (needs.plan_of_indices(rank), needs.plan_of_needed(rank))
    ]


def described(plan, needs, rank, rest=(2,)):
    x = torch.from_numpy(needs.own_rows(*rest)[rank])
    y = torch.from_numpy(needs.copies(*rest)[rank])
    return {
        "send_index": plan.send_index.tolist(),
        "send_counts": plan.send_counts,
        "recv_counts": plan.recv_counts,
        "num_rows": plan.num_rows,
        "neighbours": plan.neighbours,
        "forward": plan(x).tolist(),
        "started": plan.start(x).wait().tolist(),
        "adjoint": plan.adjoint(y).tolist(),
    }


def expected(needs, rank, rest=(2,)):
    received = needs.received(needs.own_rows(*rest), rank).tolist()
    return {
        "send_index": [row for index in needs.indices[rank] for row in index],
        "send_counts": needs.counts_from(rank),
        "recv_counts": needs.counts_to(rank),
        "num_rows": needs.sizes[rank],
        "neighbours": needs.neighbours(rank),
        "forward": received,
        "started": received,
        "adjoint": needs.summed(needs.copies(*rest), rank).tolist(),
    }


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_plan_and_what_it_does(worlds, shape, ranks):
    needs = SHAPES[shape](ranks)
    want = [[expected(needs, rank)] * 2 for rank in range(ranks)]
    assert worlds.run(ranks, by_both_ways, needs) == want


@settings(deadline=None, max_examples=12)
@given(data=st.data())
@pytest.mark.parametrize("ranks", WORLDS)
def test_plan_for_any_needs(worlds, ranks, data):
    needs = data.draw(some_needs(ranks))
    want = [[expected(needs, rank)] * 2 for rank in range(ranks)]
    assert worlds.run(ranks, by_both_ways, needs) == want


def with_counts_given(rank, needs):
    """Give the counts that ranks would tell each other, in several forms."""
    matrix = needs.matrix
    forms = (matrix, [list(row) for row in matrix], list(np.array(matrix)), torch.tensor(matrix))
    plans = [
        ExchangePlan.from_indices(needs.index_of(rank), needs.sizes[rank], form) for form in forms
    ]
    return [described(plan, needs, rank) for plan in plans]


@pytest.mark.parametrize("ranks", WORLDS)
def test_counts_may_be_given(worlds, ranks):
    needs = all_to_all_needs(ranks)
    want = [[expected(needs, rank)] * 4 for rank in range(ranks)]
    assert worlds.run(ranks, with_counts_given, needs) == want


def from_int32(rank, needs):
    plans = (
        ExchangePlan.from_indices(needs.index_of(rank, torch.int32), np.int32(needs.sizes[rank])),
        ExchangePlan.from_needed(needs.needed(rank, torch.int32), np.array(needs.sizes)),
    )
    dtypes = {plan.send_index.dtype for plan in plans}
    kinds = {type(plan.num_rows) for plan in plans}
    return dtypes == {torch.int64}, kinds == {int}, [described(p, needs, rank) for p in plans]


def test_int32_indices_and_sizes_of_numpy_are_taken(worlds):
    needs = all_to_all_needs(3)
    want = [(True, True, [expected(needs, rank)] * 2) for rank in range(3)]
    assert worlds.run(3, from_int32, needs) == want


def changed_afterwards(rank, needs):
    """Change what was given to the plan after it has been made."""
    indices = needs.index_of(rank)
    plan = ExchangePlan.from_indices(indices, needs.sizes[rank])
    needed = needs.needed(rank)
    other = ExchangePlan.from_needed(needed, needs.sizes)
    for tensor in (*indices, needed):
        tensor.zero_()
    return [described(p, needs, rank) for p in (plan, other)]


@pytest.mark.parametrize("ranks", [1, 3])
def test_plan_does_not_share_memory_with_its_indices(worlds, ranks):
    needs = all_to_all_needs(ranks)
    want = [[expected(needs, rank)] * 2 for rank in range(ranks)]
    assert worlds.run(ranks, changed_afterwards, needs) == want


def in_a_part(rank, members, needs):
    """Some of the world exchange among themselves, counted by their ranks in the group."""
    group = dist.new_group(list(members))
    answers = None
    if rank in members:
        mine = members.index(rank)
        plans = (needs.plan_of_indices(mine, group), needs.plan_of_needed(mine, group))
        answers = [described(plan, needs, mine) for plan in plans]
    dist.barrier()
    return answers


@pytest.mark.parametrize(
    ("ranks", "members"), [(3, (1, 2)), pytest.param(5, (1, 3, 4), marks=pytest.mark.slow)]
)
def test_subgroup(worlds, ranks, members):
    needs = in_a_ring(len(members))
    answers = worlds.run(ranks, in_a_part, members, needs)
    for rank, answer in enumerate(answers):
        want = [expected(needs, members.index(rank))] * 2 if rank in members else None
        assert answer == want


def few_of_many(rank):
    """Need one row of each of two ranks, which have a million: what does a rank send for that?"""
    needed = torch.tensor([5, 1_999_999]) if rank == 0 else torch.tensor([], dtype=torch.int64)
    with varcomm.trace() as calls:
        plan = ExchangePlan.from_needed(needed, (1_000_000, 1_000_000))
    return sum(call.sent for call in calls), plan.send_index.tolist()


def test_only_the_needed_ids_travel(worlds):
    (sent_by_zero, send_index), (sent_by_one, other) = worlds.run(2, few_of_many)
    assert (send_index, other) == ([5], [999_999])
    assert sent_by_zero == 8 + 8  # how many ids, and the one that the other has
    assert sent_by_one == 8
