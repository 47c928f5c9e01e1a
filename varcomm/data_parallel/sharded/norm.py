"""Norm of gradients of which each rank has pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan

import torch

from varcomm.errors import ArgumentError
from varcomm.ops.all_gather_v import all_gather_v
from varcomm.ops.operator import checking
from varcomm.ops.reduction import accumulation_dtype
from varcomm.sharding import ShardSpec
from varcomm.transport.agreement import compare, debugging
from varcomm.transport.group import Group

__all__ = ["clip_"]

_WHAT = "ShardedGradients.clip_grad_norm_"


Gradients = Sequence[tuple[str, torch.Tensor | None]]
Specs = Mapping[str, ShardSpec | None]


@torch.no_grad()
def clip_(
    gradients: Gradients,
    specs: Specs,
    max_norm: float,
    norm_type: float,
    group: Group,
    error_if_nonfinite: bool,
) -> torch.Tensor:
    """Scale gradients so that the norm of those of all ranks is at most `max_norm`; return it.

    `gradients` are those of this rank's pieces, by name of parameter; `specs` say how each
    parameter of any rank is sharded besides.
    """
    with checking(_WHAT, group, error_if_nonfinite=error_if_nonfinite) as where:
        most = _checked(max_norm, "max_norm", where, zero=True)
        order = _checked(norm_type, "norm_type", where)
    if debugging():
        told = {"max_norm": most, "norm_type": order, "error_if_nonfinite": error_if_nonfinite}
        compare(group, {"operation": _WHAT, **told})
    own = [
        (name, gradient)
        for name, gradient in gradients
        if gradient is not None and gradient.numel()
    ]
    total = _total_norm(own, specs, order, group, error_if_nonfinite)
    factor = (most / (total + 1e-6)).clamp(max=1.0)  # as torch has it
    for _, gradient in own:
        gradient.mul_(factor.to(gradient.device))
    return total


def _total_norm(
    gradients: Sequence[tuple[str, torch.Tensor]],
    specs: Specs,
    norm_type: float,
    group: Group,
    error_if_nonfinite: bool,
) -> torch.Tensor:
    """Return the norm of all gradients of the model as one vector; a scalar of float64."""
    over = {name: None if spec is None else spec.group for name, spec in specs.items()}
    kinds = dict.fromkeys([None, *over.values()])
    norms: dict[Group | None, list[torch.Tensor]] = {kind: [] for kind in kinds}
    device = group.device()
    for name, gradient in gradients:
        dtype = accumulation_dtype(gradient.dtype, use_fp32=True)
        norm = torch.linalg.vector_norm(gradient, norm_type, dtype=dtype)
        norms[over[name]].append(norm.to(device, torch.float64))
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


def _checked(value: object, name: str, where: str, zero: bool = False) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool) and not isnan(value)
    if not number or value < 0 or (value == 0 and not zero):  # type: ignore[operator]
        kind = "not negative" if zero else "positive"
        raise ArgumentError(f"{where}{name} must be a number that is {kind}; got {value!r}.")
    return float(value)  # type: ignore[arg-type]
