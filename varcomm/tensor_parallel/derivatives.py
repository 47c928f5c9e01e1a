"""Second derivatives of functions that compute their first gradients in a way of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from varcomm._torch_private import transforms_active
from varcomm.errors import ArgumentError
from varcomm.ops.graph_operator import records_graph


def in_transform() -> bool:
    """Return whether ``torch.func`` or forward mode is active, which needs plain operations."""
    if torch.compiler.is_compiling():
        return False
    x = torch.empty(0)
    is_forward = forward_ad.unpack_dual(x).primal is not x  # a level of forward mode is open
    return is_forward or transforms_active()


def refuse_linearize(where: str, writers: str) -> None:
    """Raise ArgumentError if ``torch.func.linearize`` records.

    It keeps tensors that do not depend on the tangents, and `writers` write into some of them.
    """
    if torch.compiler.is_compiling() or not records_graph():
        return
    if in_transform() and not transforms_active():
        raise ArgumentError(
            f"{where}torch.func.linearize keeps tensors that {writers} write into, and its result "
            "would be wrong when called twice. Use torch.func.jvp."
        )


def recorded_gradients(
    plain: Callable[..., Any],
    tensors: Sequence[Tensor | None],
    needed: Sequence[bool],
    gradient: Any,
) -> list[Tensor | None]:
    """Return gradients of the needed ones among `tensors`, recorded for further derivatives.

    ``plain(*tensors)`` computes the function by differentiable operations; `gradient` has the
    structure of its result.
    """
    places = [place for place, is_needed in enumerate(needed) if is_needed]

    def of_needed(*values: Tensor) -> Any:
        given = list(tensors)
        for place, value in zip(places, values, strict=True):
            given[place] = value
        return plain(*given)

    found: list[Tensor | None] = [None] * len(tensors)
    pull = torch.func.vjp(of_needed, *(tensors[place] for place in places))[1]
    for place, value in zip(places, pull(gradient), strict=True):
        found[place] = value
    return found
