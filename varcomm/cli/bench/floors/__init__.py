"""Bare schedules: the same result by the engine's own calls, without autograd and without checks.

Each makes its output anew, as varcomm does, and moves uneven shards straight from the input and
into the output wherever its calls can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from varcomm.cli.bench.floors import gloo, mpi, nccl
from varcomm.cli.bench.layout import Layout

__all__ = ["schedules"]

_ENGINES = {"gloo": gloo.schedules, "nccl": nccl.schedules, "mpi": mpi.schedules}


def schedules(
    engine: str, primitive: str, layout: Layout
) -> Mapping[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Return an engine's ways to do a primitive, by name, each from the input to the output."""
    ways = _ENGINES[engine](primitive, layout)
    return {name: partial(way, layout=layout) for name, way in ways.items()}
