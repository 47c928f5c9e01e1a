"""Norm of gradients of which each rank has pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from varcomm.data_parallel.sharded.arguments import NAME, checked_number
from varcomm.data_parallel.sharded.shard import Piece
from varcomm.ops.all_gather_v import all_gather_v
from varcomm.ops.operator import checking
from varcomm.ops.reduction import accumulation_dtype
from varcomm.sharding import ShardSpec
from varcomm.transport.agreement import compare, debugging
from varcomm.transport.group import Group

__all__ = ["clip_"]


@torch.no_grad()
def clip_(
    pieces: Sequence[Piece],
    specs: Mapping[str, ShardSpec | None],
    max_norm: float,
    norm_type: float,
    group: Group,
    error_if_nonfinite: bool,
) -> torch.Tensor:
    """Scale gradients so that the norm of those of all ranks is at most `max_norm`; return it.

    `pieces` are those of this rank; `specs` say how each parameter of any rank is sharded besides.
    """
    what = f"{NAME}.clip_grad_norm_"
    with checking(what, group, error_if_nonfinite=error_if_nonfinite) as where:
        not_negative, positive = "a number that is not negative", "a number that is positive"
        most = checked_number(max_norm, "max_norm", not_negative, lambda x: x >= 0, where)
        order = checked_number(norm_type, "norm_type", positive, lambda x: x > 0, where)
    if debugging():
        told = {"max_norm": most, "norm_type": order, "error_if_nonfinite": error_if_nonfinite}
        compare(group, {"operation": what, **told})
    # one norm for each way in which parameters are sharded besides
    over = {name: None if spec is None else spec.group for name, spec in specs.items()}
    kinds = list(dict.fromkeys([None, *over.values()]))
    device = group.device()
    norms = [[torch.zeros((), dtype=torch.float64, device=device)] for _ in kinds]
    for piece in pieces:
        gradient = piece.value.grad
        if gradient is not None and gradient.numel():
            dtype = accumulation_dtype(gradient.dtype, use_fp32=True)
            norm = torch.linalg.vector_norm(gradient, order, dtype=dtype)
            norms[kinds.index(over[piece.name])].append(norm.to(device, torch.float64))
    own = torch.stack([torch.linalg.vector_norm(torch.stack(some), order) for some in norms])
    parts = all_gather_v(own, [len(kinds)] * group.size, group=group.process_group)
    totals = list(torch.linalg.vector_norm(parts.view(group.size, -1), order, dim=0))
    for place, kind in enumerate(kinds):
        if kind is not None:  # each of its ranks has other rows of these
            parts = all_gather_v(totals[place].view(1), [1] * kind.size, group=kind.process_group)
            totals[place] = torch.linalg.vector_norm(parts, order)
    total: torch.Tensor = torch.nn.utils.get_total_norm(totals, order, error_if_nonfinite)
    torch.nn.utils.clip_grads_with_norm_([piece.value for piece in pieces], most, total)
    return total
