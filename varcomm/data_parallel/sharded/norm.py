"""The norm of gradients of which each rank has a piece."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan

import torch

from varcomm.errors import ArgumentError
from varcomm.ops.all_gather_v import all_gather_v
from varcomm.ops.reduction import accumulation_dtype
from varcomm.transport.group import Group

__all__ = ["checked_number", "total_norm"]


@torch.no_grad()
def total_norm(
    gradients: Sequence[torch.Tensor], norm_type: float, group: Group, error_if_nonfinite: bool
) -> torch.Tensor:
    """Return the norm of the gradients of all ranks, as one vector; a scalar of float64."""
    norms = [
        torch.linalg.vector_norm(x, norm_type, dtype=accumulation_dtype(x.dtype, use_fp32=True))
        for x in gradients
    ]
    own = torch.zeros(1, dtype=torch.float64, device=group.device())
    if norms:
        together = torch.stack([norm.to(own.device, torch.float64) for norm in norms])
        own[0] = torch.linalg.vector_norm(together, norm_type)
    parts = all_gather_v(own, [1] * group.size, group=group.process_group)
    total: torch.Tensor = torch.nn.utils.get_total_norm([parts], norm_type, error_if_nonfinite)
    return total


def checked_number(value: object, name: str, where: str, zero: bool = False) -> float:
    """Return `value` if it is a positive number; or 0, if `zero` is allowed."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and not isnan(value)
    if not number or value < 0 or (value == 0 and not zero):  # type: ignore[operator]
        kind = "not negative" if zero else "positive"
        raise ArgumentError(f"{where}{name} must be a number that is {kind}; got {value!r}.")
    return float(value)  # type: ignore[arg-type]
