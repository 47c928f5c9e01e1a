"""A rank that does not come to a call: the others raise soon, and name it and its last place."""

import re
import time
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import varcomm
from varcomm import CommunicationError, DisagreementError

F = torch.zeros


def error_of(call, limit=1.0):
    """Return the error of a call in debug(), and its seconds."""
    began = time.monotonic()
    with pytest.raises(CommunicationError) as caught, varcomm.debug(limit):
        call()
    return str(caught.value), time.monotonic() - began


def of_group(limit=60):
    """Return a group of its own, since it is closed afterwards."""
    return dist.new_group(timeout=timedelta(seconds=limit))


def one_call_and_an_error(group):
    with varcomm.debug(1):
        varcomm.all_reduce(F(3), group=group)
        raise KeyError("no such file")


def left(rank):
    group = of_group()
    if rank == 1:
        with pytest.raises(KeyError):
            one_call_and_an_error(group)
        return None

    def calls():
        varcomm.all_reduce(F(3), group=group)
        varcomm.all_gather_v(F(2), [2, 2, 2], group=group)

    return error_of(calls)


def test_a_rank_that_has_left_with_an_exception(worlds):
    first, nothing, last = worlds.run(3, left)
    assert nothing is None
    for rank, (message, seconds) in ((0, first), (2, last)):
        assert seconds < 6
        start = rf"all_gather_v on rank {rank} of 3: rank 1 has not come within \d\.\d s to call 2 "
        assert re.match(start, message), message
        lines = message.splitlines()
        assert re.fullmatch(r"  rank  call  of ranks  operation     at +left with", lines[1])
        here = r"\S+/test_absent\.py:\d+, in \w+"
        assert re.fullmatch(rf"  0, 2  2     0-2       all_gather_v  {here} *", lines[2])
        end = "KeyError: 'no such file'"
        assert re.fullmatch(rf"  1     1     0-2       all_reduce    {here} +{end}", lines[3])


def elsewhere(rank):
    group, pair = of_group(), dist.new_group([0, 1])

    def calls():
        if rank == 1:
            varcomm.broadcast(F(2), group=pair)
        varcomm.all_gather_v(F(2), [2, 2, 2], group=group)

    return error_of(calls)[0]


def in_a_twin(rank):
    group, twin = of_group(), of_group()
    message, _ = error_of(lambda: varcomm.all_reduce(F(2), group=twin if rank == 1 else group))
    return message, group.group_name, twin.group_name


def test_a_rank_that_waits_in_another_group(worlds):
    first, second, third = messages = worlds.run(3, elsewhere)
    assert "rank 1 has not come" in first
    assert "rank 1 has not come" in third
    assert second.startswith("broadcast on rank 1 of 2: rank 0 has not come")
    for message in messages:
        row = r"^  1     1     0, 1      broadcast     \S+:\d+, in calls$"
        assert re.search(row, message, re.M)
    for message, group, twin in worlds.run(3, in_a_twin):
        lines = [line.split() for line in message.splitlines()[1:4]]
        assert lines[0][:2] == ["rank", "group"]
        assert lines[1][:4] == ["0,", "2", group, "1"]
        assert lines[2][:3] == ["1", twin, "1"]


def skipped(rank):
    """Rank 1 lacks the first of two calls; it then comes to the first of the others' calls."""

    def calls():
        if rank != 1:
            varcomm.all_reduce(F(3))
        varcomm.all_gather_v(F(2), [2, 2, 2])

    with pytest.raises(DisagreementError) as caught, varcomm.debug(20):
        calls()
    lines = str(caught.value).splitlines()
    x = torch.zeros(2, 3 + (rank > 0), dtype=[torch.float32, torch.float64][rank > 0])
    with pytest.raises(DisagreementError) as caught, varcomm.debug(20):
        varcomm.all_gather_v(x, [2, 2, 2])
    words = [re.split("  +", line.strip()) for line in str(caught.value).splitlines()[1:]]
    return lines, words


def test_the_table_of_ranks(worlds):
    first, *others = worlds.run(3, skipped)
    assert others == [first] * 2
    lines, words = first
    assert lines[0].startswith(
        "ranks disagree on operation: rank 0 has 'all_reduce'; rank 1 has 'a"
    )
    here = r"\S+/test_absent\.py:\d+, in calls"
    assert re.fullmatch(rf"  0, 2  all_reduce    {here}", lines[2])
    assert re.fullmatch(rf"  1     all_gather_v  {here}", lines[3])
    assert words[0] == ["rank", "operation", "shape of a row", "dtype", "at"]
    assert [line[:4] for line in words[1:]] == [
        ["0", "all_gather_v", "[3]", "torch.float32"],
        ["1, 2", "all_gather_v", "[4]", "torch.float64"],
    ]


def in_backward(rank):
    group = of_group()
    x = F(2, requires_grad=True)
    y = varcomm.all_reduce(x, group=group).sum()
    return None if rank == 1 else error_of(y.backward)[0]


def test_a_rank_that_does_not_come_to_backward(worlds):
    for rank, message in enumerate(worlds.run(3, in_backward)):
        if rank != 1:
            assert message.startswith(f"all_reduce on rank {rank} of 3: rank 1 has not come")


def late(rank, compared):
    """Rank 1 comes when others have given up, and they go on in the same group."""
    group, began = of_group(), time.monotonic()
    if rank == 1:
        time.sleep(3)
    else:
        first, _ = error_of(lambda: varcomm.all_reduce(F(2), group=group))
        assert "rank 1 has not come" in first
    block = varcomm.debug(60) if rank == 1 and compared else nullcontext()
    with pytest.raises(CommunicationError) as caught, block:
        varcomm.all_reduce(F(2), group=group)
    with pytest.raises(CommunicationError) as again, varcomm.debug(60):
        varcomm.all_gather_v(F(2), [2, 2, 2], group=group)
    return str(caught.value), time.monotonic() - began, str(again.value)


@pytest.mark.parametrize("compared", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_group_in_which_ranks_have_given_up_is_closed(worlds, compared):
    answers = worlds.run(3, late, compared)
    assert max(seconds for _, seconds, _ in answers) < 20
    for _, _, again in answers[::2]:
        start = "all_gather_v: this group has been given up: all_reduce on rank "
        assert again.startswith(start)
        assert "rank 1 has not come within" in again
    if compared:
        given_up = "ranks 0, 2 have given up waiting for this rank in call 1 of the group inside"
        assert answers[1][0].startswith(f"all_reduce on rank 1 of 3: {given_up}")


def too_late(rank, async_op):
    """Outside debug(), the timeout of the group ends a call."""
    group = of_group(2)
    if rank == 1:
        time.sleep(6)
        return None
    with pytest.raises(CommunicationError) as caught:
        gather(group, async_op)
    return str(caught.value)


def gather(group, async_op):
    found = varcomm.all_gather_v(F(2, 5), [2, 2, 2], group=group, async_op=async_op)
    return found.wait() if async_op else found


@pytest.mark.parametrize("async_op", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_call_that_fails_is_described(worlds, async_op):
    answers = worlds.run(3, too_late, async_op)
    for rank in (0, 2):
        message = answers[rank]
        assert re.match(rf"all_gather_v on rank {rank} of 3: failed after \d\.\d s: ", message)
        assert "float32 [2, 5] here, with dim 0, sizes [2, 2, 2], " in message
        assert "The group is of ranks 0-2. It has failed on 2 of 3: 0, 2; rank 1 not " in message
