"""What a rank can check of ids and of its part of a table."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from varcomm.errors import ArgumentError
from varcomm.ops.checks import checked_shard, checked_tensor
from varcomm.ops.reduction import checked_summable
from varcomm.sizes import ShardSizes, exact_int
from varcomm.transport.group import Group

__all__ = [
    "METHODS",
    "checked_ids",
    "checked_method",
    "checked_padding",
    "checked_range",
    "checked_table",
]

METHODS = ("auto", "masked", "indexed")


def checked_table(
    weight: torch.Tensor, sizes: Sequence[int], dim: int, group: Group, where: str
) -> ShardSizes:
    """Return `sizes` if `weight` is this rank's part of a table that is sharded along `dim`."""
    checked_summable(weight, where)
    if weight.dim() != 2:
        raise ArgumentError(
            f"{where}weight must have two dimensions, ids and features; got shape "
            f"{tuple(weight.shape)}."
        )
    return ShardSizes(checked_shard(weight, sizes, dim, group, where)[0])


def checked_ids(ids: torch.Tensor, weight: torch.Tensor, where: str) -> None:
    """Raise ArgumentError if `ids` are not integers on the device of `weight`."""
    checked_tensor(ids, where, "ids")
    if ids.dtype not in (torch.int32, torch.int64):
        hint = " Give an empty one its dtype." if ids.numel() == 0 else ""
        raise ArgumentError(
            f"{where}ids must be of torch.int64 or torch.int32; got {ids.dtype}.{hint}"
        )
    if ids.device != weight.device:
        raise ArgumentError(f"{where}ids are on {ids.device}, weight is on {weight.device}.")


def checked_range(ids: torch.Tensor, total: int, where: str) -> torch.Tensor:
    """Return `ids` flat and as int64, if all are rows of a table of `total`."""
    if ids.numel():
        low, high = torch.stack(ids.aminmax()).tolist()
        if low < 0 or high >= total:
            raise ArgumentError(
                f"{where}ids span {low}...{high}, out of range for {total} embeddings."
            )
    return ids.reshape(-1).to(torch.int64)


def checked_padding(padding_idx: int | None, total: int, where: str) -> int | None:
    """Return `padding_idx` counted from the front, or raise ArgumentError."""
    if padding_idx is None:
        return None
    value = exact_int(padding_idx)
    if value is None or not -total <= value < total:
        raise ArgumentError(
            f"{where}padding_idx must be one of all {total} ids, not of this rank's; got "
            f"{padding_idx!r}."
        )
    return value % total


def checked_method(method: str, where: str) -> None:
    """Raise ArgumentError if there is no such method."""
    if method not in METHODS:
        raise ArgumentError(f"{where}method must be one of {list(METHODS)}; got {method!r}.")
