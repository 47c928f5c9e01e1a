"""``anemoi-models`` of ECMWF: its padded gather with the sum as backward, and its halo exchange.

Its sums are written into the tensor that it was given, where that is fp32.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from varcomm.cli.bench.case import Case
from varcomm.cli.bench.layout import Layout
from varcomm.cli.bench.peers.cannot import CannotError

__all__ = ["PACKAGE", "halo_exchange", "way"]

PACKAGE = "anemoi-models"


def way(case: Case, layout: Layout) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return how to do a case."""
    graph, group = _library("graph"), dist.group.WORLD
    if case.operation == "all_gather_v":
        return lambda x: graph.sync_tensor(x, 0, layout.sizes, group)
    if case.operation == "reduce_scatter_v":
        return lambda x: graph.reduce_shard_tensor(x, 0, layout.sizes, group)
    if case.operation == "indexed_all_to_all_v":
        raise CannotError("its halo exchange appends own rows: see --suite plan")
    raise CannotError(f"has no {case.operation}")


def _library(name: str) -> Any:
    """Import one of its modules for distributed tensors.

    Raises
    ------
    CannotError
        If it is not there or cannot be imported.
    """
    try:
        return importlib.import_module(f"anemoi.models.distributed.{name}")
    except ImportError as error:
        missing = getattr(error, "name", None) or ""
        if missing.split(".")[0] == "anemoi":
            raise CannotError(f"{PACKAGE} is not installed") from None
        raise CannotError(f"cannot be imported: {error}") from None


def halo_exchange(layout: Layout) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return its exchange, from own rows to these and the halo's.

    Raises
    ------
    CannotError
        If the package is not there or cannot be imported.
    """
    graph, halo, group = _library("graph"), _library("halo"), dist.group.WORLD
    info = halo.HaloInfo(
        num_local_nodes=layout.mine,
        num_halo_nodes=sum(layout.recv),
        send_indices=tuple(layout.indices(layout.rank)),
        recv_counts=tuple(layout.recv),
        recv_global_ids=None,
        edge_index_local=torch.empty(2, 0, dtype=torch.int64),
    )
    return lambda x: graph.halo_exchange(x, info, group)
