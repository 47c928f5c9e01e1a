"""Bare schedules on NCCL, by torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from varcomm.cli.bench.floors.gloo import all_to_all_single, reduce_scatter
from varcomm.cli.bench.floors.primitives import Way, by_all_to_all, by_messages
from varcomm.cli.bench.layout import Layout

__all__ = ["schedules"]


def schedules(primitive: str, layout: Layout) -> dict[str, Way]:
    """Return the ways to do a primitive, by name."""
    ways = {
        "send/recv": _MESSAGES[primitive],
        "all_to_all_single": _ALL_TO_ALL[primitive],
    }
    if primitive == "all_gather":
        ways["all_gather"] = _all_gather
    if primitive == "reduce_scatter" and layout.dtype.itemsize >= 4:
        ways["reduce_scatter"] = reduce_scatter  # for uneven shards, one group of reductions
    return ways


def _exchange(given: Sequence[torch.Tensor], places: Sequence[torch.Tensor]) -> None:
    """Send and receive in one group of calls."""
    rank = dist.get_rank()
    calls = [
        dist.P2POp(dist.irecv, place, peer)
        for peer, place in enumerate(places)
        if peer != rank and len(place)
    ]
    calls += [
        dist.P2POp(dist.isend, piece, peer)
        for peer, piece in enumerate(given)
        if peer != rank and len(piece)
    ]
    for work in dist.batch_isend_irecv(calls) if calls else ():
        work.wait()


def _all_gather(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Gather into views of the output: for uneven shards, one group of broadcasts."""
    out = x.new_empty(layout.total, layout.width)
    dist.all_gather(list(out.split(layout.sizes)), x)
    return out


_MESSAGES = by_messages(_exchange)
_ALL_TO_ALL = by_all_to_all(all_to_all_single)
