"""Second groups of all ranks: used again when they are free everywhere, and not kept alive."""

import gc

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


def none_for(rank):
    group = dist.new_group([0, 1])
    return take_lane(resolve(group), []) if rank < 2 else None


def test_there_is_none_for_a_part_of_the_world_nor_for_one_rank(worlds):
    assert worlds.run(3, none_for) == [None] * 3
    assert worlds.run(1, alone) == [None]


def alone(rank):
    return take_lane(resolve(None), [[]])


def gone(rank):
    group = dist.new_group([0, 1])
    found = weakly(resolve(group))
    assert found() == resolve(group)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    with pytest.raises(GroupError) as caught:
        found()
    return str(caught.value)


def test_a_group_that_has_been_destroyed(worlds):
    told = "the group in which this was rank {} of 2 has been destroyed."
    assert worlds.run(2, gone) == [told.format(rank) for rank in range(2)]
