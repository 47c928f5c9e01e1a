"""Second groups of the same ranks: used again when they are free everywhere, and not kept alive."""

import gc
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import varcomm
from varcomm import GroupError
from varcomm.transport.group import resolve
from varcomm.transport.lane import free_lanes, take_lane, weakly


def shared(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def used_again(rank):
    """Return whether lanes are the same ones, and a sum on one of them."""
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
    third.give_back()  # whose last calls nobody has waited for
    fourth = take_lane(world, shared(free_lanes(world)))
    numbers = {lane.number for lane in (first, second)}
    fourth.give_back()
    return third is first, fourth is second, len(numbers), total


def test_lanes_are_used_again_when_they_are_free_on_all_ranks(worlds):
    assert worlds.run(3, used_again) == [(True, True, 2, 3)] * 3


def in_parts(rank):
    """Ranks are in different numbers of groups; each lane is made by its members alone."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [1, 2], [0, 1])]
    found = []
    for place in (0, 1, 0, 2):
        if groups[place] == dist.GroupMember.NON_GROUP_MEMBER:
            continue
        group = resolve(groups[place])
        told = [None] * 2
        dist.all_gather_object(told, free_lanes(group), group.process_group)
        lane = take_lane(group, told)
        made = lane.group()
        assert (made.ranks, made.rank) == (group.ranks, group.rank)
        assert made.process_group is not group.process_group
        total = varcomm.all_reduce(torch.tensor([10**rank]), group=made.process_group)
        found.append((lane.number, total.item()))
        if place == 0:
            lane.give_back()
    return found


def test_lanes_of_parts_of_the_world(worlds):
    """Those of the same ranks are numbered together, and used again for another group of them."""
    of_first, of_last = (0, 11), (0, 110)
    assert worlds.run(3, in_parts) == [
        [of_first] * 3,
        [of_first, of_last, of_first, of_first],
        [of_last],
    ]


def test_there_is_none_for_one_rank(worlds):
    assert worlds.run(1, alone) == [None]


def alone(rank):
    world = resolve(None)
    return take_lane(world, [free_lanes(world)])


class Bound:
    """A process group of a world that is bound to GPUs."""

    bound_device_id = torch.device("cuda:0")


def on_gpus(rank):
    group = dist.new_group([0, 1])
    if rank == 2:
        return None
    part = resolve(group)
    with pytest.MonkeyPatch.context() as patched:
        world = replace(resolve(None), process_group=Bound())
        patched.setattr("varcomm.transport.lane.resolve", lambda _: world)
        return take_lane(part, [])


def test_there_is_none_for_a_part_of_a_world_that_is_bound_to_gpus(worlds):
    assert worlds.run(3, on_gpus) == [None] * 3


def gone(rank):
    group = dist.new_group([0, 1])
    found = weakly(resolve(group))
    assert found() == resolve(group)
    dist.barrier(group)  # the other rank may still be connecting, and would say that this one left
    dist.destroy_process_group(group)
    del group
    gc.collect()
    with pytest.raises(GroupError) as caught:
        found()
    return str(caught.value)


def test_a_group_that_has_been_destroyed(worlds):
    told = "the group in which this was rank {} of 2 has been destroyed."
    assert worlds.run(2, gone) == [told.format(rank) for rank in range(2)]
