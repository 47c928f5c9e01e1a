"""Gradients of backwards that were not summed, until one comes that is."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

__all__ = ["Unsummed"]


@dataclass
class _Own:
    """What is this rank's own of a parameter's gradient.

    Where there was no ``grad``, that is ``grad`` itself, and ``value`` is None. Where ``grad`` has
    been summed already, it is a value beside it, as long as ``grad`` stays the same.
    """

    grad: weakref.ref[torch.Tensor]
    version: int = 0
    value: torch.Tensor | None = None

    def belongs_to(self, grad: torch.Tensor) -> bool:
        same = self.grad() is grad
        return same and (self.value is None or self.version == grad._version)


class Unsummed:
    """What this rank has to add to the next sum, of each parameter.

    ``zero_grad()`` is to drop it, though nobody tells of that. So it is in ``grad`` where there was
    none; else it is tied to the ``grad`` beside which it is kept, which is not to change but to
    zeros or to None.

    Parameters
    ----------
    parameters : sequence of torch.nn.Parameter
        They are known by their places here.
    refuse : callable
        Raises the error of which it is given the place of a parameter and what is wrong with it.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        refuse: Callable[[int, str], NoReturn],
    ) -> None:
        self._parameters, self._refuse = parameters, refuse
        self._own: dict[int, _Own] = {}
        self._growing: set[int] = set()

    def add(self, index: int, gradient: torch.Tensor) -> torch.Tensor | None:
        """Keep what a backward brings; return what autograd is to add to ``grad``, if anything.

        It is never the gradient itself: who else has that may write into it before the next
        backward, or it is the view of one that comes to two parameters, and autograd, which makes
        it ``grad``, would then add to both at once.
        """
        own, grad = self._find(index), self._parameters[index].grad
        if grad is None or index in self._growing or (own is not None and own.value is None):
            self._growing.add(index)
            return gradient.clone() if grad is None else gradient
        value = gradient if gradient.layout == torch.strided else gradient.to_dense()
        if own is None or own.value is None:
            self._own[index] = _Own(weakref.ref(grad), grad._version, value.clone())
        else:
            own.value.add_(value)
        return None

    def backward_ended(self) -> None:
        """Remember each ``grad`` that autograd has made, or added to."""
        for index in self._growing:
            grad = self._parameters[index].grad
            if grad is not None:
                self._own[index] = _Own(weakref.ref(grad))
        self._growing.clear()

    def get(self, index: int) -> torch.Tensor | None:
        """Return what is to be summed, and may be ``grad`` itself; it stays until it is dropped."""
        own = self._find(index)
        grad = self._parameters[index].grad
        if own is None or grad is None:
            return None
        value = grad if own.value is None else own.value
        return value if value.layout == torch.strided else value.to_dense()

    def is_grad(self, index: int) -> bool:
        """Return whether all that is in ``grad`` is this rank's own."""
        own = self._find(index)
        return own is not None and own.value is None

    def drop(self, index: int) -> None:
        """Forget it, as it has been summed."""
        self._own.pop(index, None)

    def any(self) -> bool:
        """Return whether there is anything to be summed, were it from a backward that failed."""
        grads = (self._parameters[index].grad for index in self._growing)
        failed = any(grad is not None and _is_nonzero(grad) for grad in grads)
        return failed or any(self._find(index) is not None for index in list(self._own))

    def _find(self, index: int) -> _Own | None:
        """Return what there is after all that may have been done to ``grad`` meanwhile."""
        own = self._own.get(index)
        if own is None:
            return None
        grad = self._parameters[index].grad
        if grad is not None:
            if own.belongs_to(grad):
                return own
            if _is_nonzero(grad):
                self._refuse(
                    index,
                    "has been changed or replaced since a backward in no_sync, and what of it has "
                    "been summed is not known. Between such a backward and the next one that sums, "
                    "call nothing but zero_grad().",
                )
        self.drop(index)  # zeroed
        return None


def _is_nonzero(grad: torch.Tensor) -> bool:
    return bool((grad if grad.layout == torch.strided else grad.to_dense()).any())
