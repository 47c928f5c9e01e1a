"""What may be given as ``group``, and that ranks are always those of the group."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import varcomm
from tests.ops.comparing import Failures, assert_none, error_beyond_bound, twin_gradients
from tests.ops.primitives import PATTERNS, PRIMITIVES, case, random
from varcomm import GroupError
from varcomm.transport.group import resolve


def check_all_primitives(failures, group, words):
    """Compare every primitive within a group with one process, in value and gradient."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    for name in PRIMITIVES:
        for pattern in PATTERNS:
            c = case(name, pattern, ranks, 1)
            op = c.bind(group)
            inputs = [x if x is None else x.requires_grad_() for x in c.draw(torch.float64)]
            x = inputs[rank]
            if x is None:
                x = torch.ones(3, dtype=torch.float64, requires_grad=True)
            generator = torch.Generator().manual_seed(7)
            weights = [random(y.shape, y.dtype, generator) for y in c.reference(inputs)]
            want = twin_gradients(c, inputs, weights)[rank]
            y = op(x)
            (got,) = torch.autograd.grad(y, x, weights[rank])
            with failures.named(*words, name, pattern):
                with torch.no_grad():
                    assert not error_beyond_bound(c, inputs, rank, y)
                torch.testing.assert_close(got, torch.zeros_like(x) if want is None else want)


# without rank 0 of the world; group rank 1 is another rank of the world in each
SUBGROUPS = {3: ((1, 2),), 5: ((2, 3), (3, 4), (1, 2, 4))}


def check_subgroups(rank):
    failures = Failures()
    for members in SUBGROUPS[dist.get_world_size()]:
        group = dist.new_group(members)
        if rank in members:
            check_all_primitives(failures, group, members)
            assert resolve(group).rank == dist.get_rank(group)
            assert resolve(group).size == len(members)
    return failures


@pytest.mark.parametrize("world", [3, pytest.param(5, marks=pytest.mark.slow)])
def test_subgroups_without_rank_0(worlds, world):
    assert_none(worlds.run(world, check_subgroups))


def check_order(rank):
    """The first rank of this group is rank 2 of the world."""
    group = dist.new_group([2, 0, 1], sort_ranks=False)
    failures = Failures()
    check_all_primitives(failures, group, ())
    whole = varcomm.all_gather_v(torch.tensor([rank]), [1, 1, 1], group=group)
    last = varcomm.gather_v(torch.tensor([rank]), [1, 1, 1], dst=2, group=group)
    with failures.named("order"):
        assert whole.tolist() == [2, 0, 1]
        assert last.tolist() == ([2, 0, 1] if rank == 1 else [])
    return failures


def test_group_in_another_order_than_the_world(worlds):
    assert_none(worlds.run(3, check_order))


def in_meshes(rank):
    line = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
    grid = init_device_mesh("cpu", (1, 3), mesh_dim_names=("dp", "tp"))
    shard = torch.full((rank + 1,), rank)
    answers = [
        varcomm.all_gather_v(shard, [1, 2, 3], group=group).tolist()
        for group in (line, line["dp"], grid["tp"], None, dist.group.WORLD)
    ]
    alone = varcomm.all_gather_v(shard, [rank + 1], group=grid["dp"]).tolist()
    with pytest.raises(
        GroupError,
        match=r"group must be one dimension of a DeviceMesh; got a mesh of 2 dimensions "
        r"\('dp', 'tp'\). Pick one: mesh\['dp'\]",
    ):
        varcomm.all_reduce(shard, group=grid)
    with pytest.raises(GroupError, match="2 dimensions without names"):
        varcomm.all_reduce(shard, group=init_device_mesh("cpu", (1, 3)))
    return answers, alone, varcomm.all_reduce(torch.tensor(1)).item()


def test_meshes(worlds):
    for rank, (answers, alone, total) in enumerate(worlds.run(3, in_meshes)):
        assert answers == [[0, 1, 1, 2, 2, 2]] * 5
        assert alone == [rank] * (rank + 1)
        assert total == 3


def in_another_order(rank):
    """Torch makes the groups of a mesh in ascending order, whatever the order in the mesh."""
    mesh = DeviceMesh("cpu", [0, 2, 1])
    for _ in range(2):
        with pytest.raises(  # on rank 0 too, which is at the same place in both
            GroupError,
            match=r"ranks \[0, 2, 1\] .* in the order \[0, 1, 2\].* "
            r"torch.distributed.new_group\(\[0, 2, 1\], sort_ranks=False\)",
        ):
            varcomm.all_gather_v(torch.tensor([rank]), [1, 1, 1], group=mesh)
    kept = DeviceMesh.from_group(dist.new_group([0, 2, 1], sort_ranks=False), "cpu")
    assert kept == mesh  # to torch, which compares the names of ranks and not the groups
    return varcomm.all_gather_v(torch.tensor([rank]), [1, 1, 1], group=kept).tolist()


def test_mesh_in_another_order_than_its_group(worlds):
    assert worlds.run(3, in_another_order) == [[0, 2, 1]] * 3


def not_a_member(rank):
    group = dist.new_group([1, 2])
    mesh = DeviceMesh("cpu", [1, 2])
    for given, message in (
        (group, "rank 0 of the world is not in this group. Only its members may call"),
        (mesh, "rank 0 of the world is not in the mesh"),
    ):
        if rank == 0:
            with pytest.raises(GroupError, match=message):
                varcomm.all_reduce(torch.tensor(1), group=given)
        else:
            assert varcomm.all_reduce(torch.tensor(1), group=given).item() == 2
    return varcomm.all_reduce(torch.tensor(1)).item()


def test_rank_that_is_not_a_member(worlds):
    assert worlds.run(3, not_a_member) == [3, 3, 3]


def of_wrong_type(rank):
    for group in ([0, 1], "world", 0):
        with pytest.raises(GroupError, match=f"group must be .* of type {type(group).__name__}"):
            varcomm.all_reduce(torch.tensor(1), group=group)
    return varcomm.all_reduce(torch.tensor(1)).item()


def test_wrong_type(worlds):
    assert worlds.run(3, of_wrong_type) == [3, 3, 3]


def test_not_initialised():
    assert not dist.is_initialized()  # the tests run outside the ranks
    with pytest.raises(GroupError, match=r"not initialised. Call varcomm.init\(\) first"):
        varcomm.all_reduce(torch.tensor(1))
    with pytest.raises(GroupError, match="not initialised"):
        varcomm.ShardSizes.from_local(3)
