"""Products of sharded layers under ``vmap``: entries of a batch are more rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import torch

from varcomm.errors import ArgumentError
from varcomm.ops.all_gather_v import AllGatherV, ReduceScatterV
from varcomm.ops.batching import batch_last, compare_batches
from varcomm.ops.operator import Operator

__all__ = ["batched_rows", "unbatched_rows"]

Kind = TypeVar("Kind", bound=Operator)


def batched_rows(
    info: Any, in_dims: tuple[Any, ...], x: torch.Tensor, operator: Kind
) -> tuple[torch.Tensor, Kind]:
    """Return all rows of a batch of (rows, in), row by row, and the operator for as many.

    Raises
    ------
    ArgumentError
        If there is a batch of weights.
    """
    if any(dim is not None for dim in in_dims[1:]):
        raise ArgumentError(
            f"{operator.name} on {operator.group}: vmap has no rule for a batch of weights or "
            "biases of a linear layer, whose products would be batched. Take varcomm's mappings "
            "and torch's own linear in its place, or loop over the weights on all ranks alike."
        )
    size = info.batch_size
    compare_batches(operator.name, operator.group, size, x)
    rows = batch_last(x, in_dims[0], size).movedim(-1, 1).flatten(0, 1)
    if isinstance(operator, AllGatherV | ReduceScatterV):
        operator = replace(operator, sizes=tuple(n * size for n in operator.sizes))
    return rows, operator


def unbatched_rows(rows: torch.Tensor, info: Any) -> torch.Tensor:
    """Return them as (rows, batch, out)."""
    result: torch.Tensor = rows.unflatten(0, (len(rows) // info.batch_size, info.batch_size))
    return result
