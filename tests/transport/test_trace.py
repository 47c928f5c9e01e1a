"""Bytes counted and ranges in the profiler, for those who ask."""

import contextlib
import threading

import torch

import varcomm
from varcomm import Call, Trace, Traffic


def seen(call):
    return call.name, call.sent, call.received


def nested(rank):
    """The outer list has what the inner one has, before it, and after it."""
    x = torch.ones(2 - rank)
    with varcomm.trace() as outer:
        varcomm.all_gather_v(x, [2, 1])
        with varcomm.trace() as inner:
            varcomm.all_reduce(torch.ones(3, dtype=torch.float64))
        with contextlib.suppress(KeyError), varcomm.trace() as failed:
            varcomm.gather_v(x, [2, 1])
            raise KeyError
    varcomm.all_reduce(x[:1])
    return [[seen(call) for call in calls] for calls in (outer, inner, failed)]


def test_nested(worlds):
    first, second = worlds.run(2, nested)
    gathered, reduced = ("all_gather_v", 8, 4), ("all_reduce", 24, 24)
    assert first == [
        [gathered, reduced, ("gather_v", 0, 4)],
        [reduced],
        [("gather_v", 0, 4)],
    ]
    assert second == [
        [("all_gather_v", 4, 8), reduced, ("gather_v", 4, 0)],
        [reduced],
        [("gather_v", 4, 0)],
    ]


def two_lists_that_are_equal(rank):
    """Two empty lists are equal; the inner block must not stop the outer one's."""
    with varcomm.trace() as outer:
        with varcomm.trace() as inner:
            pass
        varcomm.all_reduce(torch.ones(1))
    return len(outer), len(inner)


def test_block_that_ends_empty_ends_only_itself(worlds):
    assert worlds.run(2, two_lists_that_are_equal) == [(1, 0)] * 2


def of_adjoints(rank):
    sizes = [2, 1]
    x = torch.ones(sizes[rank], dtype=torch.float64, requires_grad=True)
    with varcomm.trace() as calls:
        varcomm.all_gather_v(x, sizes).sum().backward()
        varcomm.broadcast(x[:1] if rank == 0 else None).sum().backward()
        varcomm.gather_v(x, sizes, dst=1).sum().backward()
    return [seen(call) for call in calls]


def test_backward_is_under_the_name_of_the_adjoint(worlds):
    first, second = worlds.run(2, of_adjoints)
    names = ["all_gather_v", "reduce_scatter_v", "broadcast", "reduce", "gather_v", "scatter_v"]
    assert [name for name, *_ in first] == [name for name, *_ in second] == names
    assert [call[1:] for call in first] == [(16, 8), (8, 16), (8, 0), (0, 8), (16, 0), (0, 16)]
    assert [call[1:] for call in second] == [(8, 16), (16, 8), (0, 8), (8, 0), (0, 16), (16, 0)]


def from_another_thread(rank):
    """Backward may run in a thread that is not the one that listens."""
    x = torch.ones(1, requires_grad=True)
    y = varcomm.all_reduce(x)
    with varcomm.trace() as calls:
        thread = threading.Thread(target=y.backward)
        thread.start()
        thread.join()
    return [seen(call) for call in calls], x.grad.item()


def test_calls_of_other_threads_count(worlds):
    assert worlds.run(2, from_another_thread) == [([("all_reduce", 4, 4)], 2.0)] * 2


def ranges(rank):
    x = torch.ones(2, requires_grad=True)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu) as profiler, varcomm.trace():
        varcomm.all_gather_v(x, [2, 2]).sum().backward()
        varcomm.all_reduce(x, async_op=True).wait()
    return {event.key for event in profiler.key_averages() if event.key.startswith("varcomm::")}


def test_ranges_in_the_profiler(worlds):
    expected = {"varcomm::all_gather_v", "varcomm::reduce_scatter_v", "varcomm::all_reduce"}
    assert worlds.run(2, ranges) == [expected] * 2


def alone(rank):
    with varcomm.trace() as calls:
        varcomm.all_to_all_v(torch.ones(3), [3], [3])
        varcomm.shard_v(torch.ones(3), [3])
    return calls


def test_what_a_rank_keeps_costs_nothing(worlds):
    assert worlds.run(1, alone) == [Trace([Call("all_to_all_v", {}, {})])]


def among_some(rank):
    """Ranks 2 and 0 of three, in this order; and all of them."""
    pair = torch.distributed.new_group([2, 0], sort_ranks=False)
    with varcomm.trace() as t:
        if rank != 1:
            place = [2, 0].index(rank)
            varcomm.all_gather_v(torch.ones(1 + place), [1, 2], group=pair)
            varcomm.all_gather_v(torch.ones(place), [0, 1], group=pair)
        varcomm.scatter_v(torch.ones(4, dtype=torch.int64), [1, 0, 3])
    return t


def test_sums_by_operation_and_by_peer_of_the_world(worlds):
    first, second, third = worlds.run(3, among_some)
    assert first.calls[:2] == [
        Call("all_gather_v", {2: 8}, {2: 4}),
        Call("all_gather_v", {2: 4}, {}),
    ]
    assert first.by_operation() == {
        "all_gather_v": Traffic(2, 2, 1, 12, 4),
        "scatter_v": Traffic(1, 1, 0, 24, 0),
    }
    assert first.by_peer() == {2: Traffic(3, 3, 1, 36, 4)}
    assert first.total == Traffic(3, 3, 1, 36, 4)
    assert second.by_operation() == {"scatter_v": Traffic(1)}
    assert second.by_peer() == {}
    assert third.by_peer() == {0: Traffic(3, 1, 3, 4, 36)}


def test_printed(worlds):
    table = str(worlds.run(3, among_some)[0]).splitlines()
    assert table == [
        "operation     calls  sent  bytes  received  bytes",
        "all_gather_v      2     2     12         1      4",
        "scatter_v         1     1     24         0      0",
        "total             3     3     36         1      4",
        "",
        "peer          calls  sent  bytes  received  bytes",
        "rank 2            3     3     36         1      4",
    ]


def test_large_numbers_keep_apart():
    calls = Trace([Call("an operation of a long name indeed", {1: 10**20}, {})])
    first, *_ = str(calls).splitlines()[1:]
    assert first.split()[-4:] == ["1", "100,000,000,000,000,000,000", "0", "0"]
