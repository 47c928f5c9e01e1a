"""Public names of varcomm, which importing them loads together with torch."""

from __future__ import annotations

import importlib
from typing import Any

from varcomm.errors import (
    ArgumentError,
    CommunicationError,
    DisagreementError,
    GroupError,
    LaunchError,
    MissingPackageError,
    VarcommError,
)
from varcomm.ops.all_gather_v import all_gather_v
from varcomm.ops.all_reduce import all_reduce
from varcomm.ops.all_to_all_v import all_to_all_v, transpose_v
from varcomm.ops.broadcast import broadcast, reduce
from varcomm.ops.broadcast_module import broadcast_module
from varcomm.ops.carried import check
from varcomm.ops.gather_v import gather_v, scatter_v
from varcomm.ops.handle import Handle
from varcomm.ops.reduce_scatter_v import reduce_scatter_v
from varcomm.ops.shard_v import shard_v
from varcomm.plan.exchange_plan import ExchangePlan
from varcomm.plan.indexed_all_to_all_v import indexed_all_to_all_v
from varcomm.sharding.dtensor import from_dtensor, to_dtensor
from varcomm.sizes import ShardSizes
from varcomm.transport.agreement import debug
from varcomm.transport.capture import CapturedStep, capture
from varcomm.transport.launch import Ranks, launch
from varcomm.transport.trace import Call, Trace, Traffic, trace
from varcomm.transport.world import World, init

__all__ = [
    "ArgumentError",
    "Call",
    "CapturedStep",
    "CommunicationError",
    "DisagreementError",
    "ExchangePlan",
    "GroupError",
    "Handle",
    "LaunchError",
    "MissingPackageError",
    "Ranks",
    "ShardSizes",
    "Trace",
    "Traffic",
    "VarcommError",
    "World",
    "all_gather_v",
    "all_reduce",
    "all_to_all_v",
    "broadcast",
    "broadcast_module",
    "capture",
    "check",
    "debug",
    "from_dtensor",
    "gather_v",
    "indexed_all_to_all_v",
    "init",
    "launch",
    "reduce",
    "reduce_scatter_v",
    "scatter_v",
    "shard_v",
    "to_dtensor",
    "trace",
    "transpose_v",
]

# Loaded when they are first used, because importing PyTorch Geometric takes seconds per rank.
ROOMS = (
    *("ase", "checkpoint", "data_parallel", "graph", "grid", "models"),
    *("sharding", "simulate", "tensor_parallel", "testing"),
)


class _MissingSubpackageError(MissingPackageError, AttributeError):
    """The error that `hasattr` and `help` expect if an optional package is not installed."""


def look_up(name: str) -> Any:
    """Return a public name, or a subpackage; raise AttributeError for others."""
    if name in __all__ or name == "__all__":
        return globals()[name]
    if name in ROOMS or name == "_figures":  # which tutorials draw with
        try:
            return importlib.import_module(f"varcomm.{name}")
        except MissingPackageError as error:
            raise _MissingSubpackageError(str(error)) from error
    raise AttributeError(f"module 'varcomm' has no attribute {name!r}")
