"""Checks of one rank's arguments, before it communicates."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from varcomm.errors import ArgumentError
from varcomm.sizes import checked_dim, checked_sizes
from varcomm.transport.group import Group

__all__ = ["checked_flag", "checked_shard", "checked_tensor", "checked_whole"]


def checked_flag(value: object, name: str, where: str) -> None:
    """Raise ArgumentError if `value` is not a bool."""
    if not isinstance(value, bool):
        hint = ""
        if isinstance(value, dist.ProcessGroup | DeviceMesh):
            hint = " Pass a group as group=..."
        elif isinstance(value, type(dist.ReduceOp.SUM)):
            hint = " varcomm sums; for others there is torch.distributed.all_reduce."
        raise ArgumentError(f"{where}{name} must be True or False; got {value!r}.{hint}")


def checked_tensor(tensor: object, where: str, name: str = "tensor") -> None:
    """Raise ArgumentError unless `tensor` is a plain dense tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(f"{where}{name} must be a torch.Tensor; got {type(tensor).__name__}.")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = "nested" if tensor.is_nested else str(tensor.layout)
        raise ArgumentError(
            f"{where}{name} must be dense; got {kind} of {tensor.dtype}. Convert it: to_dense(), "
            "dequantize(), or to_padded_tensor()."
        )
    if str(tensor.dtype) == "torch.float4_e2m1fn_x2":
        raise ArgumentError(
            f"{where}{name} of {tensor.dtype} holds two values a byte. Pass view(torch.uint8)."
        )
    if hasattr(tensor, "to_local"):  # DTensor, which has ranks of its own
        raise ArgumentError(
            f"{where}{name} must be this rank's own; got {type(tensor).__name__}. Pass to_local()."
        )


def checked_shard(
    x: torch.Tensor, sizes: Sequence[int], dim: int, group: Group, where: str, name: str = "sizes"
) -> tuple[tuple[int, ...], int]:
    """Return plain `sizes` and `dim` if `x` has this rank's rows."""
    checked_tensor(x, where)
    dim = checked_dim(dim, x.shape, where)
    sizes = checked_sizes(sizes, name, group.size, where)
    if x.shape[dim] != sizes[group.rank]:
        raise ArgumentError(
            f"{where}the tensor of shape {tuple(x.shape)} has {x.shape[dim]} rows along dim {dim}, "
            f"but {name}[{group.rank}] is {sizes[group.rank]} ({name} {list(sizes)}). Pass this "
            f"rank's own rows, or the sizes of ShardSizes.from_local."
        )
    return sizes, dim


def checked_whole(
    x: torch.Tensor, sizes: Sequence[int], dim: int, group: Group, where: str, name: str = "sizes"
) -> tuple[tuple[int, ...], int]:
    """Return plain `sizes` and `dim` if `x` has the rows of all ranks."""
    checked_tensor(x, where)
    dim = checked_dim(dim, x.shape, where)
    sizes = checked_sizes(sizes, name, group.size, where)
    if x.shape[dim] != sum(sizes):
        raise ArgumentError(
            f"{where}the tensor of shape {tuple(x.shape)} has {x.shape[dim]} rows along dim {dim}, "
            f"but {name} sum to {sum(sizes)} ({name} {list(sizes)})."
        )
    return sizes, dim
