"""Bare schedules on Gloo, by torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from varcomm.cli.bench.floors.primitives import Way, by_all_to_all, by_messages
from varcomm.cli.bench.layout import Layout

__all__ = ["all_to_all_single", "reduce_scatter", "schedules"]

_TAG = 7


def schedules(primitive: str, layout: Layout) -> dict[str, Way]:
    """Return the ways to do a primitive, by name."""
    ways = {
        "send/recv": _MESSAGES[primitive],
        "all_to_all_single": _ALL_TO_ALL[primitive],
    }
    if primitive == "all_gather":
        ways["broadcasts"] = _broadcasts
    if primitive == "reduce_scatter" and layout.dtype.itemsize >= 4:
        # it sums narrow floats in their own dtype, which is another result
        ways["reduce_scatter"] = reduce_scatter
    return ways


def _exchange(given: Sequence[torch.Tensor], places: Sequence[torch.Tensor]) -> None:
    """Send and receive by the calls of the group itself, which cost less than isend and irecv."""
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    works = [
        group.recv([place], peer, _TAG)
        for peer, place in enumerate(places)
        if peer != rank and len(place)
    ]
    works += [
        group.send([piece], peer, _TAG)
        for peer, piece in enumerate(given)
        if peer != rank and len(piece)
    ]
    for work in works:
        work.wait()


def all_to_all_single(
    out: torch.Tensor, data: torch.Tensor, recv: list[int], send: list[int]
) -> None:
    """Call torch.distributed's, with rows."""
    dist.all_to_all_single(out, data, recv, send)


def _broadcasts(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Broadcast each shard into its place, all at the same time."""
    out = x.new_empty(layout.total, layout.width)
    places = out.split(layout.sizes)
    places[layout.rank].copy_(x)
    works = [
        dist.broadcast(place, src, async_op=True)
        for src, place in enumerate(places)
        if layout.sizes[src]
    ]
    for work in works:
        work.wait()
    return out


def reduce_scatter(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Call torch.distributed's, with views of the input."""
    out = x.new_empty(layout.mine, layout.width)
    dist.reduce_scatter(out, list(x.split(layout.sizes)))
    return out


_MESSAGES = by_messages(_exchange)
_ALL_TO_ALL = by_all_to_all(all_to_all_single)
