"""Groups of ranks on MPI: of members alone, in any order, again and again."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import varcomm
from varcomm import LaunchError
from varcomm.transport.group import resolve
from varcomm.transport.lane import free_lanes, take_lane
from varcomm.transport.members import group_of_members


def said(group, rank):
    """Return what this rank hears from all of a group: their ranks in the world."""
    heard = [torch.empty(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(heard, torch.tensor([rank]), group=group)
    varied = varcomm.all_gather_v(torch.full((rank,), rank), [x.item() for x in heard], group=group)
    return [x.item() for x in heard], varied.unique_consecutive().tolist()


SOME = ([1, 2], [4, 2, 0], [3, 1, 4, 2], [2, 3])  # sorted or not, mostly without rank 0


def subgroups(rank):
    groups = [dist.new_group(ranks) for ranks in SOME]
    unsorted = [
        group_of_members([4, 0, 3], "mpi4py", timedelta(seconds=60), "varcomm.test")
        if rank in (4, 0, 3)
        else None
    ]
    heard = [
        said(group, rank)
        for ranks, group in zip((*SOME, [4, 0, 3]), (*groups, *unsorted), strict=True)
        if rank in ranks
    ]
    for group in reversed([*groups, *unsorted]):
        if group not in (None, dist.GroupMember.NON_GROUP_MEMBER):
            dist.destroy_process_group(group)
    return heard


def test_subgroups_of_any_ranks(mpi_worlds):
    heard = mpi_worlds.run(5, subgroups)
    for rank in range(5):
        # new_group sorts the ranks
        lists = [sorted(ranks) for ranks in SOME if rank in ranks]
        lists += [[4, 0, 3]] if rank in (4, 0, 3) else []
        assert heard[rank] == [(ranks, [r for r in ranks if r]) for ranks in lists]


def mesh_of_two_dimensions(rank):
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("row", "column"))
    if rank == 4:
        return None
    x = torch.tensor([float(rank)])
    dist.all_reduce(x, group=mesh.get_group("row"))
    columns = mesh["column"]
    sizes = [1 + r for r in dist.get_process_group_ranks(columns.get_group())]
    y = varcomm.all_gather_v(torch.full((rank + 1,), rank), sizes, group=columns)
    return x.item(), y.unique().tolist()


def test_mesh_of_two_dimensions(mpi_worlds):
    got = mpi_worlds.run(5, mesh_of_two_dimensions)
    assert got == [(2.0, [0, 1]), (4.0, [0, 1]), (2.0, [2, 3]), (4.0, [2, 3]), None]


def many(rank):
    """Make and destroy more groups than MPI has communicators at a time."""
    for i in range(2500):
        group = dist.new_group()
        if i % 500 == 0:
            dist.barrier(group)
        dist.destroy_process_group(group)
    return varcomm.all_reduce(torch.ones(1)).item()


def test_groups_that_are_destroyed_give_back_what_they_held(mpi_worlds):
    assert mpi_worlds.run(2, many, timeout=80) == [2.0, 2.0]


def lanes(rank):
    group = resolve(None)
    told = [{"free": [], "name": f"varcomm.lane{group.size}"}] * group.size
    assert free_lanes(group)["free"] == []
    lane = take_lane(group, told)
    return said(lane.group().process_group, rank)[0], str(lane.kind[0])


def test_lane(mpi_worlds):
    assert mpi_worlds.run(3, lanes) == [([0, 1, 2], "cpu:mpi4py,cuda:mpi4py")] * 3


def misses_a_group(rank):
    if rank == 0:
        group_of_members([0, 1], "mpi4py", timedelta(seconds=0.5), "varcomm.missed")


def test_a_group_whose_members_do_not_all_come(mpi_worlds):
    with pytest.raises(LaunchError, match=r"making a group on rank 0 .* was not done within 0.5 s"):
        mpi_worlds.run(2, misses_a_group)


def other_ranks_than_mpi(rank):
    from varcomm.transport.mpi import communicators

    communicators.of_world(1 - rank, 2, 5.0)


def test_ranks_that_mpi_numbers_otherwise(mpi_worlds):
    message = r"rank (\d) of 2 of torch.distributed is rank (?!\1)\d of 2 of MPI"
    with pytest.raises(LaunchError, match=message):
        mpi_worlds.run(2, other_ranks_than_mpi)


def described(rank):
    group = dist.new_group(timeout=timedelta(seconds=70), group_desc="for a test")
    return (
        dist.get_backend(group),
        group.group_desc,
        group.name(),
        group._device_types[0].type,
        group._get_backend(torch.device("cpu")).options._timeout.total_seconds(),
    )


def test_what_torch_asks_of_a_group(mpi_worlds):
    assert mpi_worlds.run(2, described)[1] == ("mpi4py", "for a test", "mpi4py", "cpu", 70.0)
