"""Mark of the parameters whose gradients a ``ShardedGradients`` takes."""

from __future__ import annotations

import weakref
from typing import Any

import torch

__all__ = ["Owner", "is_owned"]

_NAME = "_varcomm_owner"


class Owner:
    """Attribute of a parameter that belongs to a reducer, as long as the reducer is open.

    A copied or pickled parameter has no owner.
    """

    def __init__(self, reducer: object = None) -> None:
        self._reducer = None if reducer is None else weakref.ref(reducer)

    def __reduce__(self) -> tuple[Any, ...]:
        return Owner, ()

    def take(self, parameter: torch.Tensor) -> None:
        """Own a parameter."""
        setattr(parameter, _NAME, self)

    def leave(self) -> None:
        """Own nothing any more."""
        self._reducer = None

    @property
    def is_open(self) -> bool:
        """Whether the reducer exists and has not been closed."""
        return self._reducer is not None and self._reducer() is not None


def is_owned(parameter: torch.Tensor) -> bool:
    """Return whether a ShardedGradients takes the gradients of a parameter."""
    owner = getattr(parameter, _NAME, None)
    return isinstance(owner, Owner) and owner.is_open
