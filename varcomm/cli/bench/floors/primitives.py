"""The primitives, made of two kinds of calls: messages between ranks, and one all-to-all call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from varcomm.cli.bench.layout import ROOT, Layout

__all__ = ["AllToAll", "Messages", "Way", "by_all_to_all", "by_messages"]

# (what to send to each rank, where to put what comes from each): does not touch this rank's own
Messages: TypeAlias = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]
# (output, input, rows from each rank, rows for each rank): copies this rank's own as well
AllToAll: TypeAlias = Callable[[torch.Tensor, torch.Tensor, list[int], list[int]], None]
# called as way(x, layout=layout)
Way: TypeAlias = Callable[..., torch.Tensor]

# Elements that are widened at a time, so that they stay in the cache: 1 MiB of fp32.
_BLOCK = 256 * 1024


def by_messages(exchange: Messages) -> dict[str, Way]:
    """Return the primitives, of messages into views."""

    def all_gather(x: torch.Tensor, layout: Layout) -> torch.Tensor:
        out = x.new_empty(layout.total, layout.width)
        places = out.split(layout.sizes)
        exchange([x] * layout.world, places)
        places[layout.rank].copy_(x)
        return out

    def reduce_scatter(x: torch.Tensor, layout: Layout) -> torch.Tensor:
        parts = x.split(layout.sizes)
        got = list(x.new_empty(layout.world, layout.mine, layout.width).unbind())
        exchange(parts, got)
        got[layout.rank] = parts[layout.rank]
        return _sum(got)

    def all_to_all(x: torch.Tensor, layout: Layout) -> torch.Tensor:
        out = x.new_empty(sum(layout.recv), layout.width)
        given, places = x.split(layout.send), out.split(layout.recv)
        exchange(given, places)
        places[layout.rank].copy_(given[layout.rank])
        return out

    def gather(x: torch.Tensor, layout: Layout) -> torch.Tensor:
        nothing = x[:0]
        if layout.rank != ROOT:
            given = [nothing] * layout.world
            given[ROOT] = x
            exchange(given, [nothing] * layout.world)
            return nothing
        out = x.new_empty(layout.total, layout.width)
        places = out.split(layout.sizes)
        exchange([nothing] * layout.world, places)
        places[ROOT].copy_(x)
        return out

    def scatter(x: torch.Tensor, layout: Layout) -> torch.Tensor:
        nothing = x[:0]
        out = x.new_empty(layout.mine, layout.width)
        if layout.rank == ROOT:
            parts = x.split(layout.sizes)
            exchange(parts, [nothing] * layout.world)
            return out.copy_(parts[ROOT])
        places = [nothing] * layout.world
        places[ROOT] = out
        exchange([nothing] * layout.world, places)
        return out

    return _with_indices(
        {
            "all_gather": all_gather,
            "reduce_scatter": reduce_scatter,
            "all_to_all": all_to_all,
            "gather": gather,
            "scatter": scatter,
        }
    )


def by_all_to_all(call: AllToAll) -> dict[str, Way]:
    """Return the primitives, of one call with uneven rows."""

    def all_gather(x: torch.Tensor, layout: Layout) -> torch.Tensor:
        out = x.new_empty(layout.total, layout.width)
        call(out, x.repeat(layout.world, 1), layout.recv, layout.send)
        return out

    def reduce_scatter(x: torch.Tensor, layout: Layout) -> torch.Tensor:
        got = x.new_empty(layout.world, layout.mine, layout.width)
        call(got.view(-1, layout.width), x, layout.recv, layout.send)
        return _sum(got.unbind())

    def move(x: torch.Tensor, layout: Layout) -> torch.Tensor:
        out = x.new_empty(sum(layout.recv), layout.width)
        call(out, x, layout.recv, layout.send)
        return out

    return _with_indices(
        {
            "all_gather": all_gather,
            "reduce_scatter": reduce_scatter,
            "all_to_all": move,
            "gather": move,
            "scatter": move,
        }
    )


def _with_indices(ways: dict[str, Way]) -> dict[str, Way]:
    """Add the exchange of chosen rows, and its adjoint."""
    move = ways["all_to_all"]

    def pick_rows(x: torch.Tensor, layout: Layout) -> torch.Tensor:
        return move(x.index_select(0, layout.index), layout)

    def sum_rows(x: torch.Tensor, layout: Layout) -> torch.Tensor:
        back = move(x, layout)
        if back.is_cpu or back.dtype.itemsize >= 4:  # on a CPU torch sums narrow floats in fp32
            return back.new_zeros(layout.mine, layout.width).index_add_(0, layout.home, back)
        total = torch.zeros(layout.mine, layout.width, dtype=torch.float32, device=x.device)
        return total.index_add_(0, layout.home, back.float()).to(x.dtype)

    return ways | {"pick_rows": pick_rows, "sum_rows": sum_rows}


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add in rank order; narrow floats in fp32, rounded once, and block by block."""
    first, *others = parts
    if not others:
        return first.clone()
    if first.dtype.itemsize >= 4:
        total = torch.add(first, others[0])
        for part in others[1:]:
            total += part
        return total
    if not first.is_cpu or first.numel() <= _BLOCK:
        return _widened(parts).to(first.dtype)
    total = torch.empty_like(first)
    split = (part.view(-1).split(_BLOCK) for part in (total, *parts))
    for place, *blocks in zip(*split, strict=True):
        place.copy_(_widened(blocks))
    return total


def _widened(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    first, *others = parts
    wide = first.float()
    for part in others:
        wide += part
    return wide
