"""Sums by levels: trees of neighbouring ranks, fixed by the group alone.

A level merges clusters of consecutive ranks into larger ones; the first level has single ranks, the
last one the group. In each cluster every piece of a tensor has one member that holds its sum over
the cluster, so a merge is a small reduce-scatter between members of its clusters.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from typing import TypeAlias

import torch

from varcomm.ops import packing
from varcomm.ops.reduction import BLOCK, accumulation_dtype
from varcomm.sizes import ShardSizes
from varcomm.transport.engine import EngineFailure, Pending, Works, wait_for
from varcomm.transport.engines.choose import engine_for
from varcomm.transport.group import MANY, Group, resolve

# Mean bytes per shard up to which many ranks gather by levels: more messages cost more than the
# copies between levels. 16 ranks on 2 cores took 47 ms in place of 83 on Gloo and 26 in place of 20
# on MPI for shards of 1 KiB; 54 in place of 86 and 47 in place of 31 for 16 KiB. The mean decides,
# because every rank receives all shards.
SHORT = 4096

# A function that yields after the start of each round, and returns its result.
Rounds: TypeAlias = Generator[Works, None, torch.Tensor]


@dataclass(frozen=True)
class Level:
    """The messages of one rank in the merge of its cluster with others; pieces by their owner."""

    clusters: list[range]  # the ranks of each
    held: list[int]  # pieces whose sums over its own cluster this rank has
    kept: list[int]  # pieces whose sums over all `clusters` it has after the merge
    send: dict[int, list[int]]  # held pieces by the rank that keeps them
    recv: list[dict[int, list[int]]]  # kept pieces by the ranks that held them, per cluster

    @cached_property
    def leaving(self) -> list[int]:
        """Pieces in the order in which they are sent."""
        return [piece for pieces in self.send.values() for piece in pieces]

    @cached_property
    def arriving(self) -> list[list[int]]:
        """Pieces in the order in which they are received, per cluster."""
        return [[piece for pieces in of.values() for piece in pieces] for of in self.recv]


def levels(group: Group) -> list[Level]:
    """Return the levels of this rank, from single ranks up; none for a group of few ranks."""
    if group.size < MANY:
        return []
    found: list[Level] | None = group.auxiliary.get("levels")
    if found is None:
        found = group.auxiliary["levels"] = list(_levels(group))
    return found


class InRounds(Pending):
    """Rounds of messages, of which the first has started; ``wait()`` does the others.

    Its rounds must begin in one order on all ranks, even if these wait for Handles in different
    orders, or never. So the world keeps what a Handle has started. A wait first completes calls
    that have started earlier, in their order, and a call without a Handle completes all.
    """

    def __init__(self, rounds: Rounds, shape: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__(next(rounds), self._taken)
        self._rounds, self._shape, self._dtype = rounds, shape, dtype
        self._result: torch.Tensor | None = None
        self._error: Exception | None = None
        self.done = False

    def complete(self) -> None:
        """Begin and await all further rounds; an error is kept for ``wait()``."""
        for each in self.earlier:
            each.complete()
        self.earlier = ()
        self._advance(lambda: True)

    def is_done(self) -> bool:
        """Begin the rounds whose turn it is, without waiting, and return whether all are done."""
        self._advance(super().is_done)
        return self.done

    def _advance(self, is_turn: Callable[[], bool]) -> None:
        try:
            while not self.done and is_turn():
                wait_for(self.works)
                self.works = ()  # which keep the sent tensor in memory
                self.works = next(self._rounds)
        except StopIteration as end:
            self._result = end.value.to(self._dtype).view(self._shape)
            self.done, self.works = True, ()
        except Exception as error:
            self._error = error
            if isinstance(error, EngineFailure):
                self._error = self.explained(error)
                self._error.__cause__ = error.__cause__
            self.done, self.works = True, ()

    def wait(self) -> torch.Tensor:
        """Return the result, once."""
        self.complete()
        return self.finish()

    def _taken(self) -> torch.Tensor:
        if self._error is not None:
            raise self._error
        assert self._result is not None
        result, self._result = self._result, None
        return result


def reduce_scatter(
    name: str,
    group: Group,
    values: torch.Tensor,
    sizes: Sequence[int],
    order: Sequence[int],
    use_fp32: bool,
) -> Rounds:
    """Return this rank's piece of the sum, of ``sizes[rank]`` elements, not yet rounded.

    The pieces lie in `order` in the flat `values`; in that of :func:`piece_order` nothing is
    copied.
    """
    for level in levels(group):
        values = arranged(values, order, level.leaving, sizes)
        send = {peer: _total(pieces, sizes) for peer, pieces in level.send.items()}
        recv = {p: _total(pieces, sizes) for of in level.recv for p, pieces in of.items()}
        works, values = _exchange(name, group, values, send, recv)
        yield works
        del works  # they hold the sent tensor
        order, count = level.kept, _total(level.kept, sizes)
        if any(pieces != order for pieces in level.arriving):
            parts = zip(values.split([count] * len(level.recv)), level.arriving, strict=True)
            values = torch.cat([arranged(*part, order, sizes) for part in parts])
        values = _summed(values.view(len(level.recv), count), use_fp32)
    return values


def all_gather(
    name: str, group: Group, values: torch.Tensor, sizes: Sequence[int], root: int | None = None
) -> Rounds:
    """Return all pieces in :func:`piece_order`, on every rank or at `root`."""
    for level in reversed(levels(group)):
        # the merge backwards
        send = {p: pieces for of in level.recv for p, pieces in of.items()}
        recv = level.send
        if root is not None:
            near = next((ranks for ranks in level.clusters if root in ranks), range(0))
            send = {peer: pieces for peer, pieces in send.items() if peer in near}
            recv = recv if group.rank in near else {}
        to_peers = {peer: _total(pieces, sizes) for peer, pieces in send.items()}
        from_peers = {peer: _total(pieces, sizes) for peer, pieces in recv.items()}
        same = all(pieces == level.kept for pieces in send.values())
        if not same:
            leaving = [piece for pieces in send.values() for piece in pieces]
            values = arranged(values, level.kept, leaving, sizes)
        works, got = _exchange(name, group, values, to_peers, from_peers, same)
        yield works
        del works  # they hold the sent tensor
        if recv:
            values = arranged(got, level.leaving, level.held, sizes)
        del got
    return values


def gathers_short(group: Group, nbytes: int, device: torch.device) -> bool:
    """Whether shards of `nbytes` in all are gathered by levels: the same on all ranks."""
    if group.size < MANY or nbytes > SHORT * group.size:
        return False
    return engine_for(group, device).short_by_levels


def start_gather(
    name: str,
    group: Group,
    values: torch.Tensor,
    sizes: Sequence[int],
    finish: Callable[[torch.Tensor], torch.Tensor],
    shape: Sequence[int] = (-1,),
) -> InRounds:
    """Begin to gather the pieces of all ranks by levels; `finish` gets them in rank order."""

    def rounds() -> Rounds:
        got = yield from all_gather(name, group, values, sizes)
        return finish(arranged(got, piece_order(group), range(group.size), sizes))

    return InRounds(rounds(), shape, values.dtype)


def all_sum(
    name: str, group: Group, values: torch.Tensor, use_fp32: bool, root: int | None = None
) -> Rounds:
    """Return the sum of few `values`, not yet rounded: all travel, in one round per level.

    It is the sum on every rank, or at `root`.
    """
    count = len(values)
    for level in levels(group):
        sources, targets = _partners(level, group.rank, root)
        send, recv = dict.fromkeys(targets, count), dict.fromkeys(sources, count)
        works, got = _exchange(name, group, values, send, recv, same=True)
        yield works
        del works  # they hold the sent tensor
        if sources:
            values = _summed(got.view(len(sources), count), use_fp32)
    return values


def piece_order(group: Group) -> list[int]:
    """Return the owners of pieces in the order in which no level need rearrange them."""
    return levels(group)[0].held


def _partners(level: Level, rank: int, root: int | None) -> tuple[list[int], list[int]]:
    """Return one rank of each cluster, from which a rank receives, and to which it sends."""
    if root is None:
        own = next(ranks for ranks in level.clusters if rank in ranks)
        place = rank - own.start
        sources = [ranks.start + place % len(ranks) for ranks in level.clusters]
        others = (ranks for ranks in level.clusters if ranks != own)
        targets = [t for ranks in others for t in ranks if (t - ranks.start) % len(own) == place]
        return sources, [*targets, rank]
    first = [root if root in ranks else ranks.start for ranks in level.clusters]
    target = root if root in first else first[0]
    return first if rank == target else [], [target] if rank in first else []


def _exchange(
    name: str,
    group: Group,
    values: torch.Tensor,
    send: Mapping[int, int],
    recv: Mapping[int, int],
    same: bool = False,
) -> tuple[Works, torch.Tensor]:
    """Start to send elements to some ranks, in rank order or to all of them the `same`."""
    to, of = ([counts.get(r, 0) for r in range(group.size)] for counts in (send, recv))
    return packing.exchange(name, group, values, to, of, "copies" if same else "neighbours")


def _summed(parts: torch.Tensor, use_fp32: bool) -> torch.Tensor:
    """Return the sum over dimension 0, by one kernel: the same bits for the same shape.

    torch adds up to 4 terms in order. The order of more is fixed, but it depends on the column.
    """
    dtype = accumulation_dtype(parts.dtype, use_fp32)
    if parts.dtype.itemsize == 1 and parts.is_floating_point():  # torch cannot sum these
        parts = parts.to(dtype)
    if parts.dtype == dtype or not parts.is_cpu or parts.shape[1] <= BLOCK:
        return parts.sum(0, dtype=dtype)
    total = parts.new_empty(parts.shape[1], dtype=dtype)
    for place, block in zip(total.split(BLOCK), parts.split(BLOCK, dim=1), strict=True):
        torch.sum(block, 0, dtype=dtype, out=place)  # on the CPU it makes a wide copy of all
    return total


def _total(pieces: Sequence[int], sizes: Sequence[int]) -> int:
    return sum(sizes[piece] for piece in pieces)


def arranged(
    values: torch.Tensor, order: Sequence[int], wanted: Sequence[int], sizes: Sequence[int]
) -> torch.Tensor:
    """Return the pieces that lie in `order` in the order `wanted`."""
    if [*order] == [*wanted]:
        return values
    places = dict(zip(order, values.split([sizes[piece] for piece in order]), strict=True))
    return torch.cat([values[:0], *(places[piece] for piece in wanted)])


# --- The tree. For 16 ranks without nodes it has two levels: the first merges ranks 0-3, 4-7, 8-11
# and 12-15 into clusters, the second merges these four. Piece 6 then has the path (2, 1): on the
# first level rank 2 of each cluster sums it, on the second rank 2 of cluster 1, which is rank 6.


def _levels(group: Group) -> Iterator[Level]:
    """Yield the levels of this rank."""
    rank, size = group.rank, group.size
    tree = _tree(size, _node_size(group))
    paths = [_path(tree, owner) for owner in range(size)]

    def holder(height: int, cluster: int, piece: int) -> int:
        """Return the rank of a cluster that has the sum of a piece: by its path, or a spare."""
        for level in reversed(range(height)):
            first, end = tree[level][cluster : cluster + 2]
            place = paths[piece][level]
            cluster = first + (place if place < end - first else piece % (end - first))
        return cluster

    starts, held = list(range(size + 1)), sorted(range(size), key=paths.__getitem__)
    cluster = rank
    for height, firsts in enumerate(tree):
        merged = bisect_right(firsts, cluster) - 1
        children = range(firsts[merged], firsts[merged + 1])
        send = _grouped((holder(height + 1, merged, piece), piece) for piece in held)
        kept = send.get(rank, [])
        recv = [_grouped((holder(height, c, piece), piece) for piece in kept) for c in children]
        yield Level([range(starts[c], starts[c + 1]) for c in children], held, kept, send, recv)
        starts, held, cluster = [starts[first] for first in firsts], kept, merged


def _path(tree: Sequence[Sequence[int]], rank: int) -> list[int]:
    """Return the place of a rank's cluster among those that one merge joins, level by level."""
    places, cluster = [], rank
    for firsts in tree:
        merged = bisect_right(firsts, cluster) - 1
        places.append(cluster - firsts[merged])
        cluster = merged
    return places


def _tree(size: int, node: int) -> list[list[int]]:
    """Return the first cluster that each cluster of a level merges, with the end, per level."""
    if 1 < node < size:
        return [*_merges(node, size // node), *_merges(size // node, 1)]
    return list(_merges(size, 1))


def _merges(count: int, blocks: int) -> Iterator[list[int]]:
    """Yield the levels that merge `count` clusters in each of some blocks into one."""
    for left in range(next(m for m in range(1, count) if MANY**m > count), 0, -1):
        near = round(count ** (1 / left))
        even = [k for k in range(near // 2 + 1, 2 * near) if count % k == 0]
        each = count if left == 1 else min(even, key=lambda k: abs(k - near), default=near)
        sizes = ShardSizes.balanced(count, -(-count // each))
        yield [0, *accumulate([*sizes] * blocks)]
        count = len(sizes)


def _node_size(group: Group) -> int:
    """Return the ranks per node, if each node has as many neighbouring ranks of the group; or 0."""
    per_node = resolve(None).node_size
    nodes = [(n, len([*of])) for n, of in groupby(group.ranks, lambda r: r // max(per_node, 1))]
    sizes = {length for _, length in nodes}
    return sizes.pop() if len(sizes) == 1 and len(dict(nodes)) == len(nodes) else 0


def _grouped(pairs: Iterator[tuple[int, int]]) -> dict[int, list[int]]:
    """Return the second numbers by the first, in ascending order of the first."""
    found: dict[int, list[int]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return dict(sorted(found.items()))
