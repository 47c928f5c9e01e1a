"""The padded gather: what libraries do where an engine refuses uneven shards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from varcomm.cli.bench.case import Case
from varcomm.cli.bench.layout import Layout
from varcomm.cli.bench.peers.cannot import CannotError

__all__ = ["PACKAGE", "way"]

PACKAGE = None


def way(case: Case, layout: Layout) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return how to do a case."""
    if case.operation != "all_gather_v" or case.backward:
        raise CannotError("gathers, forward")
    return partial(_gather, sizes=layout.sizes)


@torch.no_grad()
def _gather(x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Pad each shard to the largest, gather them, cut and concatenate."""
    largest = max(sizes)
    places = [x.new_empty(largest, x.shape[1]) for _ in sizes]
    dist.all_gather(places, pad(x, (0, 0, 0, largest - len(x))))
    return torch.cat([place[:size] for place, size in zip(places, sizes, strict=True)])
