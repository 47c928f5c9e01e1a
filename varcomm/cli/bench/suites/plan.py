"""The suite of plans: rows that are picked, exchanged, and in backward summed at their owners.

Bytes are the mean over ranks of what each sends. In ``halo`` the nodes of a grid are cut into
strips, and each rank sends the column next to its neighbour; in ``halo_with_own`` it appends what
comes to its own rows, as a layer on a graph needs them; in ``random`` each sends half as many rows
as it owns, drawn with repetition, to all others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist

import varcomm as vc
from varcomm.cli.bench.case import FLOOR, OURS, PEER, Case, Contender, Task
from varcomm.cli.bench.floors import schedules
from varcomm.cli.bench.layout import Layout, reference, transposed
from varcomm.cli.bench.peers import anemoi
from varcomm.cli.bench.peers.cannot import CannotError
from varcomm.cli.bench.peers.offer import PEERS, entered
from varcomm.cli.bench.sizes import row_width, shard_sizes, transfers
from varcomm.cli.bench.suites.ops import tolerance
from varcomm.cli.bench.timing import Effort
from varcomm.cli.bench.ways import contender

__all__ = ["OPERATIONS", "Strips", "bare_backward", "bare_forward", "build"]

OPERATIONS = ("halo", "halo_with_own", "random")

# Columns of a rank's strip, in the mean.
_COLUMNS = 8


@dataclass(frozen=True)
class Strips(Layout):
    """A grid of nodes, numbered row by row within each rank, whose columns are cut into strips."""

    def indices(self, sender: int) -> list[torch.Tensor]:
        """Return the first column for the rank before, the last for the one after."""
        found = []
        for peer, height in enumerate(self.matrix[sender]):
            columns = self.sizes[sender] // max(height, 1)
            first = torch.arange(height, device=self.device) * columns
            found.append(first if peer < sender else first + columns - 1)
        return found


def layout_of(case: Case, rank: int, device: torch.device) -> Layout:
    """Lay out a case, seen from a rank."""
    dtype, width, world = getattr(torch, case.dtype), row_width(case.nbytes), case.world
    rows = max(1, round(case.nbytes / (width * dtype.itemsize)))
    rest = (width, dtype, device, f"{case.operation} {case.nbytes}")
    if case.operation == "random":
        sizes = shard_sizes(case.skew, 2 * rows * world, world)
        return Layout(rank, sizes, transfers([n // 2 for n in sizes], keep=False), *rest)
    columns = shard_sizes(case.skew, _COLUMNS * world, world)
    there = [peer for peer in range(world) if columns[peer]]
    neighbours = set(pairwise(there))
    height = max(1, round(rows * world / max(1, 2 * len(neighbours))))
    matrix = [
        [height * ((a, b) in neighbours or (b, a) in neighbours) for b in range(world)]
        for a in range(world)
    ]
    return Strips(rank, [height * count for count in columns], matrix, *rest)


def build(case: Case, effort: Effort, device: torch.device) -> Task:
    """Prepare a case on this rank."""
    layout = layout_of(case, dist.get_rank(), device)
    plan = vc.ExchangePlan.from_indices(layout.indices(layout.rank), layout.mine)
    x, picked = reference("pick_rows", layout, "x")
    gradient, moved, of_rows = None, layout, None
    if case.backward:
        moved = transposed(layout)
        gradient, of_rows = reference("sum_rows", moved, "gradient")
    ours: Callable[[torch.Tensor], torch.Tensor] = plan
    expected = picked if of_rows is None else of_rows
    primitive = "sum_rows" if case.backward else "pick_rows"
    floors = schedules(case.engine, primitive, moved)
    cannot: dict[str, str] = {}
    peers: list[Contender] = []
    if case.operation == "halo_with_own":
        ours = partial(_with_own, plan)
        expected = torch.cat([x, picked])
        wrapped = partial(bare_backward, layout.mine) if case.backward else bare_forward
        floors = {name: partial(wrapped, way) for name, way in floors.items()}
        if gradient is not None and of_rows is not None:
            of_own = layout.values(layout.rank, layout.mine, "own")
            expected = (of_own.double() + of_rows.double()).to(layout.dtype)
            gradient = torch.cat([of_own, gradient])
        if effort.peers:
            peers, cannot = _appending(layout, x, gradient)
    elif effort.peers:
        asked = replace(case, operation="indexed_all_to_all_v")
        peers, cannot = entered(asked, layout, x, gradient)
    given = x if gradient is None else gradient
    return Task(
        [
            contender(OURS, OURS, ours, x, gradient),
            *(Contender(name, FLOOR, partial(way, given)) for name, way in floors.items()),
            *peers,
        ],
        expected,
        tolerance(case) if case.backward else 0.0,
        sum(map(sum, layout.matrix)) * layout.row_bytes // layout.world,
        layout.skew,
        moved.sent,
        moved.received,
        cannot,
    )


def _with_own(plan: vc.ExchangePlan, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, plan(x)])


def bare_forward(way: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Append what comes to own rows."""
    return torch.cat([x, way(x)])


def bare_backward(
    mine: int, way: Callable[[torch.Tensor], torch.Tensor], gradient: torch.Tensor
) -> torch.Tensor:
    """Add what comes back to the gradient of own rows."""
    return way(gradient[mine:]).add_(gradient[:mine])


def _appending(
    layout: Layout, x: torch.Tensor, gradient: torch.Tensor | None
) -> tuple[list[Contender], dict[str, str]]:
    """Return the one peer that appends to own rows, and why the others cannot."""
    cannot = dict.fromkeys(PEERS, "appends nothing to own rows")
    del cannot["anemoi"]
    try:
        exchange = anemoi.halo_exchange(layout)
    except CannotError as error:
        return [], cannot | {"anemoi": str(error)}
    return [contender("anemoi", PEER, exchange, x, gradient)], cannot
