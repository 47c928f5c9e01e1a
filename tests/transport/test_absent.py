"""Where a rank does not come to a call, the others say so soon, and where it is."""

import os
import re
import time
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import varcomm
from varcomm import ArgumentError, CommunicationError, DisagreementError, VarcommError
from varcomm.transport.agreement import agree
from varcomm.transport.group import resolve

F = torch.zeros


def told(call, limit=1.0):
    """What the error of a call in debug() says, and after how many seconds."""
    began = time.monotonic()
    with pytest.raises(CommunicationError) as caught, varcomm.debug(limit):
        call()
    return str(caught.value), time.monotonic() - began


def of_group(limit=60):
    """A group of its own, since it is closed afterwards."""
    return dist.new_group(timeout=timedelta(seconds=limit))


def left(rank):
    group = of_group()
    if rank == 1:
        with pytest.raises(KeyError):
            leave(group)
        return None

    def calls():
        varcomm.all_reduce(F(3), group=group)
        varcomm.all_gather_v(F(2), [2, 2, 2], group=group)

    return told(calls)


def leave(group):
    with varcomm.debug(1):
        varcomm.all_reduce(F(3), group=group)
        raise KeyError("no such file")


def test_a_rank_that_has_left_with_an_exception(worlds):
    first, nothing, last = worlds.run(3, left)
    assert nothing is None
    for rank, (message, seconds) in ((0, first), (2, last)):
        assert seconds < 4
        start = rf"all_gather_v on rank {rank} of 3: rank 1 has not come within \d\.\d s to call 2 "
        assert re.match(start, message), message
        lines = message.splitlines()
        assert re.fullmatch(r"  rank  call  of ranks  operation     at +left with", lines[1])
        here = r"\S+/test_absent\.py:\d+, in \w+"
        assert re.fullmatch(rf"  0, 2  2     0-2       all_gather_v  {here} *", lines[2])
        assert re.fullmatch(
            rf"  1     1     0-2       all_reduce    {here} +KeyError: 'no such file'", lines[3]
        )
        assert lines[-1].endswith("varcomm.debug(timeout=...), VARCOMM_DEBUG_TIMEOUT.")


def elsewhere(rank):
    group, pair = of_group(), dist.new_group([0, 1])

    def calls():
        if rank == 1:
            varcomm.broadcast(F(2), group=pair)
        varcomm.all_gather_v(F(2), [2, 2, 2], group=group)

    return told(calls)


def test_a_rank_that_waits_in_another_group(worlds):
    first, second, third = (message for message, _ in worlds.run(3, elsewhere))
    assert "rank 1 has not come" in first
    assert "rank 1 has not come" in third
    assert second.startswith("broadcast on rank 1 of 2: rank 0 has not come")
    for message in (first, second, third):
        assert re.search(
            r"^  1     1     0, 1      broadcast     \S+:\d+, in calls$", message, re.M
        )


def in_a_twin(rank):
    group, twin = of_group(), of_group()
    message, _ = told(lambda: varcomm.all_reduce(F(2), group=twin if rank == 1 else group))
    return message, group.group_name, twin.group_name


def test_a_rank_that_waits_in_another_group_of_the_same_ranks(worlds):
    for message, group, twin in worlds.run(3, in_a_twin):
        lines = message.splitlines()
        assert lines[1].split()[:2] == ["rank", "group"]
        assert lines[2].split()[:4] == ["0,", "2", group, "1"]
        assert lines[3].split()[:3] == ["1", twin, "1"]


def disagreement(call, limit=20):
    with pytest.raises(DisagreementError) as caught, varcomm.debug(limit):
        call()
    return str(caught.value)


def skipped(rank):
    """Rank 1 lacks the first of two calls; it then comes to the first of the others' calls."""
    group = of_group()

    def calls():
        if rank != 1:
            varcomm.all_reduce(F(3), group=group)
        varcomm.all_gather_v(F(2), [2, 2, 2], group=group)

    return disagreement(calls)


def test_a_rank_that_has_skipped_a_call(worlds):
    answers = worlds.run(3, skipped)
    assert answers == [answers[0]] * 3
    lines = answers[0].splitlines()
    assert lines[0] == (
        "ranks disagree on operation: rank 0 has 'all_reduce'; rank 1 has 'all_gather_v'; "
        "rank 2 has 'all_reduce'."
    )
    here = r"\S+/test_absent\.py:\d+, in calls"
    assert re.fullmatch(rf"  0, 2  all_reduce    {here}", lines[2])
    assert re.fullmatch(rf"  1     all_gather_v  {here}", lines[3])


def in_backward(rank):
    group = of_group()
    x = F(2, requires_grad=True)
    y = varcomm.all_reduce(x, group=group).sum()
    return None if rank == 1 else told(y.backward)[0]


def test_a_rank_that_does_not_come_to_backward(worlds):
    for rank, message in enumerate(worlds.run(2, in_backward)):
        if rank == 0:
            assert message.startswith("all_reduce on rank 0 of 2: rank 1 has not come")
            assert re.search(r"^  0 .*test_absent\.py:\d+, in told", message, re.M)


def late(rank, compared):
    """Rank 1 comes when others have given up, and they go on in the same group."""
    group, began = of_group(), time.monotonic()
    if rank == 1:
        time.sleep(3)
    else:
        first, _ = told(lambda: varcomm.all_reduce(F(2), group=group))
        assert "rank 1 has not come" in first
    block = varcomm.debug(60) if rank == 1 and compared else nullcontext()
    with pytest.raises(CommunicationError) as caught, block:
        varcomm.all_reduce(F(2), group=group)
    with pytest.raises(CommunicationError) as again, varcomm.debug(60):
        varcomm.all_gather_v(F(2), [2, 2, 2], group=group)
    return str(caught.value), time.monotonic() - began, str(again.value)


@pytest.mark.parametrize("compared", [False, True], ids=["", "in debug"])
def test_a_group_in_which_ranks_have_given_up_is_closed(worlds, compared):
    """Nobody waits there again, and nobody gets the numbers of another call."""
    answers = worlds.run(3, late, compared)
    assert max(seconds for _, seconds, _ in answers) < 20
    for _, _, again in answers[::2]:
        start = "all_gather_v: this group has been given up: all_reduce on rank "
        assert again.startswith(start)
        assert "rank 1 has not come within" in again
    if compared:
        given_up = "ranks 0, 2 have given up waiting for this rank in call 1 of the group inside"
        assert answers[1][0].startswith(f"all_reduce on rank 1 of 3: {given_up}")


def all_differences(rank):
    rows, dtype = (3, torch.float32) if rank == 0 else (4, torch.float64)
    x = torch.zeros(2, rows, dtype=dtype)
    message = disagreement(lambda: varcomm.all_gather_v(x, [2, 2, 2]))
    return message.splitlines(), varcomm.all_reduce(torch.tensor(1)).item()


def test_the_table_has_all_that_differs(worlds):
    for lines, total in worlds.run(3, all_differences):
        assert total == 3, "the group works as before"
        words = [line.split("  ") for line in lines[1:]]
        words = [[word.strip() for word in line if word.strip()] for line in words]
        assert words[0] == ["rank", "operation", "shape of a row", "dtype", "at"]
        assert [line[:4] for line in words[1:]] == [
            ["0", "all_gather_v", "[3]", "torch.float32"],
            ["1, 2", "all_gather_v", "[4]", "torch.float64"],
        ]
        assert all(re.search(r"test_absent\.py:\d+, in <lambda>", line[4]) for line in words[1:])


def too_late(rank, with_work):
    """Outside of debug(), the time limit of the group ends a call."""
    group = of_group(2)
    if rank == 1:
        time.sleep(6)
        return None
    with pytest.raises(CommunicationError) as caught:
        gather(group, with_work)
    return str(caught.value)


def gather(group, with_work):
    found = varcomm.all_gather_v(F(2, 5), [2, 2, 2], group=group, async_op=with_work)
    return found.wait() if with_work else found


@pytest.mark.parametrize("with_work", [False, True], ids=["", "asynchronous"])
def test_a_call_that_fails_says_what_it_was(worlds, with_work):
    answers = worlds.run(3, too_late, with_work)
    for rank in (0, 2):
        message = answers[rank]
        assert re.match(rf"all_gather_v on rank {rank} of 3: failed after \d\.\d s: ", message)
        assert "It is of float32 [2, 5] here, with dim 0, sizes [2, 2, 2], " in message
        assert "The group is of ranks 0-2. It has failed on 2 of 3: 0, 2; rank 1 not " in message


@pytest.mark.parametrize("limit", [0, -1, "soon", None, float("nan")])
def test_limits_that_are_none(limit):
    with pytest.raises(ArgumentError, match="timeout must be a positive number of seconds"):
        varcomm.debug(limit).__enter__()


def by_environment(rank):
    os.environ |= {"VARCOMM_DEBUG": "1", "VARCOMM_DEBUG_TIMEOUT": "0.5"}
    group = of_group()
    try:
        if rank == 0:
            with pytest.raises(CommunicationError, match="rank 1 has not come within 0"):
                varcomm.all_reduce(F(1), group=group)
        return resolve(group).size
    finally:
        del os.environ["VARCOMM_DEBUG"], os.environ["VARCOMM_DEBUG_TIMEOUT"]


def test_the_limit_by_environment(worlds):
    assert worlds.run(2, by_environment) == [2, 2]


def malformed(rank):
    """One rank has been started with a limit that is none."""
    os.environ |= {"VARCOMM_DEBUG": "1"} | ({"VARCOMM_DEBUG_TIMEOUT": "-2 s"} if rank == 1 else {})
    world, said = resolve(None), []
    try:
        for call in (lambda: varcomm.all_reduce(F(1)), lambda: agree("work", lambda: 1, world)):
            with pytest.raises(VarcommError) as caught:
                call()
            said.append(str(caught.value).splitlines()[0])
    finally:
        del os.environ["VARCOMM_DEBUG"]
        os.environ.pop("VARCOMM_DEBUG_TIMEOUT", None)
    return said, varcomm.all_reduce(torch.ones(())).item()


def test_a_limit_in_the_environment_of_one_rank(worlds):
    text = "VARCOMM_DEBUG_TIMEOUT must be a positive number of seconds; got '-2 s'."
    said = [
        f"all_reduce: not called, since on rank 1: {text}",
        f"work: refused on rank 1 of 3: {text}",
    ]
    assert worlds.run(3, malformed) == [(said, 3.0)] * 3
