"""torch.distributed's reductions, done with torch: in rank order, so the same bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["checked", "combine"]

_Op: Any = dist.ReduceOp

_STEPS: dict[Any, Callable[..., Any]] = {
    _Op.SUM: torch.add,
    _Op.AVG: torch.add,
    _Op.PREMUL_SUM: torch.add,
    _Op.PRODUCT: torch.mul,
    _Op.MIN: torch.minimum,
    _Op.MAX: torch.maximum,
    _Op.BAND: torch.bitwise_and,
    _Op.BOR: torch.bitwise_or,
    _Op.BXOR: torch.bitwise_xor,
}

# Torch stores these and does not compute with them. Their bits are those of int64, modulo their
# width, in all but an order and a quotient of uint64.
_UNSIGNED = {torch.uint16, torch.uint32, torch.uint64}
_TOP_BIT = -(1 << 63)


def combine(op: Any, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Write to `out` what `op` makes of the ranks' parts, in rank order.

    Floats narrower than 4 bytes are combined in fp32 and rounded once. For booleans SUM and MAX are
    "or", PRODUCT and MIN are "and"; AVG of integers is rounded towards zero. `out` may be one of
    the parts.
    """
    kind, factor = _taken_apart(op)
    step, dtype = _STEPS[kind], out.dtype
    if dtype == torch.bool:
        step = {torch.add: torch.logical_or, torch.mul: torch.logical_and}.get(step, step)
    if len(parts) == 2 and kind not in (_Op.AVG, _Op.PREMUL_SUM) and _wide(dtype) == dtype:
        step(*parts, out=out)
        return
    total: torch.Tensor | None = None
    for part in parts:
        part = part.to(_wide(dtype), copy=total is None)
        if dtype == torch.uint64 and kind in (_Op.MIN, _Op.MAX):
            part = part ^ _TOP_BIT
        if kind == _Op.PREMUL_SUM:
            part = part * factor
        total = part if total is None else step(total, part, out=total)
    assert total is not None  # there is at least one rank
    if kind == _Op.AVG:
        exact = not (dtype.is_floating_point or dtype.is_complex)
        total = total.div_(len(parts), rounding_mode="trunc" if exact else None)
    if dtype == torch.uint64 and kind in (_Op.MIN, _Op.MAX):
        total = total ^ _TOP_BIT
    out.copy_(total)


def checked(op: Any, dtype: torch.dtype) -> Any:
    """Return `op`, if it is defined for this dtype.

    Raises
    ------
    RuntimeError
        Otherwise; before anything is sent, so on all ranks.
    """
    kind, factor = _taken_apart(op)
    reason = _refusal(kind, dtype)
    if reason or (factor is not None and not (dtype.is_floating_point or dtype.is_complex)):
        raise RuntimeError(
            f"{kind.name} of {dtype} is not defined{reason and ': ' + reason}. Convert the tensor, "
            "or take another operator."
        )
    return op


@cache
def _refusal(kind: Any, dtype: torch.dtype) -> str:
    if kind == _Op.AVG and dtype in (torch.bool, torch.uint64):
        return "it has no quotient"
    try:
        part = torch.empty(1, dtype=_wide(dtype), device="cpu")
        _STEPS[kind](part, part)
    except (RuntimeError, KeyError) as error:
        return str(error)
    return ""


def _wide(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_floating_point and dtype.itemsize < 4:
        return torch.float32
    return torch.int64 if dtype in _UNSIGNED else dtype


def _taken_apart(op: Any) -> tuple[Any, Any]:
    """Return the kind of operator, and the factor that PREMUL_SUM has."""
    kind, factor = op.__getstate__() if isinstance(op, dist.ReduceOp) else (op, None)
    return kind, factor
