"""Tensors that cannot become a DTensor, and DTensors that cannot become shards."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import varcomm as vc
from tests.worlds import on_ranks
from varcomm import ArgumentError, DisagreementError, GroupError
from varcomm.sharding import from_dtensor, to_dtensor


def refusals(rank):
    """Each call with the error and a word of its message."""
    mesh = init_device_mesh("cpu", (3,))
    grid = init_device_mesh("cpu", (1, 3), mesh_dim_names=("a", "b"))
    chunks = [2, 2, 1]
    own, x = torch.zeros(chunks[rank], 2), torch.zeros(4, 2)
    of_gpus = DeviceMesh.from_group(mesh.get_group(), "cuda")
    other_shards = DTensor.from_local(
        x[:3], mesh, [Shard(0)], run_check=False, shape=x[:4].shape, stride=(2, 1)
    )
    apart = DeviceMesh("cpu", [1, 2])
    found = [
        (to_dtensor, (own, chunks, 0, of_gpus), ArgumentError, "'cuda'"),
        (to_dtensor, (own, [3, 2], 0, mesh), ArgumentError, "sizes"),
        (to_dtensor, (own, [1, 1, 3], 0, mesh), ArgumentError, "sizes"),
        (to_dtensor, (own, chunks, 2, mesh), ArgumentError, "dim=2"),
        (to_dtensor, (to_dtensor(own, chunks), chunks), ArgumentError, "DTensor"),
        (to_dtensor, (own.tolist(), chunks), ArgumentError, "tensor must be"),
        (to_dtensor, (own, chunks, 0, grid), GroupError, "one dimension"),
        (from_dtensor, (x,), ArgumentError, "dtensor must be a DTensor"),
        (from_dtensor, (distribute_tensor(x, grid, [Shard(0)] * 2),), ArgumentError, "dimension"),
        (from_dtensor, (distribute_tensor(x, mesh, [Replicate()]),), ArgumentError, "placements"),
        (from_dtensor, (DTensor.from_local(x, mesh, [Partial()]),), ArgumentError, "placements"),
        (from_dtensor, (other_shards,), ArgumentError, "should have"),
    ]
    if rank == 0:
        whole = DTensor.from_local(x, apart, [Shard(0)], run_check=False)
        found.append((from_dtensor, (whole,), GroupError, "rank 0"))
        found.append((to_dtensor, (x, [4], 0, apart), GroupError, "rank 0"))
    return found


@on_ranks(3)
def test_refused(rank):
    for call, arguments, error, word in refusals(rank):
        with pytest.raises(error, match=word):
            call(*arguments)
    with forward_ad.dual_level():
        own = torch.zeros((2, 2, 1)[rank])
        dual = forward_ad.make_dual(own, torch.ones_like(own))
        with pytest.raises(NotImplementedError, match="forward mode AD"):
            to_dtensor(dual, [2, 2, 1])


@on_ranks(3)
def test_compared(rank):
    """Ranks are compared inside debug."""
    mesh = init_device_mesh("cpu", (3,))
    own, wide = torch.zeros(2, 3), torch.zeros(2, 3 + rank)
    whole = distribute_tensor(torch.zeros(6, 2), mesh, [Shard(0)])
    sizes = [2, 2, 2]
    with vc.debug():
        for call, word in (
            (lambda: to_dtensor(own.requires_grad_(rank == 1), sizes, 0, mesh), "requires_grad"),
            (lambda: to_dtensor(wide, sizes, 0, mesh), "shape of a row"),
            (lambda: to_dtensor(own.detach(), sizes if rank else [2, 2, 1], 0, mesh), "sizes"),
            (lambda: from_dtensor(whole.requires_grad_(rank == 1)), "requires_grad"),
        ):
            with pytest.raises((DisagreementError, ArgumentError), match=word):
                call()
        made = to_dtensor(torch.zeros(2), sizes, 0, mesh)
        assert from_dtensor(made)[1].sizes == (2, 2, 2)
