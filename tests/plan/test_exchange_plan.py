"""Exchange plans: built in every way, called, differentiated, saved; against numpy."""

import copy
import inspect
import io
import pickle
import time
from dataclasses import FrozenInstanceError, fields
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import varcomm
from tests.plan.naive import (
    all_to_all_needs,
    in_a_ring,
    many_copies,
    of_first_rank,
    some_needs,
    three_still_exchange,
)
from tests.worlds import WORLDS, on_ranks, refused_alike
from varcomm import ArgumentError, DisagreementError, ExchangePlan, GroupError


def by_both_ways(rank, needs):
    """Make the plan in both ways; describe what they are and do."""
    return [
        described(plan, needs, rank)
        for plan in (needs.plan_of_indices(rank), needs.plan_of_needed(rank))
    ]


def described(plan, needs, rank):
    x = torch.tensor(needs.own_rows(2)[rank])
    y = torch.tensor(needs.copies(2)[rank])
    return {
        "send_index": plan.send_index.tolist(),
        "send_counts": plan.send_counts,
        "recv_counts": plan.recv_counts,
        "num_rows": plan.num_rows,
        "neighbours": plan.neighbours,
        "nbytes": plan.nbytes(x),
        "forward": plan(x).tolist(),
        "started": plan.start(x).wait().tolist(),
        "adjoint": plan.adjoint(y).tolist(),
    }


def expected(needs, rank):
    received = needs.received(needs.own_rows(2), rank).tolist()
    return {
        "send_index": [row for index in needs.indices[rank] for row in index],
        "send_counts": needs.counts_from(rank),
        "recv_counts": needs.counts_to(rank),
        "num_rows": needs.sizes[rank],
        "neighbours": needs.neighbours(rank),
        "nbytes": 16 * (sum(needs.counts_from(rank)) - needs.counts_from(rank)[rank]),
        "forward": received,
        "started": received,
        "adjoint": needs.summed(needs.copies(2), rank).tolist(),
    }


@settings(deadline=None, max_examples=12)
@given(data=st.data())
@pytest.mark.parametrize("ranks", WORLDS)
def test_plan_for_any_needs(worlds, ranks, data):
    needs = data.draw(some_needs(ranks))
    want = [[expected(needs, rank)] * 2 for rank in range(ranks)]
    assert worlds.run(ranks, by_both_ways, needs) == want


@on_ranks(*WORLDS)
def test_forms_of_arguments(rank, ranks):
    """Give counts and indices in several forms, then change the indices."""
    needs = all_to_all_needs(ranks)
    matrix, n, sizes = needs.matrix, needs.sizes[rank], needs.sizes
    forms = (matrix, [list(row) for row in matrix], list(np.array(matrix)), torch.tensor(matrix))
    indices, needed = needs.index_of(rank), needs.needed(rank)
    plans = [ExchangePlan.from_indices(indices, n, form) for form in (None, *forms)]
    plans += [
        ExchangePlan.from_indices(needs.index_of(rank, torch.int32), np.int32(n)),
        ExchangePlan.from_needed(needs.needed(rank, torch.int32), np.array(sizes)),
        ExchangePlan.from_needed(needed, sizes),
    ]
    for tensor in (*indices, needed):
        tensor.zero_()
    assert {plan.send_index.dtype for plan in plans} == {torch.int64}
    assert {type(plan.num_rows) for plan in plans} == {int}
    assert [described(plan, needs, rank) for plan in plans] == [expected(needs, rank)] * 8


@on_ranks(2)
def test_only_the_needed_ids_travel(rank):
    """Need one row of each of two ranks, which have a million: what does a rank send for that?"""
    needed = torch.tensor([5, 1_999_999] if rank == 0 else [], dtype=torch.int64)
    with varcomm.trace() as calls:
        plan = ExchangePlan.from_needed(needed, (1_000_000, 1_000_000))
    assert plan.send_index.tolist() == [[5], [999_999]][rank]
    # how many ids, and the one that the other has
    assert sum(call.sent for call in calls) == [8 + 8, 8][rank]


# --- calls


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@on_ranks(*WORLDS)
def test_sums_are_the_same_bit_for_bit_whichever_rank_is_late(rank, ranks, dtype):
    needs = many_copies(ranks, 40)
    plan = needs.plan_of_indices(rank)
    generator = torch.Generator().manual_seed(rank)
    copies = sum(needs.counts_to(rank))
    y = torch.randn(copies, 3, dtype=torch.float64, generator=generator)
    y = (y * 10.0 ** torch.randint(-6, 7, (copies, 1), generator=generator)).to(dtype)
    totals = []
    for turn in range(6):
        time.sleep(0.01 * ((rank + turn) % needs.ranks))
        again = plan if turn < 3 else needs.plan_of_needed(rank)
        totals.append(again.adjoint(y))
    assert all(torch.equal(a, b) for a, b in pairwise(totals))
    assert bool(totals[0].abs().sum() > 0) == (rank == 0)


SIGNATURES = {
    "all_gather_v": "(tensor, sizes=None, dim=0, use_fp32=True, group=None, *, async_op=False)",
    "gather_v": "(tensor, sizes=None, dim=0, dst=0, group=None, *, async_op=False)",
    "scatter_v": "(tensor, sizes, dim=0, src=0, group=None, *, like=None, async_op=False)",
    "indexed_all_to_all_v": (
        "(tensor, indices, sizes, use_fp32=True, dim=0, group=None, *, async_op=False)"
    ),
}


def test_signatures_that_callers_rely_on():
    for name, expected in SIGNATURES.items():
        signature = inspect.signature(getattr(varcomm, name))
        bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        assert str(inspect.Signature(bare)) == expected


# --- copies and files


@on_ranks(3)
def test_a_plan_is_frozen_moved_and_shared_by_copies(rank):
    plan = of_first_rank(3).plan_of_indices(rank)
    for field in fields(plan):
        with pytest.raises(FrozenInstanceError, match=f"cannot assign to field '{field.name}'"):
            setattr(plan, field.name, getattr(plan, field.name))
    device = plan.send_index.device
    same, away = plan.to(device), plan.to(torch.device("meta"))
    assert same is plan
    assert (away.send_index.device.type, plan.send_index.device) == ("meta", device)
    assert (away.send_counts, away.recv_counts) == (plan.send_counts, plan.recv_counts)
    model = torch.nn.Linear(1, 1)
    model.plan = plan
    with pytest.raises(GroupError, match=r"cannot be pickled.* Keep state_dict\(\)"):
        pickle.dumps(plan)
    assert copy.copy(plan) is plan
    assert copy.deepcopy(model).plan is plan


@pytest.mark.parametrize("shape", [all_to_all_needs, of_first_rank, in_a_ring])
@on_ranks(*WORLDS)
def test_saved_and_loaded(rank, ranks, shape):
    plan, file = shape(ranks).plan_of_indices(rank), io.BytesIO()
    torch.save(plan.state_dict(), file)
    file.seek(0)
    again = ExchangePlan.from_state_dict(torch.load(file, weights_only=True))
    x, y = torch.randn(plan.num_rows, 2), torch.randn(sum(plan.recv_counts), 2)
    assert torch.equal(again.send_index, plan.send_index)
    assert (again.send_counts, again.recv_counts) == (plan.send_counts, plan.recv_counts)
    assert (again.num_rows, again.neighbours) == (plan.num_rows, plan.neighbours)
    assert torch.equal(again(x), plan(x))
    assert torch.equal(again.adjoint(y), plan.adjoint(y))


def state_of(rank, needs):
    return needs.plan_of_indices(rank).state_dict()


def refused(rank, states, kind, words):
    refused_alike(kind, lambda: ExchangePlan.from_state_dict(states[rank]), *words)
    assert three_still_exchange(rank)


def wrong_states(worlds):
    """Yield states of three ranks, the kind of the error, who refuses, a part of the message."""
    whole, ring = (worlds.run(3, state_of, needs(3)) for needs in (all_to_all_needs, in_a_ring))
    other = worlds.run(2, state_of, all_to_all_needs(2))
    yield (
        [whole[1], whole[0], whole[2]],
        ArgumentError,
        "0 of 3 (and on 1 more: [1])",
        "rank 1 of 3.",
    )
    yield [*other, whole[2]], ArgumentError, "0 of 3 (and on 1 more: [1])", "rank 0 of 2."
    mixed = [whole[0], ring[1], whole[2]]
    yield mixed, DisagreementError, "", "ranks have states of different plans."
    for changed, said in (
        ({"send_counts": [1, 1, 1]}, ""),
        ({"num_rows": 2}, "spans 2...2, out of range for 2 own rows."),
    ):
        yield [*ring[:2], ring[2] | changed], ArgumentError, "2 of 3: ", said
    yield [{}, None, {"rank": 0}], ArgumentError, "0 of 3 (and on 2 more: [1, 2])", "is not what"


def test_states_that_do_not_fit_are_refused_on_all_ranks(worlds):
    for states, kind, *words in wrong_states(worlds):
        worlds.run(3, refused, states, kind, words)
