"""The sum over ranks: locally, in rank order, fp16 and bf16 in fp32."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from varcomm.errors import ArgumentError
from varcomm.ops.checks import checked_tensor
from varcomm.sizes import ShardSizes
from varcomm.transport.group import Group

# Up to here a second round of messages costs more than the bytes that it saves.
SMALL = 16 * 1024

# Elements that are widened and summed at a time: 1 MiB of fp32 fits the cache.
BLOCK = 256 * 1024

_WITHOUT_SUM = {torch.uint16, torch.uint32, torch.uint64}


def sum_in_rank_order(
    parts: Iterable[torch.Tensor], use_fp32: bool, divisor: int = 1
) -> torch.Tensor:
    """Return ``(((p0 + p1) + p2) + ...) / divisor`` as a new tensor of the parts' dtype.

    Floats narrower than 4 bytes are summed in fp32, divided and rounded once, if `use_fp32`.
    """
    first, *others = parts
    if accumulation_dtype(first.dtype, use_fp32) == first.dtype:
        return accumulated((first, *others), use_fp32, divisor)
    if not first.is_cpu or first.numel() <= BLOCK:
        return accumulated((first, *others), use_fp32, divisor).to(first.dtype)
    total = torch.empty_like(first, memory_format=torch.contiguous_format)
    split = (part.reshape(-1).split(BLOCK) for part in (total, first, *others))
    for place, *blocks in zip(*split, strict=True):
        place.copy_(accumulated(blocks, use_fp32, divisor))
    return total


def accumulated(parts: Iterable[torch.Tensor], use_fp32: bool, divisor: int = 1) -> torch.Tensor:
    """Return that quotient before it is rounded to the parts' dtype, as a new tensor."""
    first, *others = parts
    dtype = accumulation_dtype(first.dtype, use_fp32)
    if dtype == first.dtype and others:
        total = torch.add(first, others.pop(0))
    else:
        total = first.to(dtype, copy=True)
    for part in others:
        # torch promotes all but floats of one byte
        total.add_(part.to(total.dtype) if part.dtype.itemsize == 1 else part)
    return total if divisor == 1 else total.div_(divisor)


def accumulation_dtype(dtype: torch.dtype, use_fp32: bool) -> torch.dtype:
    """Return the dtype in which values of `dtype` are summed."""
    narrow = dtype.is_floating_point and dtype.itemsize < 4
    return torch.float32 if narrow and use_fp32 else dtype


def pieces(x: torch.Tensor, group: Group, one_round: bool) -> ShardSizes | None:
    """Return the elements of `x` that each rank sums for the others, or None if each sums all.

    Pieces take two rounds of messages and ``2 (P - 1) / P`` times the bytes of `x`, else one round
    and ``P - 1`` times. An asynchronous call of few ranks does not begin a second round.
    """
    if one_round or group.size <= 2 or x.numel() * x.element_size() <= SMALL:
        return None
    return ShardSizes.balanced(x.numel(), group.size)


def checked_summable(x: torch.Tensor, where: str, use_fp32: bool = True) -> None:
    """Raise ArgumentError if `x` is not a dense tensor, or if its dtype has no sum."""
    checked_tensor(x, where)
    if x.dtype == torch.bool:
        raise ArgumentError(
            f"{where}a sum of torch.bool is not defined. Convert: tensor.to(torch.int64) counts, "
            "and its result > 0 is the logical or."
        )
    one_byte = x.dtype.is_floating_point and x.dtype.itemsize == 1
    if x.dtype in _WITHOUT_SUM or (one_byte and not use_fp32):
        hint = "use_fp32=True" if one_byte else "another dtype"
        raise ArgumentError(f"{where}torch cannot add {x.dtype}. Use {hint}.")
