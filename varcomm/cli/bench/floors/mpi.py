"""Bare schedules on MPI, by mpi4py, which moves whatever it is given as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch

from varcomm.cli.bench.floors.primitives import Way, by_all_to_all, by_messages
from varcomm.cli.bench.layout import ROOT, Layout

__all__ = ["schedules"]

_TAG = 7


def schedules(primitive: str, layout: Layout) -> dict[str, Way]:
    """Return the ways to do a primitive, by name."""
    ways = {
        "Isend/Irecv": by_messages(_exchange)[primitive],
        "Alltoallv": by_all_to_all(_all_to_all)[primitive],
    }
    own = {"all_gather": _all_gather, "gather": _gather, "scatter": _scatter}
    if primitive in own:
        ways[f"{primitive.replace('_', '').capitalize()}v"] = own[primitive]
    return ways


@cache
def _mpi() -> Any:
    from mpi4py import MPI

    return MPI


def _bytes(x: torch.Tensor) -> Any:
    """Return the memory of a tensor, as MPI takes it."""
    return x.view(-1).view(torch.uint8).numpy()


def _counted(x: torch.Tensor, rows: list[int]) -> list[Any]:
    """Return it with bytes by rank, and where each begins."""
    row = x.shape[1] * x.element_size()
    counts = [count * row for count in rows]
    return [_bytes(x), counts, list(accumulate(counts, initial=0))[:-1], _mpi().BYTE]


def _exchange(given: Sequence[torch.Tensor], places: Sequence[torch.Tensor]) -> None:
    world = _mpi().COMM_WORLD
    rank = world.rank
    requests = [
        world.Irecv(_bytes(place), peer, _TAG)
        for peer, place in enumerate(places)
        if peer != rank and len(place)
    ]
    requests += [
        world.Isend(_bytes(piece), peer, _TAG)
        for peer, piece in enumerate(given)
        if peer != rank and len(piece)
    ]
    _mpi().Request.Waitall(requests)


def _all_to_all(out: torch.Tensor, data: torch.Tensor, recv: list[int], send: list[int]) -> None:
    _mpi().COMM_WORLD.Alltoallv(_counted(data, send), _counted(out, recv))


def _all_gather(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    out = x.new_empty(layout.total, layout.width)
    _mpi().COMM_WORLD.Allgatherv(_bytes(x), _counted(out, layout.sizes))
    return out


def _gather(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    if layout.rank != ROOT:
        _mpi().COMM_WORLD.Gatherv(_bytes(x), None, ROOT)
        return x[:0]
    out = x.new_empty(layout.total, layout.width)
    _mpi().COMM_WORLD.Gatherv(_bytes(x), _counted(out, layout.sizes), ROOT)
    return out


def _scatter(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    out = x.new_empty(layout.mine, layout.width)
    whole = _counted(x, layout.sizes) if layout.rank == ROOT else None
    _mpi().COMM_WORLD.Scatterv(whole, _bytes(out), ROOT)
    return out
