"""Attributes of nodes or edges by global number, fetched from their owners or from a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from varcomm.graph.index.partitioned_index import Marked
from varcomm.graph.loader.draws import Array
from varcomm.graph.loader.messages import Messages
from varcomm.graph.node_shard import Shard
from varcomm.sizes import ShardSizes

__all__ = ["StoredRows", "fetch", "owners", "small", "stored_rows"]


@dataclass(eq=False)
class StoredRows:
    """The rows of this rank: their ids, and the bytes of each attribute, (n, width)."""

    ids: Array
    values: Mapping[str, Array]
    like: Mapping[str, torch.Tensor]  # an empty tensor of each attribute
    sizes: ShardSizes
    first: int  # global number of the first row
    # rows of other ranks, by ascending number
    cached: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    cache: Sequence[Array] = ()

    def parts(self, local: Array) -> list[Array]:
        """Return the ids and attributes of some rows of this rank."""
        return [part[local] for part in (self.ids, *self.values.values())]

    def empty(self, count: int) -> list[Array]:
        """Return rows for ids and attributes, with any values."""
        parts = (self.ids, *self.values.values())
        return [np.empty((count, *part.shape[1:]), part.dtype) for part in parts]


def stored_rows(shard: Shard, count: int) -> StoredRows:
    """Return the ids and attributes of the first `count` rows of a shard, on the CPU."""
    values, like = {}, {}
    for name, value in shard.attributes.items():
        if isinstance(value, torch.Tensor):
            plain = (value.plain if isinstance(value, Marked) else value).detach()[:count].cpu()
            like[name] = plain[:0]
            flat = plain.reshape(count, plain[:1].numel() if count else plain.shape[1:].numel())
            values[name] = flat.contiguous().view(torch.uint8).numpy()
    first = shard.sizes.offsets[shard.group.rank]
    return StoredRows(
        small(shard.ids[:count].cpu().numpy(), shard.sizes.total), values, like, shard.sizes, first
    )


def owners(numbers: Array, sizes: ShardSizes) -> Array:
    """Return the rank of each global number, in a small integer that sorts fast."""
    starts = np.array(sizes.offsets[1 : len(sizes)])
    return np.searchsorted(starts, numbers, side="right").astype(np.int16)


def fetch(
    rows: Sequence[StoredRows], numbers: Sequence[Array], messages: Messages
) -> tuple[list[list[Array]], list[tuple[int, int]]]:
    """Return the ids and attributes of nodes by their global numbers; collective.

    The second result is the number of rows of other ranks, and how many of them were cached.
    """
    rank, size = messages.group.rank, messages.group.size
    away, asked, counts = [], [], []
    for of, wanted in zip(rows, numbers, strict=True):
        owner = owners(wanted, of.sizes)
        slot = np.searchsorted(of.cached, wanted)
        hit = np.append(of.cached, -1)[slot] == wanted
        away.append((owner, slot, hit))
        order = np.flatnonzero((owner != rank) & ~hit)
        order = order[np.argsort(owner[order], kind="stable")]
        asked.append(order)
        counts.append(np.bincount(owner[order], minlength=size))
    told = messages.counts(np.column_stack(counts)).T
    ids = [
        small(n[order], of.sizes.total) for of, n, order in zip(rows, numbers, asked, strict=True)
    ]
    local = [
        ask - of.first
        for of, ask in zip(rows, messages.exchange(ids, counts, [*told]), strict=True)
    ]
    parts = [part for of, each in zip(rows, local, strict=True) for part in of.parts(each)]
    sent = [n for of, n in zip(rows, told, strict=True) for _ in of.parts(of.ids[:0])]
    expected = [n for of, n in zip(rows, counts, strict=True) for _ in of.parts(of.ids[:0])]
    received = iter(messages.exchange(parts, sent, expected))
    out, seen = [], []
    for of, wanted, (owner, slot, hit), order in zip(rows, numbers, away, asked, strict=True):
        is_own = owner == rank
        near = np.flatnonzero(hit)
        # one pass writes all rows, and those of other ranks are overwritten
        whole = (
            of.parts(np.where(is_own, wanted - of.first, 0))
            if is_own.any()
            else of.empty(len(wanted))
        )
        for column, values in enumerate(whole):
            if len(near):
                values[near] = of.cache[column][slot[near]]
            values[order] = next(received)
        out.append(whole)
        seen.append((len(wanted) - int(is_own.sum()), len(near)))
    return out, seen


def small(numbers: Array, total: int) -> Array:
    """Return numbers below `total` in the integers that need the fewest bytes."""
    return numbers.astype(np.int32 if total < 2**31 else np.int64)
