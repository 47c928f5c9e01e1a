"""Calls on MPI that run on: waited for in any order, by any thread, by nobody, or too long."""

import gc
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import varcomm
from varcomm import LaunchError
from varcomm.transport.engines import engine_for
from varcomm.transport.group import resolve

# torch 2.13 gave it this name
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

LARGE = 50_001  # elements that are reduced by pieces, in two rounds


def waits_in_other_orders(rank):
    """Each rank waits in an order of its own, on two groups."""
    size = dist.get_world_size()
    other = dist.new_group(list(range(size))[::-1])
    inputs = [torch.full((LARGE,), float(rank + i)) for i in range(6)]
    works = [
        dist.all_reduce(x, group=other if i % 2 else None, async_op=True)
        for i, x in enumerate(inputs)
    ]
    order = torch.randperm(6, generator=torch.Generator().manual_seed(rank)).tolist()
    for i in order:
        works[i].wait()
        assert works[i].is_completed()
        assert works[i].is_success()
        assert works[i].exception() is None
        assert works[i].result()[0] is inputs[i]
    dist.destroy_process_group(other)
    return [x.unique().tolist() for x in inputs]


@pytest.mark.parametrize("world", [2, 3, 5])
def test_second_rounds_begin_whatever_is_waited_for(mpi_worlds, world):
    want = [[sum(range(world)) + world * i] for i in range(6)]
    assert mpi_worlds.run(world, waits_in_other_orders) == [want] * world


def one_waits_for_a_group_of_others(rank):
    """Rank 0 waits for what rank 1 has started and left, while rank 1 waits for rank 2 alone."""
    x = torch.full((LARGE,), float(rank))
    work = dist.all_reduce(x, async_op=True)
    if rank == 0:
        work.wait()
        dist.send(torch.ones(1), 1)  # which rank 1 waits for before it waits for its work
    elif rank == 1:
        dist.recv(torch.empty(1), 0)
    work.wait()
    return x.unique().tolist()


def test_waiting_for_one_keeps_all_others_going(mpi_worlds):
    assert mpi_worlds.run(3, one_waits_for_a_group_of_others) == [[3.0]] * 3


def dropped(rank):
    """Nobody keeps the works, nor the tensors that are sent."""
    size, kept = dist.get_world_size(), []
    for i in range(30):
        x = torch.full((LARGE,), float(rank + i))
        dist.all_reduce(x, async_op=True)
        kept.append(x)
        _all_gather(torch.empty(size * LARGE), torch.full((LARGE,), float(i)), async_op=True)
        if i % 7 == 0:
            gc.collect()
    varcomm.all_gather_v(torch.ones(LARGE), [LARGE] * size, async_op=True)  # by the engine
    dist.barrier()
    y = torch.ones(LARGE)
    dist.all_reduce(y)
    deadline = time.monotonic() + 20
    while any(len(x.unique()) > 1 for x in kept) and time.monotonic() < deadline:
        dist.barrier()
    return [x.unique().tolist() for x in kept], y.unique().tolist()


@pytest.mark.parametrize("world", [2, 3])
def test_what_nobody_waits_for_is_not_lost(mpi_worlds, world):
    want = [[float(sum(range(world)) + world * i)] for i in range(30)]
    assert mpi_worlds.run(world, dropped) == [(want, [float(world)])] * world


def two_threads(rank):
    groups = [dist.new_group(), dist.new_group()]
    sums = {}

    def run(i):
        for j in range(40):
            x = torch.full((1 if j % 2 else LARGE,), float(rank + i + j))
            dist.all_reduce(x, group=groups[i])
            y = varcomm.all_gather_v(x[:3], [min(3, len(x))] * 2, group=groups[i])
            sums[i, j] = (x.unique().tolist(), len(y))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sums


def test_two_threads_on_two_groups(mpi_worlds):
    want = {(i, j): ([1.0 + 2 * (i + j)], 2 if j % 2 else 6) for i in range(2) for j in range(40)}
    assert mpi_worlds.run(2, two_threads) == [want, want]


def too_long(rank, name):
    group = dist.new_group(timeout=timedelta(seconds=0.5))
    if rank == 0:  # the other never comes, until it is too late
        start = time.monotonic()
        message = rf"{name} on rank 0 of 2 of group '.*' was not done within 0.5 s. Look for a rank"
        with pytest.raises(RuntimeError, match=message):
            call(name, group)
        assert 0.4 < time.monotonic() - start < 20
        dist.send(torch.ones(1), 1)
    else:
        dist.recv(torch.ones(1), 0)
        call(name, group)
    # nobody else's messages are mixed up, and the ranks may go on
    x = torch.ones(3)
    dist.all_reduce(x)
    return x.tolist()


def call(name, group):
    ours = resolve(group)
    engine = engine_for(ours, torch.device("cpu"))
    out, data = torch.zeros(5, dtype=torch.uint8), torch.zeros(3 - ours.rank, dtype=torch.uint8)
    if name == "all_reduce":
        dist.all_reduce(torch.ones(LARGE), group=group)
    elif name == "barrier":
        dist.barrier(group)
    elif name == "all_gather":
        for work in engine.all_gather(ours, out, data, [3, 2]):
            work.wait()
    else:
        dist.barrier(group, async_op=True).wait(timedelta(seconds=0.5))


@pytest.mark.parametrize("name", ["all_reduce", "barrier", "all_gather"])
def test_a_wait_has_an_end(mpi_worlds, name):
    assert mpi_worlds.run(2, too_long, name) == [[2.0] * 3] * 2


def limits(rank):
    group = dist.new_group(timeout=timedelta(seconds=40))
    x = torch.ones(1)
    if rank == 0:
        work = dist.all_reduce(x, group=group, async_op=True)
        with pytest.raises(RuntimeError, match=r"not done within 0.2 s"):
            work.wait(timedelta(seconds=0.2))
        group.set_timeout(timedelta(seconds=0.3))
        late = dist.barrier(group, async_op=True)
        with pytest.raises(RuntimeError, match=r"barrier .* not done within 0.3 s"):
            late.wait()
        dist.send(x.clone(), 1)
        work.wait(timedelta(seconds=40))  # still under way
        late.wait(timedelta(seconds=40))
    else:
        dist.recv(torch.empty(1), 0)
        dist.all_reduce(x, group=group)
        dist.barrier(group)
    return x.item()


def test_what_is_late_may_be_waited_for_again(mpi_worlds):
    assert mpi_worlds.run(2, limits) == [2.0, 2.0]


def refused_by_mpi(rank):
    group = resolve(dist.new_group())
    data = torch.zeros(8, dtype=torch.uint8)
    engine = engine_for(group, data.device)
    counts = [4, 8] if rank == 0 else [4, 4]  # rank 0 sends 4 bytes, rank 1 sends 8 or 4
    if rank == 1:
        counts = [2, 8]
    out = torch.zeros(16, dtype=torch.uint8)
    for work in engine.all_gather(group, out, data[: counts[rank]], counts):
        work.wait()


def test_a_message_that_is_too_long(mpi_worlds):
    message = "all_gather on rank 1 of 2 .* failed: .*Mostly ranks expect other sizes"
    with pytest.raises(LaunchError, match=message):
        mpi_worlds.run(2, refused_by_mpi)


def futures(rank):
    """In and out of a backward, in Python and by chains."""
    got = []
    x = torch.full((LARGE,), float(rank))
    got.append(dist.all_reduce(x, async_op=True).get_future().wait()[0].unique().item())

    class Summed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            sums = [torch.full((LARGE,), float(rank + i)) for i in range(3)]
            works = [dist.all_reduce(x, async_op=True) for x in sums]
            chained = works[0].get_future().then(lambda f: f.value()[0] * 2)
            got.append(chained.wait().unique().item())
            late = works[1].get_future()
            late.then(lambda f: got.append(f.value()[0].unique().item()))
            got.append(late is works[1].get_future())
            got.append(works[2].get_future().wait()[0].unique().item())
            failing = works[2].get_future().then(lambda f: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                failing.wait()
            return gradient

    Summed.apply(torch.ones(2, requires_grad=True)).sum().backward()
    return got


def test_futures_are_done_by_the_end_of_backward(mpi_worlds):
    got = mpi_worlds.run(2, futures)[0]
    assert got[0] == 1.0
    assert got[1] == 2.0
    assert sorted(got[2:]) == [True, 3.0, 5.0]


def while_others_are_waited_for(rank):
    """A work goes on while its rank waits for what is no MPI: a group on Gloo, a sleep."""
    other = dist.new_group(backend="gloo")
    x = torch.full((1 << 20,), float(rank))
    work = dist.all_reduce(x, async_op=True)
    if rank == 0:
        dist.barrier(group=other)
        work.wait()
    else:
        work.wait()
        dist.barrier(group=other)
    y, began = torch.full((1 << 20,), float(rank)), time.monotonic()
    work = dist.all_reduce(y, async_op=True)
    if rank == 0:
        time.sleep(2)
    work.wait()
    seconds = time.monotonic() - began
    dist.destroy_process_group(other)
    return x.unique().tolist(), y.unique().tolist(), seconds


def test_works_go_on_by_themselves(mpi_worlds):
    (_, _, slept), (*sums, waited) = mpi_worlds.run(2, while_others_are_waited_for, timeout=30)
    assert sums == [[1.0], [1.0]]
    assert waited < 1.5 < slept


def future_before_a_message(rank):
    """Rank 0 asks for the future of what rank 1 calls only after it has got a message."""
    x, message = torch.full((4,), float(rank)), torch.ones(1)
    if rank == 0:
        future = dist.all_reduce(x, async_op=True).get_future()
        dist.send(message, 1)
        future.wait()
    else:
        dist.recv(message, 0)
        dist.all_reduce(x)
    return x.tolist()


def test_asking_for_a_future_does_not_wait(mpi_worlds):
    assert mpi_worlds.run(2, future_before_a_message, timeout=30) == [[1.0] * 4] * 2


def several_tensors_in_threads(rank):
    """Works of many tensors are made in one thread while another one keeps all going."""
    groups = [dist.new_group() for _ in range(3)]
    failures = []

    def call(group, gather):
        try:
            for _ in range(60):
                xs = [torch.full((5000,), float(rank + i)) for i in range(4)]
                if gather:
                    lists = [[torch.empty(5000) for _ in xs] for _ in range(2)]
                    dist.all_gather_coalesced(lists, xs, group=group, async_op=True).wait()
                    assert all(
                        y[0] == r + i for r, ys in enumerate(lists) for i, y in enumerate(ys)
                    )
                else:
                    dist.all_reduce_coalesced(xs, group=group, async_op=True).wait()
                    assert all(x[0] == 2 * i + 1 for i, x in enumerate(xs))
        except BaseException as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=call, args=(g, i % 2)) for i, g in enumerate(groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for group in groups:
        dist.destroy_process_group(group)
    return failures


def test_several_tensors_in_several_threads(mpi_worlds):
    assert mpi_worlds.run(2, several_tensors_in_threads, timeout=60) == [[], []]
