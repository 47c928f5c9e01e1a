"""What cannot be a DTensor, or be taken out of one, is refused with the way out."""

import re

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import varcomm as vc
from varcomm import ArgumentError, DisagreementError, ExchangePlan, GroupError, ShardSizes
from varcomm.sharding import from_dtensor, to_dtensor


def uneven(rank):
    sizes = (1, 4)
    own = torch.arange(5.0).split(sizes)[rank]
    with pytest.raises(ArgumentError) as refused:
        to_dtensor(own, sizes)
    # the way out that the message tells
    chunks = ShardSizes.chunked(5, 2)
    moved = ExchangePlan.from_needed(torch.tensor(chunks.range(rank)), sizes, None)(own, dim=0)
    return str(refused.value), to_dtensor(moved, chunks).full_tensor()


def test_uneven_sizes(worlds):
    for rank, (message, whole) in enumerate(worlds.run(2, uneven)):
        assert message == (
            f"to_dtensor on rank {rank} of 2: torch splits 5 rows over 2 ranks into [3, 2], and a "
            "DTensor has no other sizes; got [1, 4]. Take chunks = ShardSizes.chunked(5, 2) from "
            "the start, or move the rows that differ, on all ranks: ExchangePlan.from_needed("
            "torch.tensor(chunks.range(rank)), sizes, group)(tensor, dim=0)."
        )
        assert torch.equal(whole, torch.arange(5.0))


def balanced(rank):
    """Balanced sizes are others than torch's."""
    sizes = ShardSizes.balanced(4, 3)
    with pytest.raises(ArgumentError, match=r"into \[2, 2, 0\], .* got \[2, 1, 1\]"):
        to_dtensor(torch.zeros(sizes[rank]), sizes)
    return tuple(sizes)


def test_balanced_sizes(worlds):
    assert worlds.run(3, balanced) == [(2, 1, 1)] * 3


def into_dtensor(rank):
    mesh = init_device_mesh("cpu", (2,))
    own = torch.zeros((3, 2)[rank], 2)
    of_gpus = DeviceMesh.from_group(mesh.get_group(), "cuda")
    refused = [
        ((own, [3, 2], 0, of_gpus), "the mesh is one of 'cuda', to which torch"),
        ((own, [3, 2, 1], 0, mesh), "sizes must have one entry a rank, 2; got 3"),
        ((own, [2, 3], 0, mesh), rf"rows along dim 0, but sizes\[{rank}\] is {(2, 3)[rank]}"),
        ((own, [3, 2], 2, mesh), "dim=2 is out of range"),
        ((to_dtensor(own, [3, 2]), [3, 2]), r"must be this rank's own; got DTensor. Pass to_local"),
        ((own.tolist(), [3, 2]), "tensor must be a torch.Tensor; got list"),
    ]
    for arguments, message in refused:
        with pytest.raises(ArgumentError, match=message):
            to_dtensor(*arguments)
    grid = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    with pytest.raises(GroupError, match=r"must be one dimension of a DeviceMesh.* mesh\['a'\]"):
        to_dtensor(own, [3, 2], 0, grid)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(own, torch.ones_like(own))
        with pytest.raises(NotImplementedError, match="to use it with forward mode AD"):
            to_dtensor(dual, [3, 2])
    return len(refused)


def test_what_cannot_become_a_dtensor(worlds):
    assert worlds.run(2, into_dtensor) == [6, 6]


def out_of_dtensor(rank):
    mesh = init_device_mesh("cpu", (2,))
    grid = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    x = torch.zeros(4, 2)
    strange = DTensor.from_local(x, mesh, [_StridedShard(0, split_factor=2)], run_check=False)
    told_otherwise = DTensor.from_local(
        x[: 1 + 3 * rank], mesh, [Shard(0)], run_check=False, shape=x[:5].shape, stride=(2, 1)
    )
    refused = [
        (x, "dtensor must be a DTensor; got Tensor."),
        (distribute_tensor(x, grid, [Shard(0), Shard(0)]), "sizes are those of one dimension of a"),
        (distribute_tensor(x, grid, [Replicate(), Shard(0)]), r"dtensor.full_tensor\(\)"),
        (distribute_tensor(x, mesh, [Replicate()]), r"to_local\(grad_placements=\[Partial\(\)\]\)"),
        (DTensor.from_local(x, mesh, [Partial()]), "is not summed yet. Shard it first"),
        (strange, "has rows in another order than rank by rank"),
        (
            told_otherwise,
            re.escape("this rank should have")
            + rf" \({(2, 2)[rank]}, 2\) \(rows \[2, 2\]\); got \({(1, 4)[rank]}, 2\)",
        ),
    ]
    for dtensor, message in refused:
        with pytest.raises(ArgumentError, match=f"^from_dtensor.*{message}"):
            from_dtensor(dtensor)
    return len(refused)


def test_what_cannot_be_taken_out(worlds):
    assert worlds.run(2, out_of_dtensor) == [7, 7]


def elsewhere(rank):
    mesh = DeviceMesh("cpu", [1, 2])
    whole = distribute_tensor(torch.arange(3.0), mesh, [Shard(0)])
    if rank == 0:
        for call in (lambda: from_dtensor(whole), lambda: to_dtensor(torch.zeros(2), [2], 0, mesh)):
            with pytest.raises(GroupError, match="rank 0 of the world is not in the mesh"):
                call()
        return None
    return from_dtensor(whole)[0].tolist()


def test_a_mesh_that_this_rank_is_not_in(worlds):
    assert worlds.run(3, elsewhere) == [None, [0, 1], [2]]


def compared(rank):
    mesh = init_device_mesh("cpu", (2,))
    own = torch.zeros(2, 3)
    wide = torch.zeros(2, 3 + rank)
    whole = distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)])
    found = []
    with vc.debug():
        for call in (
            lambda: to_dtensor(own.requires_grad_(rank == 1), [2, 2], 0, mesh),
            lambda: to_dtensor(wide, [2, 2], 0, mesh),
            lambda: to_dtensor(own.detach(), [2, 2] if rank else [2, 1], 0, mesh),
            lambda: from_dtensor(whole.requires_grad_(rank == 1)),
        ):
            with pytest.raises((DisagreementError, ArgumentError)) as refused:
                call()
            found.append(str(refused.value))
        made = to_dtensor(torch.zeros(2), [2, 2], 0, mesh)
        assert from_dtensor(made)[1].sizes == (2, 2)
    return found


def test_ranks_are_compared_inside_debug(worlds):
    one, other = worlds.run(2, compared)
    assert [one[0], one[1], one[3]] == [other[0], other[1], other[3]]
    assert "to_dtensor: ranks disagree on requires_grad: rank 0 has False" in one[0]
    assert "to_dtensor: ranks disagree on shape of a row: rank 0 has [3]" in one[1]
    assert "from_dtensor: ranks disagree on requires_grad" in one[3]
    assert "but sizes" in one[2] or "ranks disagree on sizes" in one[2]
