"""``torch.distributed.nn``: differentiable, but most of it for even shards; uneven ones are padded.

Padded shards are cut after a gather and before a scatter, as its users do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed.nn.functional
from torch.nn.functional import pad

from varcomm.cli.bench.case import Case
from varcomm.cli.bench.layout import ROOT, Layout
from varcomm.cli.bench.peers.cannot import CannotError

__all__ = ["PACKAGE", "way"]

PACKAGE = None

nn: Any = torch.distributed.nn.functional


def way(case: Case, layout: Layout) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return how to do a case."""
    uneven = len(set(layout.sizes)) > 1
    if case.operation == "reduce_scatter_v" and case.backward and uneven:
        raise CannotError("the backward of its reduce_scatter gathers even shards only")
    try:
        return partial(_WAYS[case.operation], layout=layout)
    except KeyError:
        raise CannotError(f"has no {case.operation}") from None


def _padded(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    return pad(x, (0, 0, 0, max(layout.sizes) - len(x)))


def _cut(places: tuple[torch.Tensor, ...], layout: Layout) -> torch.Tensor:
    pairs = zip(places, layout.sizes, strict=True)
    return torch.cat([place[:size] for place, size in pairs])


def _all_gather(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    return _cut(nn.all_gather(_padded(x, layout)), layout)


def _reduce_scatter(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    out = x.new_empty(layout.mine, layout.width)
    result: torch.Tensor = nn.reduce_scatter(out, list(x.split(layout.sizes)))
    return result


def _all_to_all(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    out = x.new_empty(sum(layout.recv), layout.width)
    result: torch.Tensor = nn.all_to_all_single(out, x, layout.recv, layout.send)
    return result


def _gather(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    places = nn.gather(_padded(x, layout), ROOT)
    return _cut(places, layout) if layout.rank == ROOT else places[ROOT][:0]


def _scatter(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    # off the root zeros, which belong to the graph
    parts = x.split(layout.sizes) if layout.rank == ROOT else [x] * layout.world
    padded = [_padded(part, layout) for part in parts]
    whole: torch.Tensor = nn.scatter(padded, ROOT)
    return whole[: layout.mine]


def _indexed(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    return _all_to_all(x.index_select(0, layout.index), layout)


_WAYS = {
    "all_gather_v": _all_gather,
    "reduce_scatter_v": _reduce_scatter,
    "all_to_all_v": _all_to_all,
    "gather_v": _gather,
    "scatter_v": _scatter,
    "indexed_all_to_all_v": _indexed,
}
