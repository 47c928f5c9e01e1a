"""Matrix products that are computed while messages travel."""

from __future__ import annotations

import torch

from varcomm.ops.all_gather_v import AllGatherV
from varcomm.ops.autograd import begin

__all__ = ["multiplied", "multiplied_while_gathered"]


def multiplied_while_gathered(
    gather: AllGatherV,
    x: torch.Tensor,
    factor: torch.Tensor,
    bias: torch.Tensor | None,
    recorded: bool,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather rows, and return ``rows @ factor + bias`` for all of them, and the rows.

    Own rows are multiplied while those of others travel, each straight into its place; the product
    is in `out`, if there is one.
    """
    pending = begin(gather, x, recorded)
    before = sum(gather.sizes[: gather.group.rank])
    behind = before + len(x)
    if torch.compiler.is_compiling():
        # in graphs nothing has a place of its own: what is written there would be copied whole
        own = multiplied(x, factor, bias)
        rows = pending.wait()
        others = multiplied(rows[:before], factor, bias), multiplied(rows[behind:], factor, bias)
        return torch.cat([others[0], own, others[1]]), rows
    if out is None:
        out = x.new_empty(sum(gather.sizes), factor.shape[1])
    multiplied(x, factor, bias, out[before:behind])
    rows = pending.wait()
    multiplied(rows[:before], factor, bias, out[:before])
    multiplied(rows[behind:], factor, bias, out[behind:])
    return out, rows


def multiplied(
    x: torch.Tensor,
    factor: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``x @ factor + bias``, in `out` if there is one."""
    if bias is None:
        return torch.mm(x, factor, out=out)
    return torch.addmm(bias, x, factor, out=out)
