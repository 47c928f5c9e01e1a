"""Heads of attention per rank, and key and value heads that several ranks read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from varcomm.ops.checks import is_fake
from varcomm.plan.exchange_plan import ExchangePlan
from varcomm.sizes import ShardSizes
from varcomm.tensor_parallel.linear import ColumnParallelLinear
from varcomm.transport.group import Group, GroupLike, resolve


@dataclass(frozen=True)
class Heads:
    """How heads of queries and their heads of keys and values are sharded.

    `queries` and `keys` are heads per rank; each head of keys is stored on one rank. `owners` are
    the ranks whose heads of keys each rank reads, itself if it has heads.
    """

    queries: ShardSizes
    keys: ShardSizes
    owners: tuple[int, ...]

    @classmethod
    def of(cls, queries: int, keys: int, ranks: int, replicate: bool) -> Self:
        """Shard heads in groups that share keys; if ranks are more, split groups if `replicate`."""
        each = queries // keys if keys else 0
        if not replicate or keys >= ranks or each <= 1:
            return cls.of_groups(ShardSizes.balanced(keys, ranks), each)
        per_rank: list[int] = []
        owners: list[int] = []
        for readers in ShardSizes.balanced(ranks, keys):
            owners += [len(per_rank)] * readers
            per_rank += ShardSizes.balanced(each, readers)
        owned = (int(owner == rank) for rank, owner in enumerate(owners))
        return cls(ShardSizes(per_rank), ShardSizes(owned), tuple(owners))

    @classmethod
    def of_groups(cls, keys: Sequence[int], each: int) -> Self:
        """Shard whole groups of `each` heads of queries."""
        own = ShardSizes(keys)
        return cls(own * each, own, tuple(range(len(own))))

    def read(self, rank: int) -> int:
        """Return the number of heads of keys that a rank reads."""
        return self.keys[self.owners[rank]] if self.queries[rank] else 0

    def plan(self, width: int, group: Group) -> ExchangePlan | None:
        """Return the routes of `width` features per head of keys to their readers; collective."""
        if self.owners == tuple(range(group.size)):
            return None
        features = self.keys * width
        mine = features.range(self.owners[group.rank])
        needed = torch.arange(mine.start, mine.stop if self.read(group.rank) else mine.start)
        return ExchangePlan.from_needed(needed, features, group.process_group)


def from_owner(layer: nn.Module, name: str, features: Tensor) -> Tensor:
    """Return the keys or values that this rank reads, with the plan in an attribute of a layer."""
    plan: ExchangePlan = getattr(layer, name)
    if plan.send_index.device != features.device:
        plan = plan.to(features.device)
        # the moved plan is for later forwards too, unless its indices have no values
        if not (torch.compiler.is_compiling() or features.is_meta or is_fake(plan.send_index)):
            setattr(layer, name, plan)
    return plan(features, -1)


class KeyValueLinear(ColumnParallelLinear):
    """Column-parallel layer of keys or values, whose outputs go to all ranks that read them.

    Each head is stored on one rank, so that its weight counts once in norms, optimizers and
    checkpoints. In backward the gradients of all readers are summed on that rank.
    """

    readers: ExchangePlan

    @classmethod
    def of_heads(cls, linear: nn.Linear, heads: Heads, width: int, group: GroupLike) -> Self:
        """Shard a Linear by heads of `width` outputs; collective."""
        readers = heads.plan(width, resolve(group))
        assert readers is not None
        made = cls.from_linear(linear, sizes=heads.keys * width, group=group)
        made.readers = readers
        return made

    def forward(self, x: Tensor, sequence_sizes: Sequence[int] | None = None) -> Tensor:
        """Return the outputs of the heads that this rank reads."""
        return from_owner(self, "readers", super().forward(x, sequence_sizes))
