"""Gradients of backwards that were not summed, until one comes that is."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from varcomm.data_parallel.buckets import dense, gradient_dtype

__all__ = ["Unsummed"]


@dataclass
class _Own:
    """What is this rank's own of a parameter's gradient.

    Where there was no ``grad``, that is ``grad`` itself, and ``value`` is None. Where ``grad`` has
    been summed already, it is a value beside it, as long as ``grad`` stays what it was ``before``.
    A trace stands for a backward that has brought no gradient: it is zeros, and counts as unused.
    """

    grad: weakref.ref[torch.Tensor]
    version: int
    value: torch.Tensor | None = None
    before: torch.Tensor | None = None
    is_trace: bool = False

    def touched(self, grad: torch.Tensor) -> bool:
        """Return whether `grad` is another one, or torch knows that it was written to."""
        return self.grad() is not grad or self.version != grad._version

    def stays(self, grad: torch.Tensor) -> bool:
        """Return whether the sum of both is still what there is to be."""
        if self.before is None:
            return self.grad() is grad  # who scales it scales what will be summed
        # not all that changes a gradient tells torch so
        return _equal(self.before, grad)


class Unsummed:
    """What this rank has to add to the next sum, of each parameter.

    ``zero_grad()`` is to drop it, though nobody tells of that. So it is in ``grad`` where there was
    none; else it is kept beside the ``grad`` that there was, with a copy by which it is seen if
    that changes, which it is not to do but to zeros or to None.

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
        value = dense(gradient)
        if own is None or own.value is None:
            self._own[index] = _Own(weakref.ref(grad), grad._version, value.clone(), grad.clone())
        else:
            own.value.add_(value)
            own.is_trace = False
        return None

    def leave_trace(self, index: int) -> None:
        """Let there be something that ``zero_grad()`` drops, if there is nothing else."""
        if self.any():
            return
        parameter = self._parameters[index]
        zeros = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
        if parameter.grad is None:
            parameter.grad = zeros
            own = _Own(weakref.ref(zeros), zeros._version)
        else:
            grad = parameter.grad
            own = _Own(weakref.ref(grad), grad._version, zeros, grad.clone())
        own.is_trace = True
        self._own[index] = own

    def backward_ended(self) -> None:
        """Remember each ``grad`` that autograd has made, or added to."""
        self.note(self._growing)
        self._growing.clear()

    def note(self, indices: Iterable[int]) -> None:
        """Remember that all that is in ``grad`` of these is this rank's own."""
        for index in indices:
            grad = self._parameters[index].grad
            if grad is not None:
                self._own[index] = _Own(weakref.ref(grad), grad._version)

    def get(self, index: int) -> torch.Tensor | None:
        """Return what is to be summed, and may be ``grad`` itself; it stays until it is dropped."""
        own = self._find(index)
        grad = self._parameters[index].grad
        if own is None or grad is None or own.is_trace:
            return None
        value = grad if own.value is None else own.value
        return dense(value)

    def is_grad(self, index: int) -> bool:
        """Return whether all that is in ``grad`` is this rank's own."""
        own = self._find(index)
        return own is not None and own.value is None

    def drop_trace(self, index: int) -> None:
        """Forget it, if it stands for no gradient."""
        if (own := self._own.get(index)) is not None and own.is_trace:
            self.drop(index)

    def drop(self, index: int) -> None:
        """Forget it, as it is summed; a trace leaves no ``grad`` where there was none."""
        own = self._own.pop(index, None)
        grad = self._parameters[index].grad
        if own is not None and own.is_trace and own.value is None and own.grad() is grad:
            self._parameters[index].grad = None

    def any(self) -> bool:
        """Return whether there is anything to be summed, were it from a backward that failed."""
        grads = (self._parameters[index].grad for index in self._growing)
        failed = any(grad is not None and _is_nonzero(grad) for grad in grads)
        return failed or any(self._find(index) is not None for index in list(self._own))

    def check(self) -> None:
        """Raise if it is not known what of a gradient is to be summed."""
        for index in list(self._own):
            self._find(index)

    def _find(self, index: int) -> _Own | None:
        """Return what there is after all that may have been done to ``grad`` meanwhile."""
        own = self._own.get(index)
        if own is None:
            return None
        grad = self._parameters[index].grad
        if grad is not None:
            if not own.touched(grad) and own.stays(grad):
                return own
            if index in self._growing or _is_nonzero(grad):
                if own.stays(grad):
                    return own
                self._refuse(
                    index,
                    "has been changed or replaced since a backward in no_sync, and what of it has "
                    "been summed is not known. Between such a backward and the next one that sums, "
                    "call nothing but zero_grad().",
                )
        del self._own[index]  # zeroed
        return None


def _is_nonzero(grad: torch.Tensor) -> bool:
    return bool(dense(grad).any())


def _equal(before: torch.Tensor, grad: torch.Tensor) -> bool:
    """Return whether all numbers are the same, or none in both."""
    a, b = dense(before), dense(grad)
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    return bool(((a == b) | (a.isnan() & b.isnan())).all())
