"""A plan cannot be changed; it can be moved, saved and loaded."""

import copy
import io
import pickle
from dataclasses import FrozenInstanceError, fields

import pytest
import torch

from tests.plan.naive import WORLDS, all_to_all_needs, in_a_ring, of_first_rank
from varcomm import ArgumentError, DisagreementError, ExchangePlan, GroupError, VarcommError


def frozen(rank):
    plan = in_a_ring(1).plan_of_indices(rank)
    for name in [field.name for field in fields(plan)]:
        with pytest.raises(FrozenInstanceError, match=f"cannot assign to field '{name}'"):
            setattr(plan, name, getattr(plan, name))
    return len(fields(plan))


def test_nothing_of_a_plan_can_be_assigned(worlds):
    assert worlds.run(1, frozen) == [6]


def moved(rank, needs):
    plan = needs.plan_of_indices(rank)
    same, away = plan.to("cpu"), plan.to(torch.device("meta"))
    x = torch.arange(float(plan.num_rows))
    y = torch.arange(float(sum(plan.recv_counts)))
    return (
        torch.equal(same(x), plan(x)) and torch.equal(same.adjoint(y), plan.adjoint(y)),
        (away.send_index.device.type, away.send_counts, away.recv_counts, away.num_rows),
        (plan.send_index.device.type, plan.send_counts, plan.recv_counts, plan.num_rows),
    )


def test_to(worlds):
    for equal, away, here in worlds.run(3, moved, of_first_rank(3)):
        assert equal
        assert (away[0], here[0]) == ("meta", "cpu")
        assert away[1:] == here[1:]


def saved(rank, needs):
    file = io.BytesIO()
    torch.save(needs.plan_of_indices(rank).state_dict(), file)
    return file.getvalue()


def loaded(rank, files, needs):
    state = torch.load(io.BytesIO(files[rank]), weights_only=True)
    plan, again = needs.plan_of_indices(rank), ExchangePlan.from_state_dict(state)
    x, y = torch.randn(plan.num_rows, 2), torch.randn(sum(plan.recv_counts), 2)
    return [
        torch.equal(again.send_index, plan.send_index),
        (again.send_counts, again.recv_counts) == (plan.send_counts, plan.recv_counts),
        (again.num_rows, again.neighbours) == (plan.num_rows, plan.neighbours),
        torch.equal(again(x), plan(x)),
        torch.equal(again.adjoint(y), plan.adjoint(y)),
    ]


@pytest.mark.parametrize("shape", [all_to_all_needs, of_first_rank, in_a_ring])
@pytest.mark.parametrize("ranks", WORLDS)
def test_saved_and_loaded(worlds, ranks, shape):
    needs = shape(ranks)
    files = worlds.run(ranks, saved, needs)
    assert worlds.run(ranks, loaded, files, needs) == [[True] * 5] * ranks


def refused(rank, states):
    with pytest.raises(VarcommError) as caught:
        ExchangePlan.from_state_dict(states[rank])
    ring = in_a_ring(3).plan_of_needed(rank)
    return type(caught.value), str(caught.value), ring(torch.full((rank + 1,), 1.0)).tolist()


def states_of(worlds, ranks, needs):
    files = worlds.run(ranks, saved, needs)
    return [torch.load(io.BytesIO(file), weights_only=True) for file in files]


def swapped(worlds):
    zero, one, two = states_of(worlds, 3, all_to_all_needs(3))
    return [one, zero, two], ArgumentError, "rank 0 of 3 (and on 1 more: [1]): ", "of rank 1 of 3."


def of_another_world(worlds):
    zero, one = states_of(worlds, 2, all_to_all_needs(2))
    two = states_of(worlds, 3, all_to_all_needs(3))[2]
    return [zero, one, two], ArgumentError, "rank 0 of 3 (and on 1 more: [1]): ", "rank 0 of 2."


def of_another_plan(worlds):
    states = states_of(worlds, 3, all_to_all_needs(3))
    states[1] = states_of(worlds, 3, in_a_ring(3))[1]
    said = "which send [2, 0, 2]: these are states of different plans."
    return states, DisagreementError, "rank 0 of 3 (and on 2 more: [1, 2]): it expects ", said


def with_counts_of_others(worlds):
    states = states_of(worlds, 3, in_a_ring(3))
    states[2]["send_counts"] = [1, 1, 1]
    return states, ArgumentError, "rank 2 of 3: ", ""


def with_rows_out_of_range(worlds):
    states = states_of(worlds, 3, in_a_ring(3))
    states[2]["num_rows"] = 2
    return states, ArgumentError, "rank 2 of 3: ", "spans 2...2, out of range for 2 own rows."


@pytest.mark.parametrize(
    "wrong",
    [swapped, of_another_world, of_another_plan, with_counts_of_others, with_rows_out_of_range],
)
def test_states_that_do_not_fit_are_refused_on_all_ranks(worlds, wrong):
    states, kind, who, said = wrong(worlds)
    kinds, messages, after = zip(*worlds.run(3, refused, states), strict=True)
    assert kinds == (kind,) * 3
    assert len(set(messages)) == 1
    assert f": refused on {who}" in messages[0]
    assert said in messages[0]
    assert after == ([1.0],) * 3


def copied(rank, needs):
    plan = needs.plan_of_needed(rank)
    model = torch.nn.Linear(1, 1)
    model.plan = plan
    with pytest.raises(GroupError, match=r"cannot be pickled\. Keep state_dict\(\)"):
        pickle.dumps(plan)
    return copy.copy(plan) is plan, copy.deepcopy(model).plan is plan


def test_copies_of_a_model_share_its_plan(worlds):
    assert worlds.run(2, copied, all_to_all_needs(2)) == [(True, True)] * 2


def no_state(rank, state):
    with pytest.raises(ArgumentError) as caught:
        ExchangePlan.from_state_dict(state)
    return str(caught.value)


@pytest.mark.parametrize("state", [{}, None, [1], {"rank": 0}], ids=str)
def test_what_is_no_state_is_refused_on_all_ranks(worlds, state):
    said = "refused on rank 0 of 2 (and on 1 more: [1]): this is not what ExchangePlan.state_dict"
    assert all(said in message for message in worlds.run(2, no_state, state))
