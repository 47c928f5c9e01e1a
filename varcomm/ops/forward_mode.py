"""Forward mode in rules of autograd that other layers write."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from varcomm.errors import ArgumentError
from varcomm.ops.operator import records_graph

R = TypeVar("R")


def refuse_linearize(where: str, writers: str) -> None:
    """Raise ArgumentError if ``torch.func.linearize`` records.

    It keeps tensors that do not depend on the tangents, and `writers` write into some of them.
    """
    if torch.compiler.is_compiling() or not records_graph():
        return
    x = torch.empty(0)
    has_level = forward_ad.unpack_dual(x).primal is not x  # of forward mode, without torch.func
    if has_level and not torch._C._are_functorch_transforms_active():
        raise ArgumentError(
            f"{where}torch.func.linearize keeps tensors that {writers} write into, and its result "
            "would be wrong when called twice. Use torch.func.jvp."
        )


def in_forward_mode(jvp: Callable[..., R]) -> Callable[..., R]:
    """Turn forward mode on in a ``jvp``, where torch turns it off, for transforms around it.

    The ``jvp`` also gets the tensors that `ctx` saved, without tangents.
    """

    @wraps(jvp)
    def differentiated(ctx: Any, *tangents: Tensor | None) -> R:
        saved = ctx.saved_tensors
        if not torch._C._are_functorch_transforms_active():
            return jvp(ctx, saved, *tangents)
        with forward_ad._set_fwd_grad_enabled(True):
            plain = [None if x is None else forward_ad.unpack_dual(x).primal for x in saved]
            return jvp(ctx, plain, *tangents)

    return differentiated
