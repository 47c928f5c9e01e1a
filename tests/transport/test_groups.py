"""Groups: which are accepted, and that ranks are always those of the group."""

import gc
import threading
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import varcomm
from tests.ops.comparing import Failures
from tests.ops.primitives import PATTERNS, PRIMITIVES, case
from tests.transport.groups import ordered_group
from tests.transport.twin import compare
from tests.worlds import on_ranks
from varcomm import GroupError
from varcomm.transport.agreement import share
from varcomm.transport.auxiliary_group import aside, free_lanes, take_lane, weakly
from varcomm.transport.group import Group, resolve


def check_all_primitives(failures, group, words):
    for name in PRIMITIVES:
        for pattern in PATTERNS:
            c = case(name, pattern, dist.get_world_size(group), 1)
            compare(failures, c, torch.float64, (*words, name, pattern), group)


# without rank 0 of the world; group rank 1 is another rank of the world in each
SUBGROUPS = {3: ((1, 2),), 5: ((2, 3), (3, 4), (1, 2, 4))}


@on_ranks(3, pytest.param(5, marks=pytest.mark.slow))
def test_subgroups_and_another_order(rank):
    failures = Failures()
    world = dist.get_world_size()
    for members in SUBGROUPS[world]:
        group = dist.new_group(members)
        if rank in members:
            check_all_primitives(failures, group, members)
            found = resolve(group)
            assert (found.rank, found.size) == (dist.get_rank(group), len(members))
    if world == 3:
        group = ordered_group([2, 0, 1])
        check_all_primitives(failures, group, ())
        own, sizes = torch.tensor([rank]), [1, 1, 1]
        with failures.named("order"):
            assert varcomm.all_gather_v(own, sizes, group=group).tolist() == [2, 0, 1]
            last = varcomm.gather_v(own, sizes, dst=2, group=group)
            assert last.tolist() == ([2, 0, 1] if rank == 1 else [])
    return failures


@on_ranks(3)
def test_meshes(rank):
    line = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
    grid = init_device_mesh("cpu", (1, 3), mesh_dim_names=("dp", "tp"))
    shard = torch.full((rank + 1,), rank)
    for group in (line, line["dp"], grid["tp"], None, dist.group.WORLD):
        gathered = varcomm.all_gather_v(shard, [1, 2, 3], group=group)
        assert gathered.tolist() == [0, 1, 1, 2, 2, 2]
    alone = varcomm.all_gather_v(shard, [rank + 1], group=grid["dp"])
    assert alone.tolist() == [rank] * (rank + 1)
    # torch makes the groups of a mesh in ascending order, whatever the order in the mesh
    kept = DeviceMesh.from_group(ordered_group([0, 2, 1]), "cpu")
    turned = varcomm.all_gather_v(torch.tensor([rank]), [1, 1, 1], group=kept)
    assert turned.tolist() == [0, 2, 1]


@on_ranks(3)
def test_refusals(rank):
    part, two = dist.new_group([1, 2]), DeviceMesh("cpu", [1, 2])
    turned, one = DeviceMesh("cpu", [0, 2, 1]), torch.tensor(1)
    named = init_device_mesh("cpu", (1, 3), mesh_dim_names=("dp", "tp"))
    order = r"ranks \[0, 2, 1\] .* order \[0, 1, 2\].*new_group\(\[0, 2, 1\], sort_ranks=F"
    refusals = [
        (named, r"got a mesh of 2 dimensions. Pick one: mesh\['dp'\]"),
        (init_device_mesh("cpu", (1, 3)), r"2 dimensions. Pick one: mesh.get_group\(0\)"),
        *[(turned, order)] * 2,  # on rank 0 too, which is at the same place in both
        *((group, f"of type {type(group).__name__}") for group in ([0, 1], "world", 0)),
    ]
    outside = [(part, "not in this group"), (two, "not in the mesh")]
    for group, message in refusals + (outside if rank == 0 else []):
        with pytest.raises(GroupError, match=message):
            varcomm.all_reduce(one, group=group)
    if rank:
        assert [varcomm.all_reduce(one, group=group).item() for group, _ in outside] == [2, 2]
    assert varcomm.all_reduce(one).item() == 3


def test_without_a_world():
    assert not dist.is_initialized()  # the tests run outside the ranks
    for call in (
        lambda: varcomm.all_reduce(torch.ones(1)),
        lambda: varcomm.ShardSizes.from_local(3),
    ):
        with pytest.raises(GroupError, match=r"not initialised. Call varcomm.init\(\) first"):
            call()


@on_ranks(3)
def test_a_group_that_has_been_destroyed(rank):
    group = dist.new_group([0, 1, 2])
    found, known = weakly(resolve(group)), resolve(group)
    assert found() is known
    varcomm.all_reduce(torch.ones(1), group=group)
    dist.barrier(group)  # a rank may still be connecting, and would fail because this one left
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


# Auxiliary groups.


def offers(group):
    found = [None] * group.size
    dist.all_gather_object(found, free_lanes(group), group.process_group)
    return found


@on_ranks(3)
def test_lanes_are_used_again(rank):
    world = resolve(None)
    first, second = (take_lane(world, offers(world)) for _ in range(2))
    lane = first.group()
    assert (lane.rank, lane.size, lane.process_group is world.process_group) == (rank, 3, False)
    assert varcomm.all_reduce(torch.tensor([rank]), group=lane.process_group).item() == 3
    first.give_back()
    if rank == 1:
        second.give_back()  # not so on others
    third = take_lane(world, offers(world))
    second.give_back()
    third.under_way = True
    third.give_back()  # its last calls are in flight
    fourth = take_lane(world, offers(world))
    fourth.give_back()
    assert third is first
    assert fourth is second
    assert first.number != second.number


@on_ranks(3)
def test_lanes_in_parts(rank):
    """Ranks are in different numbers of groups; each lane is made by its members alone.

    Lanes of the same ranks are numbered together, and used again for another group of them.
    """
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [1, 2], [0, 1])]
    found = []
    for place in (0, 1, 0, 2):
        if groups[place] == dist.GroupMember.NON_GROUP_MEMBER:
            continue
        group = resolve(groups[place])
        lane = take_lane(group, offers(group))
        made = lane.group()
        assert (made.ranks, made.rank, made.timeout()) == (group.ranks, group.rank, group.timeout())
        total = varcomm.all_reduce(torch.tensor([10**rank]), group=made.process_group)
        found.append((lane.number, total.item()))
        if place == 0:
            lane.give_back()
    if rank < 2:
        assert share("test", lambda: rank, aside(resolve(groups[2]))) == [0, 1]
    first, last = (0, 11), (0, 110)
    assert found == [[first] * 3, [first, last, first, first], [last]][rank]


@on_ranks(3)
def test_a_lane_in_a_bound_world(rank):
    """A part of the ranks makes a lane, without a split of the world by all of its ranks."""
    part = dist.new_group([0, 2])
    world, gpu = dist.group.WORLD, torch.device("cuda", rank)
    splits, splittable = [], distributed_c10d._get_split_source
    distributed_c10d._get_split_source = lambda group: splits.append(group) or splittable(group)
    world.bound_device_id = gpu
    try:
        assert resolve(None).device().type == "cpu"
        with mock.patch.object(Group, "backends", return_value={"cuda": "nccl"}):
            assert resolve(None).device() == gpu
        if rank != 1:
            lane = take_lane(resolve(part), offers(resolve(part))).group()
            assert world.bound_device_id == gpu
            assert varcomm.all_reduce(torch.tensor(rank), group=lane.process_group).item() == 2
    finally:
        world.bound_device_id = None
        distributed_c10d._get_split_source = splittable
    assert not splits


@on_ranks(3)
def test_a_thread_beside(rank):
    """A thread shares on the second group while this one sums on the first."""
    other, found = aside(resolve(None)), []
    thread = threading.Thread(
        target=lambda: [found.append(share("test", lambda: rank, other)) for _ in range(20)]
    )
    thread.start()
    totals = [varcomm.all_reduce(torch.full((3,), float(rank))).tolist() for _ in range(20)]
    thread.join()
    assert found == [[0, 1, 2]] * 20
    assert totals == [[3.0] * 3] * 20
    assert aside(resolve(None)) is other


@on_ranks(1)
def test_one_rank_needs_no_lane(rank):
    assert take_lane(resolve(None), [free_lanes(resolve(None))]) is None
