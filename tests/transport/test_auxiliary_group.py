"""Auxiliary groups: used again when they are free on all ranks, and not kept alive."""

import gc
import threading

import pytest
import torch
import torch.distributed as dist

import varcomm
from varcomm import GroupError
from varcomm.transport.agreement import share
from varcomm.transport.auxiliary_group import aside, free_lanes, take_lane, weakly
from varcomm.transport.group import resolve


def shared(value, group=None):
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def used_again(rank):
    world = resolve(None)
    first = take_lane(world, shared(free_lanes(world)))
    second = take_lane(world, shared(free_lanes(world)))
    lane = first.group()
    assert (lane.rank, lane.size, lane.process_group is world.process_group) == (rank, 3, False)
    total = varcomm.all_reduce(torch.tensor([rank]), group=lane.process_group).item()
    first.give_back()
    if rank == 1:
        second.give_back()  # not so on others
    third = take_lane(world, shared(free_lanes(world)))
    second.give_back()
    third.under_way = True
    third.give_back()  # its last calls are in flight
    fourth = take_lane(world, shared(free_lanes(world)))
    fourth.give_back()
    return third is first, fourth is second, first.number != second.number, total


def test_lanes_are_used_again_when_they_are_free_on_all_ranks(worlds):
    assert worlds.run(3, used_again) == [(True, True, True, 3)] * 3
    assert worlds.run(1, lambda rank: take_lane(resolve(None), [free_lanes(resolve(None))])) == [
        None
    ]


def in_parts(rank):
    """Ranks are in different numbers of groups; each lane is made by its members alone."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [1, 2], [0, 1])]
    found = []
    for place in (0, 1, 0, 2):
        if groups[place] == dist.GroupMember.NON_GROUP_MEMBER:
            continue
        group = resolve(groups[place])
        lane = take_lane(group, shared(free_lanes(group), group.process_group))
        made = lane.group()
        assert (made.ranks, made.rank) == (group.ranks, group.rank)
        assert made.process_group is not group.process_group
        total = varcomm.all_reduce(torch.tensor([10**rank]), group=made.process_group)
        found.append((lane.number, total.item()))
        if place == 0:
            lane.give_back()
    if rank < 2:
        assert share("test", lambda: rank, aside(resolve(groups[2]))) == [0, 1]
    return found


def test_parts_of_the_world(worlds):
    """Lanes of the same ranks are numbered together, and used again for another group of them."""
    first, last = (0, 11), (0, 110)
    found = worlds.run(3, in_parts)
    assert found == [[first] * 3, [first, last, first, first], [last]]


def beside(rank):
    """What ranks share in a thread is not taken for what they sum meanwhile."""
    other, told = aside(resolve(None)), []
    thread = threading.Thread(
        target=lambda: [told.append(share("test", lambda: rank, other)) for _ in range(20)]
    )
    thread.start()
    totals = [varcomm.all_reduce(torch.full((3,), float(rank))).tolist() for _ in range(20)]
    thread.join()
    again = aside(resolve(None)) is other
    return told == [[0, 1, 2]] * 20, totals == [[3.0] * 3] * 20, again


def test_threads_beside_collectives(worlds):
    assert worlds.run(3, beside) == [(True, True, True)] * 3


def gone(rank):
    group = dist.new_group([0, 1, 2])
    found, known = weakly(resolve(group)), resolve(group)
    assert found() is known
    varcomm.all_reduce(torch.ones(1), group=group)
    dist.barrier(group)  # a rank may still be connecting, and would say that this one left
    dist.destroy_process_group(group)
    with pytest.raises(GroupError, match="no longer"):
        found()
    with pytest.raises(GroupError, match="no longer"):
        varcomm.all_reduce(torch.ones(1), group=group)
    del group, known
    gc.collect()
    resolve(dist.new_group([0, 1, 2]))  # forgets the other
    gc.collect()
    with pytest.raises(GroupError, match="destroyed"):
        found()


def test_a_group_that_has_been_destroyed(worlds):
    worlds.run(3, gone)
