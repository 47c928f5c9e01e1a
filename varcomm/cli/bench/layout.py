"""The tensors of an operation on all ranks: how many rows each has, and what it must get."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from varcomm.cli.bench.case import Case
from varcomm.cli.bench.sizes import row_width, shard_sizes, transfers
from varcomm.ops.reduction import sum_in_rank_order

__all__ = ["ROOT", "Layout", "reference", "transposed"]

# Of gathers and scatters.
ROOT = 0


@dataclass(frozen=True)
class Layout:
    """Rows of all ranks, seen from one of them.

    Attributes
    ----------
    rank : int
    sizes : list of int
        Rows that each rank holds.
    matrix : list of list of int
        ``matrix[i][j]``: rows that rank i sends to rank j, its own among them where it keeps some.
    width : int
        Numbers of a row.
    dtype : torch.dtype
    device : torch.device
    seed : str
        Of values and of indices.
    """

    rank: int
    sizes: list[int]
    matrix: list[list[int]]
    width: int
    dtype: torch.dtype
    device: torch.device
    seed: str

    @classmethod
    def of(cls, case: Case, rank: int, device: torch.device) -> Layout:
        """Lay out a case of the suite of operations."""
        dtype, width, world = getattr(torch, case.dtype), row_width(case.nbytes), case.world
        rows = max(1, round(case.nbytes / (width * dtype.itemsize)))
        name = case.operation
        personal = name in ("all_to_all_v", "indexed_all_to_all_v")
        sizes = shard_sizes(case.skew, rows * world if personal else rows, world)
        if name == "all_gather_v":
            matrix = [[size] * world for size in sizes]
        elif name == "reduce_scatter_v":
            matrix = [sizes] * world
        elif name == "gather_v":
            matrix = [[size * (peer == ROOT) for peer in range(world)] for size in sizes]
        elif name == "scatter_v":
            matrix = [[size * (peer == ROOT) for size in sizes] for peer in range(world)]
        else:
            matrix = transfers(sizes, keep=name == "all_to_all_v")
        return cls(rank, sizes, matrix, width, dtype, device, f"{name} {case.nbytes}")

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.sizes)

    @property
    def mine(self) -> int:
        """Rows that this rank holds."""
        return self.sizes[self.rank]

    @property
    def total(self) -> int:
        """Rows that all hold."""
        return sum(self.sizes)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.width * self.dtype.itemsize

    @cached_property
    def send(self) -> list[int]:
        """Rows for each rank."""
        return self.matrix[self.rank]

    @cached_property
    def recv(self) -> list[int]:
        """Rows from each rank."""
        return [row[self.rank] for row in self.matrix]

    @property
    def sent(self) -> int:
        """Bytes that this rank has to send to others."""
        return (sum(self.send) - self.send[self.rank]) * self.row_bytes

    @property
    def received(self) -> int:
        """Bytes that it has to receive."""
        return (sum(self.recv) - self.recv[self.rank]) * self.row_bytes

    @property
    def skew(self) -> float:
        """Largest over mean shard."""
        return max(self.sizes) * self.world / self.total

    def indices(self, sender: int) -> list[torch.Tensor]:
        """Return which of its rows a rank sends to each: drawn at random, some twice."""
        generator = self._generator(f"indices {sender}")
        rows = max(self.sizes[sender], 1)
        return [
            torch.randint(rows, (count,), generator=generator).to(self.device)
            for count in self.matrix[sender]
        ]

    @cached_property
    def index(self) -> torch.Tensor:
        """Indices of this rank, one after the other."""
        return torch.cat(self.indices(self.rank))

    @cached_property
    def home(self) -> torch.Tensor:
        """For each row that comes back to this rank, in the adjoint: which of its rows it is."""
        return transposed(self).index

    def values(self, rank: int, rows: int, what: str) -> torch.Tensor:
        """Return a rank's rows; any rank can make those of any other."""
        generator = self._generator(f"{what} {rank}")
        made = torch.randn(rows, self.width, generator=generator)
        return made.to(self.device, self.dtype)

    def _generator(self, what: str) -> torch.Generator:
        seed = zlib.crc32(f"{self.seed} {what}".encode())
        return torch.Generator().manual_seed(seed)


def transposed(layout: Layout) -> Layout:
    """Return the layout of the adjoint: what was sent comes back."""
    matrix = [[row[rank] for row in layout.matrix] for rank in range(layout.world)]
    return replace(layout, matrix=matrix)


def rows_of_input(primitive: str, layout: Layout, rank: int) -> int:
    """Return how many rows a rank puts in."""
    if primitive == "reduce_scatter":
        return layout.total
    if primitive == "scatter":
        return layout.total if rank == ROOT else 0
    if primitive in ("all_to_all", "sum_rows"):
        return sum(layout.matrix[rank])
    return layout.sizes[rank]


def reference(primitive: str, layout: Layout, what: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's input, and its result, computed from the inputs of all without messages.

    A primitive is one direction of an operation: the backward of ``all_gather`` is
    ``reduce_scatter``, that of ``pick_rows`` (an indexed exchange) is ``sum_rows``.
    """

    def made(rank: int) -> torch.Tensor:
        return layout.values(rank, rows_of_input(primitive, layout, rank), what)

    return made(layout.rank), _RESULTS[primitive](layout, made)


_Made = Callable[[int], torch.Tensor]


def _all(layout: Layout, made: _Made) -> Iterator[torch.Tensor]:
    """Yield what each rank puts in."""
    return (made(rank) for rank in range(layout.world))


def _blocks(layout: Layout, made: _Made) -> list[torch.Tensor]:
    """Return what each rank has for this one."""
    inputs = enumerate(_all(layout, made))
    return [x.split(layout.matrix[sender])[layout.rank].clone() for sender, x in inputs]


def _gathered(layout: Layout, made: _Made) -> torch.Tensor:
    if layout.rank == ROOT:
        return torch.cat(list(_all(layout, made)))
    return made(layout.rank)[:0]


def _picked(layout: Layout, made: _Made) -> torch.Tensor:
    inputs = enumerate(_all(layout, made))
    return torch.cat([x[layout.indices(sender)[layout.rank]] for sender, x in inputs])


def _summed(layout: Layout, made: _Made) -> torch.Tensor:
    back = torch.cat(_blocks(layout, made))
    total = torch.zeros(layout.mine, layout.width, dtype=torch.float64, device=layout.device)
    return total.index_add_(0, layout.home, back.double()).to(layout.dtype)


_RESULTS: dict[str, Callable[[Layout, _Made], torch.Tensor]] = {
    "all_gather": lambda layout, made: torch.cat(list(_all(layout, made))),
    "reduce_scatter": lambda layout, made: sum_in_rank_order(_blocks(layout, made), True),
    "all_to_all": lambda layout, made: torch.cat(_blocks(layout, made)),
    "gather": _gathered,
    "scatter": lambda layout, made: made(ROOT).split(layout.sizes)[layout.rank].clone(),
    "pick_rows": _picked,
    "sum_rows": _summed,
}
