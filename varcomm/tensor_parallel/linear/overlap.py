"""Matrix products that are computed while messages travel."""

from __future__ import annotations

import torch

from varcomm.errors import ArgumentError
from varcomm.ops.all_gather_v import AllGatherV
from varcomm.ops.autograd import begin

__all__ = ["add_weight_gradient", "multiplied", "multiplied_while_gathered"]


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


def add_weight_gradient(
    gradient: torch.Tensor, x: torch.Tensor, main_grad: torch.Tensor | None
) -> torch.Tensor | None:
    """Return the gradient of a weight, or add it to `main_grad`, in the dtype of that."""
    if main_grad is None:
        return gradient.T @ x.conj()
    if torch.is_grad_enabled():
        raise ArgumentError(
            "a weight with a main_grad has no second derivative, as gradients are added to it in "
            "place. Delete weight.main_grad for create_graph=True."
        )
    dtype = main_grad.dtype
    main_grad.addmm_(gradient.T.to(dtype), x.conj().to(dtype))
    return None
