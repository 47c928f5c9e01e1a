"""Counts of messages and bytes, and ranges in the profiler."""

import contextlib
import threading

import torch
import torch.distributed as dist

import varcomm
from tests.transport.groups import ordered_group
from tests.worlds import on_ranks
from varcomm import Call, Traffic

SIZES = [2, 1, 0]


def seen(calls):
    return [(call.name, call.sent, call.received) for call in calls]


@on_ranks(3)
def test_nested_traces(rank):
    """The outer trace contains the calls of the inner ones."""
    x = torch.ones(SIZES[rank])
    with varcomm.trace() as outer:
        varcomm.all_gather_v(x, SIZES)
        with varcomm.trace() as empty:
            pass
        with varcomm.trace() as inner:
            varcomm.all_reduce(torch.ones(3, dtype=torch.float64))
        with contextlib.suppress(KeyError), varcomm.trace() as failed:
            varcomm.gather_v(x, SIZES)
            raise KeyError
    varcomm.all_reduce(torch.ones(1))
    reduced = ("all_reduce", 80, 80)  # three numbers and the comparison, to two ranks
    gathered = [("all_gather_v", 16, 4), ("all_gather_v", 8, 8), ("all_gather_v", 0, 12)][rank]
    sent = [("gather_v", 0, 4), ("gather_v", 4, 0), ("gather_v", 0, 0)][rank]
    found = [*map(seen, (outer, empty, inner, failed))]
    assert found == [[gathered, reduced, sent], [], [reduced], [sent]]


@on_ranks(3)
def test_adjoints(rank):
    """A backward has the name of the adjoint, in another thread too."""
    x = torch.ones(SIZES[rank], dtype=torch.float64, requires_grad=True)
    y = varcomm.all_reduce(torch.ones(1, requires_grad=True))
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu) as profiler, varcomm.trace() as calls:
        varcomm.all_gather_v(x, SIZES).sum().backward()
        varcomm.broadcast(x[:1] if rank == 0 else None).sum().backward()
        varcomm.gather_v(x, SIZES, dst=1).sum().backward()
        thread = threading.Thread(target=y.backward)
        thread.start()
        thread.join()
    events = [event.key for event in profiler.key_averages()]
    assert {"varcomm::all_gather_v", "varcomm::reduce_scatter_v"} <= {*events}
    names = ["all_gather_v", "reduce_scatter_v", "broadcast", "reduce", "gather_v", "scatter_v"]
    assert [call.name for call in calls] == [*names, "all_reduce"]
    assert seen(calls)[-1] == ("all_reduce", 24, 24)
    if rank < 2:  # an adjoint swaps its pair
        pairs = [[(32, 8), (16, 0), (16, 0)], [(16, 16), (0, 8), (0, 16)]][rank]
        expected = [pair for sent, got in pairs for pair in ((sent, got), (got, sent))]
        assert [call[1:] for call in seen(calls)[:-1]] == expected


def among_some(rank):
    """Ranks 2 and 0 of three, in this order; and all of them; and one alone."""
    pair = ordered_group([2, 0])
    own = dist.new_group([1])
    with varcomm.trace() as t:
        if rank != 1:
            place = [2, 0].index(rank)
            varcomm.all_gather_v(torch.ones(1 + place), [1, 2], group=pair)
            varcomm.all_gather_v(torch.ones(place), [0, 1], group=pair)
        varcomm.scatter_v(torch.ones(4, dtype=torch.int64), [1, 0, 3])
    with varcomm.trace() as alone:
        if rank == 1:
            varcomm.all_to_all_v(torch.ones(3), [3], [3], group=own)
            varcomm.shard_v(torch.ones(3), [3], group=own)
    return t, alone


def test_sums_by_operation_and_by_peer_of_the_world(worlds):
    (first, _), (second, alone), (third, _) = worlds.run(3, among_some)
    gathered = [Call("all_gather_v", {2: 8}, {2: 4}), Call("all_gather_v", {2: 4}, {})]
    assert first[:2] == gathered
    assert first.by_operation() == {
        "all_gather_v": Traffic(2, 2, 1, 12, 4),
        "scatter_v": Traffic(1, 1, 0, 24, 0),
    }
    assert first.by_peer() == {2: first.total}
    assert first.total == Traffic(3, 3, 1, 36, 4)
    assert second.by_operation() == {"scatter_v": Traffic(1)}
    assert second.by_peer() == {}
    assert alone == [Call("all_to_all_v", {}, {})]
    assert third.by_peer() == {0: Traffic(3, 1, 3, 4, 36)}
    assert str(first).splitlines() == [
        "operation     calls  sent  bytes  received  bytes",
        "all_gather_v      2     2     12         1      4",
        "scatter_v         1     1     24         0      0",
        "total             3     3     36         1      4",
        "",
        "peer          calls  sent  bytes  received  bytes",
        "rank 2            3     3     36         1      4",
    ]
