"""Slices of a replicated tensor, and back: what mappings of both regions share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from varcomm.ops.autograd import apply
from varcomm.ops.checks import checked_shard, checked_whole
from varcomm.ops.operator import checking
from varcomm.ops.replicated import ReplicatedGather, ReplicatedShard
from varcomm.tensor_parallel.mappings.sizes import sizes_of_shard, sizes_of_whole
from varcomm.transport.group import GroupLike, resolve

__all__ = [
    "gathered",
    "scattered",
]


def scattered(
    name: str, tensor: torch.Tensor, sizes: Sequence[int] | None, dim: int, group: GroupLike
) -> torch.Tensor:
    """Keep this rank's rows of a replicated tensor; its adjoint gathers."""
    ranks = resolve(group)
    sizes = sizes_of_whole(name, tensor, sizes, dim, ranks)
    with checking(name, ranks) as where:
        operator = ReplicatedShard(ranks, *checked_whole(tensor, sizes, dim, ranks, where))
    return apply(operator, tensor)


def gathered(
    name: str, tensor: torch.Tensor, sizes: Sequence[int] | None, dim: int, group: GroupLike
) -> torch.Tensor:
    """Gather rows into a replicated tensor; its adjoint keeps this rank's."""
    ranks = resolve(group)
    sizes = sizes_of_shard(name, tensor, sizes, dim, ranks)
    with checking(name, ranks) as where:
        plain = checked_shard(tensor, sizes, dim, ranks, where)
    return apply(ReplicatedGather(ranks, *plain, use_fp32=True), tensor)
