"""Operators to and from *replicated* values: one value, of which every rank has a copy.

For the other primitives a loss that P ranks compute identically counts P times in gradients. Here
the inner product counts a replicated value once. The copies, and the gradients that arrive at them,
are assumed to be equal; no rank checks it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from varcomm.ops import packing
from varcomm.ops.all_gather_v import AllGatherV
from varcomm.ops.all_reduce import AllReduce
from varcomm.ops.carried import carrying_gather
from varcomm.ops.graph_operator import torch_operator
from varcomm.ops.rule import Operator
from varcomm.transport.engine import Pending
from varcomm.transport.group import Group


@torch_operator
@dataclass(frozen=True)
class ReplicatedUse(Operator):
    """From a replicated value to a use of it on each rank, of its own; no communication."""

    name = "replicated_use"
    communicates = False
    group: Group
    use_fp32: bool

    def send(self, x: torch.Tensor) -> Pending:
        """Copy, since an operator's result does not share memory with its input."""
        return Pending([], x.clone)

    def result(self, x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    @property
    def adjoint(self) -> ReplicatedSum:
        return ReplicatedSum(self.group, self.use_fp32)

    def describe(self, x: torch.Tensor) -> dict[str, Any]:
        return super().describe(x) | {"shape": list(x.shape)}


@torch_operator
class ReplicatedSum(AllReduce):
    """From each rank's part to the sum of all parts, replicated."""

    name = "replicated_sum"

    @property
    def adjoint(self) -> ReplicatedUse:
        return ReplicatedUse(self.group, self.use_fp32)


@torch_operator
@dataclass(frozen=True)
class ReplicatedShard(Operator):
    """From a replicated value to each rank's own rows of it; no communication."""

    name = "replicated_shard"
    communicates = False
    group: Group
    sizes: tuple[int, ...]
    dim: int

    def send(self, x: torch.Tensor) -> Pending:
        """Copy, as :class:`ReplicatedUse` does."""
        rank = self.group.rank
        rows = x.narrow(self.dim, sum(self.sizes[:rank]), self.sizes[rank])
        return Pending([], lambda: rows.clone(memory_format=torch.contiguous_format))

    def result(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(packing.like(x.shape, self.dim, self.sizes[self.group.rank]))

    @property
    def adjoint(self) -> ReplicatedGather:
        return ReplicatedGather(self.group, self.sizes, self.dim, use_fp32=True)

    def describe(self, x: torch.Tensor) -> dict[str, Any]:
        return super().describe(x) | {"shape": list(x.shape)}


@torch_operator
class ReplicatedGather(AllGatherV):
    """From each rank's own rows to the rows of all, replicated."""

    name = "replicated_gather"

    @property
    def adjoint(self) -> ReplicatedShard:
        return ReplicatedShard(self.group, self.sizes, self.dim)


@torch_operator
class ComparedGather(ReplicatedGather):
    """The same of few rows, as many from each rank; it also compares the calls of ranks."""

    name = "compared_gather"

    def prepared(self, x: torch.Tensor) -> Callable[[torch.Tensor], Pending]:
        def prepare(count: int) -> Callable[[torch.Tensor], Pending]:
            flat = replace(self, sizes=(count,) * self.group.size, dim=0)
            return AllGatherV.prepared(flat, x.new_empty(count))

        start = carrying_gather(self.group, prepare, x)
        return super().prepared(x) if start is None else start
