"""debug(): ranks that differ, fail or do not come all raise an error in place of a hang."""

import re
import time
from contextlib import nullcontext
from datetime import timedelta
from itertools import permutations
from threading import Event, Thread

import pytest
import torch
import torch.distributed as dist

import varcomm
from tests.ops.primitives import PRIMITIVES, case
from tests.worlds import on_ranks, refused_alike
from varcomm import ArgumentError, CommunicationError, DisagreementError, ExchangePlan
from varcomm.transport.agreement import debugging
from varcomm.transport.debug import debug_timeout

F, ONE = torch.zeros, torch.ones(1)
SPLIT = [[1, 1, 0], [2, 0, 0]]


def message_of(call, kind=DisagreementError, limit=30.0):
    """Return the message of the error that `call` raises in debug()."""
    with pytest.raises(kind) as caught, varcomm.debug(limit):
        call()
    return str(caught.value)


def sizes_of(rank):
    return [2 * rank, 2 - 2 * rank, 0]


def counts_of(rank):
    return (3 + rank, [1, 2 + rank, 0], [1, 1, 1 + rank])


# The call on ranks 0 and 2, and on rank 1; and the words on which they differ.
DISAGREE = {
    "operation": lambda r: varcomm.all_reduce(F(1)) if r else varcomm.all_gather_v(F(1), [1] * 3),
    "dim": lambda r: varcomm.all_gather_v(F(2, 2), [2] * 3, dim=r),
    "sizes": lambda r: varcomm.all_gather_v(F(2 + r), [2 + r] * 3),
    "dtype": lambda r: varcomm.all_reduce(F(2).to([torch.float32, torch.int32][r])),
    "shape": lambda r: varcomm.all_reduce(F(2, r)),
    "shape of a row": lambda r: varcomm.all_gather_v(F(1, 2 + r), [1] * 3),
    "root": lambda r: varcomm.reduce(F(1), dst=r),
    "root ": lambda r: varcomm.broadcast(F(1), src=r),
    "sizes ": lambda r: varcomm.scatter_v(F(2), sizes_of(r)),
    "use_fp32": lambda r: varcomm.all_reduce(F(1), use_fp32=r == 0),
    "requires_grad": lambda r: varcomm.all_reduce(F(1, requires_grad=r == 1)),
    "split_sizes": lambda r: varcomm.transpose_v(F(1, 2), 1, SPLIT[r], 0, [1] * 3),
    "sizes  ": lambda r: varcomm.shard_v(F(2), sizes_of(r)),
    "shape ": lambda r: varcomm.all_reduce(F(r), async_op=True),
    "sends": lambda r: varcomm.all_to_all_v(F(counts_of(r)[0]), *counts_of(r)[1:]),
}


def assert_differ(words, call):
    """Assert that ranks differ in a call inside debug(): one error on all, which has words."""

    def in_debug():
        with varcomm.debug(30):
            call()

    error = refused_alike(DisagreementError, in_debug, match="sends|not called|rank 1 has ")
    assert words in str(error).splitlines()[0]


@on_ranks(3)
def test_calls_that_differ(rank):
    for words, call in DISAGREE.items():
        assert_differ(words.strip(), lambda call=call: call(int(rank == 1)))
    assert varcomm.all_reduce(torch.tensor(1)).item() == 3, "the group can be used"


@on_ranks(3)
def test_calls_in_backward_and_waits_that_differ(rank):
    x = torch.ones(2, requires_grad=True)
    results = varcomm.all_reduce(x), varcomm.all_gather_v(x, [2, 2, 2])
    y = varcomm.all_reduce(x**2).sum()
    with varcomm.debug():
        sums = [varcomm.all_reduce(x * v) for v in (1.0, 2.0)]
        rows = varcomm.all_gather_v(torch.ones(2, 3, requires_grad=True), [2, 2, 2])
        rows = torch.nn.functional.embedding(torch.tensor([0, 4]), rows, sparse=rank == 1)
        handle = varcomm.all_reduce(kept := torch.ones(2), async_op=True)
    if rank == 1:
        kept.add_(1)

    def waits():
        handles = [varcomm.all_reduce(torch.full((4,), v), async_op=True) for v in (1.0, 100.0)]
        for one in handles[:: -1 if rank == 1 else 1]:
            one.wait()
        return [one.wait().unique().item() for one in handles]

    assert waits() == [3, 300]
    for words, call in {
        "operation": results[rank == 1].sum().backward,
        "requires_grad": lambda: torch.autograd.grad(y, x, create_graph=rank == 0),
        "backward of call": lambda: [s.sum().backward() for s in sums[:: -1 if rank else 1]],
        "which call": waits,
        "wait for all_reduce: not called, since on rank 1": handle.wait,
        "reduce_scatter_v: not called, since on rank 1": rows.sum().backward,
    }.items():
        assert_differ(words, call)


SETUP = {
    "all_gather_v": lambda: varcomm.all_gather_v(ONE, [1, 1, 1]),
    "ExchangePlan.from_indices": lambda: ExchangePlan.from_indices([torch.tensor([0])] * 3, 1),
    "ExchangePlan.from_needed": lambda: ExchangePlan.from_needed(torch.tensor([0]), [1, 1, 1]),
    "ShardSizes.from_local": lambda: varcomm.ShardSizes.from_local(1),
}
WRONG = {  # refused on rank 1 alone, and the call of the others
    "all_gather_v": (
        lambda: varcomm.all_gather_v(ONE, [2, 2, 2]),
        SETUP["ExchangePlan.from_needed"],
    ),
    "ExchangePlan.from_indices": (
        lambda: ExchangePlan.from_indices([torch.tensor([7])] * 3, 1),
        lambda: varcomm.all_reduce(ONE),
    ),
    "on meta": (
        lambda: varcomm.all_gather_v(torch.ones(1, device="meta"), [1] * 3, async_op=True),
        lambda: varcomm.all_gather_v(ONE, [1] * 3, async_op=True),
    ),
}


@on_ranks(3)
def test_set_up_beside_other_calls(rank):
    for here, there in permutations(SETUP, 2):
        words = f"operation: rank 0 has '{here}'; rank 1 has '{there}'"
        assert_differ(words, SETUP[there if rank == 1 else here])
    for words, calls in WRONG.items():
        assert_differ(words, calls[rank != 1])
    assert varcomm.all_reduce(torch.tensor(1)).item() == 3


@on_ranks(1, 3)
def test_right_calls_pass(rank):
    for name in PRIMITIVES:
        c = case(name, "one empty", dist.get_world_size())
        with varcomm.debug():
            x = c.input(rank, torch.float64).requires_grad_()
            y = c.bind()(x)
            y.sum().backward()
        torch.testing.assert_close(y, c.reference(c.draw(torch.float64))[rank])
    assert not debugging()


# Ranks that do not come.


def of_group(limit=60):
    """Return a group of its own, because it is closed afterwards."""
    return dist.new_group(timeout=timedelta(seconds=limit))


def error_of(call):
    return message_of(call, CommunicationError, limit=1.0)


def left(rank):
    """Rank 1 leaves after one call with an exception; later it does not come to a backward."""
    group, other = of_group(), of_group()

    def calls():
        varcomm.all_reduce(F(3), group=group)
        varcomm.all_gather_v(F(2), [2, 2, 2], group=group)

    def one_call_and_an_error():
        varcomm.all_reduce(F(3), group=group)
        raise KeyError("no such file")

    began = time.monotonic()
    if rank == 1:
        message_of(one_call_and_an_error, KeyError)
    else:
        message = error_of(calls)
        assert time.monotonic() - began < 6
    y = varcomm.all_reduce(F(2, requires_grad=True), group=other).sum()
    return None if rank == 1 else (message, error_of(y.backward))


def test_a_rank_that_has_left(worlds):
    first, nothing, last = worlds.run(3, left)
    assert nothing is None
    for rank, (message, backward) in ((0, first), (2, last)):
        start = rf"all_gather_v on rank {rank} of 3: rank 1 has not come within \d\.\d s to call 2 "
        assert re.match(start, message), message
        lines = message.splitlines()
        assert re.fullmatch(r"  rank  group +call  of ranks  operation     at +left with", lines[1])
        here = r"\S+/test_debug\.py:\d+, in \w+"
        assert re.fullmatch(rf"  0, 2  \d+ +2     0-2       all_gather_v  {here} *", lines[2])
        end = "KeyError: 'no such file'"
        assert re.fullmatch(rf"  1     \d+ +1     0-2       all_reduce    {here} +{end}", lines[3])
        assert backward.startswith(f"all_reduce on rank {rank} of 3: rank 1 has not come")


@on_ranks(3)
def test_a_rank_that_waits_in_another_group(rank):
    """Rank 1 waits in another group of the same ranks: the table names the groups."""
    group, twin = of_group(), of_group()
    message = error_of(lambda: varcomm.all_reduce(F(2), group=twin if rank == 1 else group))
    assert f"rank {rank} of 3: {'ranks 0, 2 have' if rank == 1 else 'rank 1 has'} not" in message
    lines = [line.split() for line in message.splitlines()[1:4]]
    assert lines[0][:2] == ["rank", "group"]
    assert lines[1][:4] == ["0,", "2", group.group_name, "1"]
    assert lines[2][:3] == ["1", twin.group_name, "1"]


@on_ranks(3)
def test_the_table_of_ranks(rank):
    """Rank 1 lacks the first of two calls; it then comes to the first of the others' calls."""

    def calls():
        if rank != 1:
            varcomm.all_reduce(F(3))
        varcomm.all_gather_v(F(2), [2, 2, 2])

    x = torch.zeros(2, 3 + (rank > 0), dtype=[torch.float32, torch.float64][rank > 0])
    other = message_of(lambda: varcomm.all_gather_v(x, [2, 2, 2]))
    lines, words = message_of(calls).splitlines(), other.splitlines()
    words = [re.split("  +", line.strip())[:4] for line in words]
    here = r"\S+/test_debug\.py:\d+, in calls"
    assert re.fullmatch(rf"  0, 2  all_reduce    {here}", lines[2])
    assert re.fullmatch(rf"  1     all_gather_v  {here}", lines[3])
    assert words[1:] == [
        ["rank", "operation", "shape of a row", "dtype"],
        ["0", "all_gather_v", "[3]", "torch.float32"],
        ["1, 2", "all_gather_v", "[4]", "torch.float64"],
    ]


def late(rank):
    """Rank 1 comes when others have given up, and they go on in the same group."""
    group, began = of_group(), time.monotonic()

    def gather():
        varcomm.all_gather_v(F(2), [2, 2, 2], group=group)

    def reduce():
        varcomm.all_reduce(F(2), group=group)

    if rank != 1:
        assert "rank 1 has not come" in error_of(reduce)
    dist.barrier()
    block = varcomm.debug(60) if rank == 1 else nullcontext()
    with pytest.raises(CommunicationError) as caught, block:
        reduce()
    again = message_of(gather, CommunicationError, limit=60)
    assert time.monotonic() - began < 20
    return str(caught.value), again


def test_a_group_in_which_ranks_have_given_up_is_closed(worlds):
    answers = worlds.run(3, late)
    for _, again in answers[::2]:
        assert again.startswith("all_gather_v: this group has been given up: all_reduce on rank ")
        assert "rank 1 has not come within" in again
    assert "other ranks have given up call 1 of the group inside" in answers[1][0]


@pytest.mark.parametrize("async_op", [False, pytest.param(True, marks=pytest.mark.slow)])
@on_ranks(3)
def test_a_call_that_fails_is_described(rank, async_op):
    """Outside debug(), the timeout of the group ends a call."""
    group = of_group(1)
    if rank == 1:
        dist.barrier()
        return

    def gather():
        found = varcomm.all_gather_v(F(2, 5), [2, 2, 2], group=group, async_op=async_op)
        return found.wait() if async_op else found

    with pytest.raises(CommunicationError) as caught:
        gather()
    dist.barrier()
    message = str(caught.value)
    assert re.match(rf"all_gather_v on rank {rank} of 3: failed after \d\.\d s: ", message)
    assert "dtype float32, shape [2, 5], sizes [2, 2, 2], dim 0, " in message
    assert "The group is of ranks 0-2. It has failed on 2 of 3: 0, 2; rank 1 not " in message


# The switch.


def test_blocks_may_be_nested_and_left_in_any_order():
    with varcomm.debug(), varcomm.debug(5):
        with pytest.raises(KeyError), varcomm.debug():
            raise KeyError
        assert debug_timeout() == timedelta(seconds=5)
    begun, ended = Event(), Event()

    def beside():
        with varcomm.debug(50):
            begun.set()
            ended.wait()

    thread = Thread(target=beside)
    with varcomm.debug(7):
        thread.start()
        begun.wait()
    assert debugging()
    ended.set()
    thread.join()
    assert not debugging()
    for timeout in (0, -1, "soon", None, float("nan")):
        with pytest.raises(ArgumentError, match="timeout"):
            varcomm.debug(timeout).__enter__()


def by_environment(rank):
    with pytest.raises(DisagreementError, match="disagree on shape"):
        varcomm.all_reduce(F(rank))


@pytest.mark.usefixtures("new_interpreters")
def test_environment_variables(monkeypatch):
    monkeypatch.setenv("VARCOMM_DEBUG", "1")
    varcomm.launch(by_environment, 2)


@pytest.mark.slow
@pytest.mark.usefixtures("new_interpreters")
def test_environment_variable_that_is_off(monkeypatch):
    monkeypatch.setenv("VARCOMM_DEBUG", "off")
    assert varcomm.launch(lambda rank: debugging(), 1) == [False]
