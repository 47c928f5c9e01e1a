"""The suite of operations: uneven collectives, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

import varcomm as vc
from varcomm.cli.bench.case import FLOOR, OURS, Case, Contender, Task
from varcomm.cli.bench.floors import schedules
from varcomm.cli.bench.layout import ROOT, Layout, reference, transposed
from varcomm.cli.bench.peers.offer import entered
from varcomm.cli.bench.timing import Effort
from varcomm.cli.bench.ways import contender

__all__ = ["OPERATIONS", "build", "tolerance"]


def _indexed(layout: Layout) -> Callable[[torch.Tensor], torch.Tensor]:
    indices = layout.indices(layout.rank)
    return partial(vc.indexed_all_to_all_v, indices=indices, sizes=layout.matrix)


# By operation: what it does, what its adjoint does, and varcomm's call.
_OPERATIONS: dict[
    str, tuple[str, str, Callable[[Layout], Callable[[torch.Tensor], torch.Tensor]]]
] = {
    "all_gather_v": (
        "all_gather",
        "reduce_scatter",
        lambda layout: partial(vc.all_gather_v, sizes=layout.sizes),
    ),
    "reduce_scatter_v": (
        "reduce_scatter",
        "all_gather",
        lambda layout: partial(vc.reduce_scatter_v, sizes=layout.sizes),
    ),
    "all_to_all_v": (
        "all_to_all",
        "all_to_all",
        lambda layout: partial(vc.all_to_all_v, send_sizes=layout.send, recv_sizes=layout.recv),
    ),
    "gather_v": (
        "gather",
        "scatter",
        lambda layout: partial(vc.gather_v, sizes=layout.sizes, dst=ROOT),
    ),
    "scatter_v": (
        "scatter",
        "gather",
        lambda layout: partial(vc.scatter_v, sizes=layout.sizes, src=ROOT),
    ),
    "indexed_all_to_all_v": ("pick_rows", "sum_rows", _indexed),
}
OPERATIONS = tuple(_OPERATIONS)


def build(case: Case, effort: Effort, device: torch.device) -> Task:
    """Prepare a case on this rank."""
    layout = Layout.of(case, dist.get_rank(), device)
    forward, adjoint, ours = _OPERATIONS[case.operation]
    x, y = reference(forward, layout, "x")
    gradient, expected = None, y
    moved, primitive = layout, forward
    if case.backward:
        moved, primitive = transposed(layout), adjoint
        gradient, expected = reference(adjoint, moved, "gradient")
    contenders = [contender(OURS, OURS, ours(layout), x, gradient)]
    given = x if gradient is None else gradient
    contenders += [
        Contender(name, FLOOR, partial(way, given))
        for name, way in schedules(case.engine, primitive, moved).items()
    ]
    cannot: dict[str, str] = {}
    if effort.peers:
        peers, cannot = entered(case, layout, x, gradient)
        contenders += peers
    return Task(
        contenders,
        expected,
        tolerance(case) if primitive in ("reduce_scatter", "sum_rows") else 0.0,
        (layout.total // layout.world if "all_to_all" in case.operation else layout.total)
        * layout.row_bytes,
        layout.skew,
        moved.sent,
        moved.received,
        cannot,
    )


def tolerance(case: Case) -> float:
    """Return how far a sum may be off, relative to the largest value."""
    eps = torch.finfo(getattr(torch, case.dtype)).eps
    # narrow floats are rounded a few times; of others, whose order differs, sums are long
    return min(0.02, 4 * eps) if eps > 1e-4 else 84 * eps
