"""Let a result lead to all that was exchanged for it, whether it was computed from that or not.

Backward is collective. A layer may return early where there are no edges; on a rank without edges
its result then does not depend on the halo, and backward would not come by the exchange there,
while other ranks wait in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

__all__ = ["tied"]


def tied(result: Any, others: Iterable[Any]) -> Any:
    """Return `result`, through whose tensors backward also comes to those in `others`.

    Others are tensors, pairs of them, or anything else, which is left alone.
    """
    given = [part for one in others for part in (one if isinstance(one, tuple | list) else (one,))]
    needed = [one for one in given if isinstance(one, torch.Tensor) and one.requires_grad]
    if not needed or not torch.is_grad_enabled():
        return result
    # torch.compile takes no functions that have a rule for tangents, which it does not know
    tie = _Tied if torch.compiler.is_compiling() else _TiedWithTangents
    return tree_map_only(torch.Tensor, lambda one: tie.apply(one, *needed), result)  # type: ignore[no-untyped-call]


class _Tied(torch.autograd.Function):
    """The first of its inputs; the others have no part in it, but their gradients are called for.

    Engines of autograd go on to a node whose gradient is undefined, at no cost. The result shares
    memory and version with the first input, and may be written to wherever that might be.
    """

    @staticmethod
    def forward(result: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return result.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        ctx.others = len(inputs) - 1

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (*gradients, *[None] * ctx.others)


class _TiedWithTangents(_Tied):
    """The same in forward mode."""

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor) -> torch.Tensor:
        return tangents[0]

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return _Tied.apply(*inputs), in_dims[0]  # type: ignore[no-untyped-call]
