"""What a layer that takes another's place would lose of it."""

from __future__ import annotations

from torch import nn
from torch.nn.utils import parametrize

from varcomm.errors import ArgumentError

__all__ = ["check_plain"]


def check_plain(layer: nn.Module, kind: type[nn.Module], name: str) -> None:
    """Raise ArgumentError unless a layer is of this kind and does what that does, and no more."""
    if not isinstance(layer, kind):
        raise ArgumentError(f"{name} must be a torch.nn.{kind.__name__}; got {_named(layer)}.")
    hooks = (
        layer._forward_pre_hooks,
        layer._forward_hooks,
        layer._backward_pre_hooks,
        layer._backward_hooks,
    )
    lost = (
        "a parametrization"
        if parametrize.is_parametrized(layer)
        else "hooks"
        if any(hooks)
        else "a forward of its own"
        if type(layer).forward is not kind.forward
        else None
    )
    if lost is not None:
        raise ArgumentError(
            f"{name}, of class {_named(layer)}, has {lost}, which would be lost. Remove that, and "
            "give it to the parallel layer."
        )


def _named(layer: object) -> str:
    return type(layer).__name__
