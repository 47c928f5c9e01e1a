"""Sizes that a caller leaves out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from varcomm.ops.autograd import uncompiled
from varcomm.ops.checks import checked_tensor
from varcomm.ops.operator import checking
from varcomm.sizes import ShardSizes, checked_dim
from varcomm.transport.agreement import share
from varcomm.transport.group import Group

__all__ = [
    "sizes_of_shard",
    "sizes_of_whole",
]


def sizes_of_whole(
    name: str, tensor: torch.Tensor, sizes: Sequence[int] | None, dim: int, group: Group
) -> Sequence[int]:
    """Return `sizes`, or balanced ones."""
    if sizes is not None:
        return sizes
    with checking(name, group) as where:
        checked_tensor(tensor, where)
        return ShardSizes.balanced(tensor.shape[checked_dim(dim, tensor.shape, where)], group.size)


def sizes_of_shard(
    name: str,
    tensor: torch.Tensor,
    sizes: Sequence[int] | None,
    dim: int,
    group: Group,
    what: str = "sizes",
) -> Sequence[int]:
    """Return `sizes`, or ask the ranks for theirs; collective then."""
    return _told(name, tensor, dim, group, what) if sizes is None else sizes


@uncompiled(
    "without sizes, ranks ask each other for theirs, and graphs have none before; pass sizes"
)
def _told(name: str, tensor: torch.Tensor, dim: int, group: Group, what: str) -> Sequence[int]:
    def local() -> int:
        checked_tensor(tensor, "")
        return tensor.shape[checked_dim(dim, tensor.shape)]

    return ShardSizes(share(f"{name}, which asks for {what}", local, group))
