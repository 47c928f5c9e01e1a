"""What one rank can check of its own arguments before it communicates."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from varcomm.errors import ArgumentError
from varcomm.layout import checked_dim, checked_sizes
from varcomm.transport.group import Group

__all__ = ["checked_shard", "checked_tensor", "checked_whole"]


def checked_tensor(tensor: object, where: str) -> None:
    """Raise ArgumentError if `tensor` is none, or is not a dense one."""
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(f"{where}tensor must be a torch.Tensor; got {type(tensor).__name__}.")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise ArgumentError(
            f"{where}tensor must be dense; got {tensor.layout} of {tensor.dtype}. "
            "Convert it: to_dense(), or dequantize()."
        )


def checked_shard(
    x: torch.Tensor, sizes: Sequence[int], dim: int, group: Group, where: str, name: str = "sizes"
) -> tuple[tuple[int, ...], int]:
    """Return `sizes` and `dim` in their plain form, if `x` has this rank's rows of them."""
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
    """Return `sizes` and `dim` in their plain form, if `x` has the rows of all ranks."""
    checked_tensor(x, where)
    dim = checked_dim(dim, x.shape, where)
    sizes = checked_sizes(sizes, name, group.size, where)
    if x.shape[dim] != sum(sizes):
        raise ArgumentError(
            f"{where}the tensor of shape {tuple(x.shape)} has {x.shape[dim]} rows along dim {dim}, "
            f"but {name} sum to {sum(sizes)} ({name} {list(sizes)})."
        )
    return sizes, dim
