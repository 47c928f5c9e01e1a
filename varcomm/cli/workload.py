"""Cases of ``varcomm bench``: rows per rank, rows per message, and the call that moves them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import TypeAlias
from zlib import crc32

import torch

import varcomm as vc

__all__ = ["OPERATIONS", "ROOT", "Case", "Workload", "shard_sizes", "transfers", "workload"]

Call: TypeAlias = Callable[[torch.Tensor], torch.Tensor]

ROOT = 0
OPERATIONS = (
    *("all_gather_v", "reduce_scatter_v", "all_to_all_v", "gather_v", "scatter_v"),
    *("indexed_all_to_all_v", "halo"),
)
# Rows from rank i to rank j, if rank r has n[r] rows.
_ROWS: dict[str, Callable[[list[int], int, int], int]] = {
    "all_gather_v": lambda n, i, j: n[i],
    "gather_v": lambda n, i, j: n[i] * (j == ROOT),
    "reduce_scatter_v": lambda n, i, j: n[j],
    "scatter_v": lambda n, i, j: n[j] * (i == ROOT),
}
_COLUMNS = 8  # mean width of a rank's strip in the grid of "halo"


@dataclass(frozen=True)
class Case:
    """One line of the table; `nbytes` is rounded to whole rows, `skew` is an entry of --skews."""

    operation: str
    backward: bool
    world: int
    engine: str
    dtype: str
    nbytes: int
    skew: str
    suite: str = "ops"


@dataclass(frozen=True)
class Workload:
    """Rows of all ranks, seen from one rank; ``matrix[i][j]`` rows go from rank i to rank j.

    With `strips`, rows are nodes of a grid, and a rank sends its outer columns to its neighbours.
    """

    rank: int
    sizes: list[int]
    matrix: list[list[int]]
    width: int
    dtype: torch.dtype
    device: torch.device
    strips: bool = False

    @property
    def send(self) -> list[int]:
        """Rows for each rank."""
        return self.matrix[self.rank]

    @property
    def recv(self) -> list[int]:
        """Rows from each rank."""
        return [row[self.rank] for row in self.matrix]

    def fewest(self) -> tuple[int, int]:
        """Return the fewest bytes that this rank can send, and receive."""
        row, kept = self.width * self.dtype.itemsize, self.send[self.rank]
        return (sum(self.send) - kept) * row, (sum(self.recv) - kept) * row

    def indices(self, sender: int) -> list[torch.Tensor]:
        """Return the rows that a rank sends to each rank; random rows may repeat."""
        found, generator = [], torch.Generator().manual_seed(crc32(f"indices {sender}".encode()))
        for peer, count in enumerate(self.matrix[sender]):
            if self.strips:
                columns = self.sizes[sender] // max(count, 1)
                index = torch.arange(count) * columns + (0 if peer < sender else columns - 1)
            else:
                index = torch.randint(max(self.sizes[sender], 1), (count,), generator=generator)
            found.append(index.to(self.device))
        return found

    def call(self, operation: str) -> tuple[Call, int]:
        """Return varcomm's call for an operation, and the number of rows of this rank's input."""
        sizes, mine, total = self.sizes, self.sizes[self.rank], sum(self.sizes)
        match operation:
            case "all_gather_v":
                return partial(vc.all_gather_v, sizes=sizes), mine
            case "reduce_scatter_v":
                return partial(vc.reduce_scatter_v, sizes=sizes), total
            case "all_to_all_v":
                exchange = partial(vc.all_to_all_v, send_sizes=self.send, recv_sizes=self.recv)
                return exchange, sum(self.send)
            case "gather_v":
                return partial(vc.gather_v, sizes=sizes, dst=ROOT), mine
            case "scatter_v":
                rows = total if self.rank == ROOT else 0
                return lambda x: vc.scatter_v(x, sizes, src=ROOT, like=x), rows
            case "indexed_all_to_all_v":
                indices = self.indices(self.rank)
                return partial(vc.indexed_all_to_all_v, indices=indices, sizes=self.matrix), mine
        return vc.ExchangePlan.from_indices(self.indices(self.rank), mine), mine

    def nbytes(self, operation: str) -> int:
        """Return the bytes of the full tensor; of an exchange, the mean over ranks."""
        ranks = len(self.sizes)
        rows = sum(self.sizes) if operation in _ROWS else sum(map(sum, self.matrix)) // ranks
        return rows * self.width * self.dtype.itemsize


def workload(case: Case, rank: int, device: torch.device) -> Workload:
    """Lay out a case of :data:`OPERATIONS`."""
    dtype, world, name = getattr(torch, case.dtype), case.world, case.operation
    width = 64 if case.nbytes >= 16 * 2**10 else 8  # few numbers per row, so that shards can differ
    rows = max(1, round(case.nbytes / (width * dtype.itemsize)))
    if name == "halo":
        columns = shard_sizes(case.skew, _COLUMNS * world, world)
        pairs = set(pairwise(peer for peer in range(world) if columns[peer]))
        height = max(1, round(rows * world / max(1, 2 * len(pairs))))
        sizes = [height * count for count in columns]
        near = [[(i, j) in pairs or (j, i) in pairs for j in range(world)] for i in range(world)]
        matrix = [[height * is_near for is_near in row] for row in near]
    elif name in _ROWS:
        sizes = shard_sizes(case.skew, rows, world)
        matrix = [[_ROWS[name](sizes, i, j) for j in range(world)] for i in range(world)]
    else:
        sizes = shard_sizes(case.skew, rows * world, world)
        matrix = transfers(sizes, keep=name == "all_to_all_v")
    return Workload(rank, sizes, matrix, width, dtype, device, strips=name == "halo")


def shard_sizes(skew: str, rows: int, world: int) -> list[int]:
    """Return the rows of each rank.

    >>> shard_sizes("1:8", 100, 3), shard_sizes("empty", 100, 3)
    ([10, 80, 10], [0, 50, 50])
    """
    if skew == "empty":
        return _shares(rows, [int(rank > 0) for rank in range(world)])
    weights = [1] if skew == "even" else [int(weight) for weight in skew.split(":")]
    return _shares(rows, [weights[rank % len(weights)] for rank in range(world)])


def transfers(sizes: Sequence[int], keep: bool) -> list[list[int]]:
    """Return the rows that each rank sends to each rank, and to itself only with `keep`.

    >>> transfers([4, 8], True), transfers([4, 8], False)
    ([[3, 1], [5, 3]], [[0, 4], [8, 0]])
    """
    rows, world = [], len(sizes)
    for rank in range(world):
        receives = [int(keep or peer != rank or world == 1) for peer in range(world)]
        # rank j receives in proportion to the rows of rank j + 1, not to its own
        weights = [n * receives[peer] for peer, n in enumerate([*sizes[1:], sizes[0]])]
        rows.append(_shares(sizes[rank], weights if any(weights) else receives))
    return rows


def _shares(total: int, weights: Sequence[int]) -> list[int]:
    """Split `total` in proportion to weights; in even parts if all weights are zero."""
    weights = weights if any(weights) else [1] * len(weights)
    whole = sum(weights)
    cuts = [(total * part + whole // 2) // whole for part in accumulate(weights, initial=0)]
    return [end - start for start, end in pairwise(cuts)]
