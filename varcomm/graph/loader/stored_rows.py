"""Attributes of nodes or edges by global number, fetched from their owners or from a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from varcomm.graph.draws import Array
from varcomm.graph.index.partitioned_index import Marked
from varcomm.graph.loader.messages import Messages
from varcomm.graph.node_shard import Shard
from varcomm.sizes import ShardSizes


@dataclass(eq=False)
class StoredRows:
    """The rows of this rank: their ids, and the bytes of each attribute, (n, width).

    The rows of all ranks have global numbers: those of rank 0 come first, then those of rank 1.
    """

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


def stored_rows(shard: Shard, count: int) -> StoredRows:
    """Return the ids and attributes of the first `count` rows of a shard, on the CPU."""
    values, like = {}, {}
    for name, value in shard.attributes.items():
        if isinstance(value, torch.Tensor):
            plain = (value.plain if isinstance(value, Marked) else value).detach()[:count].cpu()
            like[name] = plain[:0]
            flat = plain.reshape(count, plain.shape[1:].numel())
            values[name] = flat.contiguous().view(torch.uint8).numpy()
    first = shard.sizes.offsets[shard.group.rank]
    return StoredRows(
        small(shard.ids[:count].cpu().numpy(), shard.sizes.total), values, like, shard.sizes, first
    )


def numbers_of(shard: Shard) -> StoredRows:
    """Return the global numbers of a range of ids, as the "ids" of rows; collective at first."""
    ranges, numbers = shard.directory.ranges, shard.directory.numbers
    first, count = ranges.offsets[shard.group.rank], ranges[shard.group.rank]
    own = np.arange(first, first + count) if numbers is None else numbers.cpu().numpy()
    return StoredRows(own, {}, {}, ranges, first)


@dataclass
class Request:
    """Numbers of rows that this rank sends to their owners, and those that it receives."""

    order: Array  # sorts the numbers by their owner
    counts: Array  # numbers sent to each rank
    rows: Array  # the requested rows of this rank
    received: Array  # how many of them each rank requests


def ask(
    rows: Sequence[StoredRows], numbers: Sequence[Array], messages: Messages, *more: Array
) -> tuple[list[Request], list[Array]]:
    """Send numbers of rows to their owners, and one integer of `more` to each rank; collective."""
    size, pairs = messages.group.size, [*zip(rows, numbers, strict=True)]
    owner = [owners(wanted, of.sizes) for of, wanted in pairs]
    orders = [np.argsort(each, kind="stable") for each in owner]
    counts = [np.bincount(each, minlength=size) for each in owner]
    columns = [*messages.counts(np.column_stack([*more, *counts])).T]
    others, received = columns[: len(more)], columns[len(more) :]
    sent = [small(n[order], of.sizes.total) for (of, n), order in zip(pairs, orders, strict=True)]
    asked = messages.exchange(sent, counts, received)
    local = [each - of.first for of, each in zip(rows, asked, strict=True)]
    return [*map(Request, orders, counts, local, received)], others


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
    own, hits, away = [], [], []
    for of, wanted in zip(rows, numbers, strict=True):
        slot = np.searchsorted(of.cached, wanted)
        hit = np.append(of.cached, -1)[slot] == wanted
        here = (wanted >= of.first) & (wanted < of.first + len(of.ids))
        own.append(here)
        hits.append((np.flatnonzero(hit), slot[hit]))
        away.append(np.flatnonzero(~here & ~hit))
    requests, _ = ask(rows, [n[x] for n, x in zip(numbers, away, strict=True)], messages)
    parts = [of.parts(request.rows) for of, request in zip(rows, requests, strict=True)]
    received = iter(
        messages.exchange(
            [part for each in parts for part in each],
            [r.received for r, each in zip(requests, parts, strict=True) for _ in each],
            [r.counts for r, each in zip(requests, parts, strict=True) for _ in each],
        )
    )
    out = []
    for of, n, here, (near, slot), far, request in zip(
        rows, numbers, own, hits, away, requests, strict=True
    ):
        table, local = [], np.where(here, n - of.first, 0)
        for column, values in enumerate((of.ids, *of.values.values())):
            # one pass writes all rows, and those of other ranks are overwritten
            empty = np.empty((len(n), *values.shape[1:]), values.dtype)
            table.append(values[local] if len(values) else empty)
            if len(near):
                table[-1][near] = of.cache[column][slot]
            table[-1][far[request.order]] = next(received)
        out.append(table)
    return out, [(len(x) + len(y), len(x)) for (x, _), y in zip(hits, away, strict=True)]


def small(numbers: Array, total: int) -> Array:
    """Return numbers below `total` in the integers that need the fewest bytes."""
    return numbers.astype(np.int32 if total < 2**31 else np.int64)
