"""The norm of gradients of which each rank has pieces."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan

import torch

from varcomm.errors import ArgumentError
from varcomm.ops.all_gather_v import all_gather_v
from varcomm.ops.reduction import accumulation_dtype
from varcomm.sharding.spec import ShardSpec
from varcomm.transport.group import Group

__all__ = ["checked_number", "total_norm"]


@torch.no_grad()
def total_norm(
    gradients: Sequence[tuple[torch.Tensor, ShardSpec | None]],
    specs: Sequence[ShardSpec | None],
    norm_type: float,
    group: Group,
    error_if_nonfinite: bool,
) -> torch.Tensor:
    """Return the norm of all gradients of the model, as one vector; a scalar of float64.

    Parameters
    ----------
    gradients : sequence of (torch.Tensor, ShardSpec or None)
        Those of this rank's pieces, and how the parameter is sharded besides.
    specs : sequence of ShardSpec or None
        Of all parameters, on whatever rank.
    norm_type : float
    group : Group
        The ranks that have pieces.
    error_if_nonfinite : bool
    """
    kinds = dict.fromkeys([None, *(None if spec is None else spec.group for spec in specs)])
    norms: dict[Group | None, list[torch.Tensor]] = {kind: [] for kind in kinds}
    device = group.device()
    for gradient, spec in gradients:
        dtype = accumulation_dtype(gradient.dtype, use_fp32=True)
        norm = torch.linalg.vector_norm(gradient, norm_type, dtype=dtype)
        norms[None if spec is None else spec.group].append(norm.to(device, torch.float64))
    none = torch.zeros((), dtype=torch.float64, device=device)
    own = [
        torch.linalg.vector_norm(torch.stack([none, *some]), norm_type) for some in norms.values()
    ]
    counts = [len(own)] * group.size
    parts = all_gather_v(torch.stack(own), counts, group=group.process_group)
    totals = list(torch.linalg.vector_norm(parts.view(group.size, -1), norm_type, dim=0))
    for place, kind in enumerate(kinds):
        if kind is not None:  # each of its ranks has other rows of these
            parts = all_gather_v(totals[place].view(1), [1] * kind.size, group=kind.process_group)
            totals[place] = torch.linalg.vector_norm(parts, norm_type)
    total: torch.Tensor = torch.nn.utils.get_total_norm(totals, norm_type, error_if_nonfinite)
    return total


def checked_number(value: object, name: str, where: str, zero: bool = False) -> float:
    """Return `value` if it is a positive number; or 0, if `zero` is allowed."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and not isnan(value)
    if not number or value < 0 or (value == 0 and not zero):  # type: ignore[operator]
        kind = "not negative" if zero else "positive"
        raise ArgumentError(f"{where}{name} must be a number that is {kind}; got {value!r}.")
    return float(value)  # type: ignore[arg-type]
