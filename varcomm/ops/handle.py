"""Asynchronous calls: begin to communicate now, get the result by ``wait()``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from varcomm.errors import ArgumentError
from varcomm.ops.autograd import apply, begin, is_recorded, kept_from_compilation, refuse_vmap
from varcomm.ops.operator import Operator
from varcomm.transport.agree import compare, debugging
from varcomm.transport.engine import Pending

__all__ = ["Handle", "run", "start"]


class Handle:
    """A collective that is under way, or is done.

    Between the call with ``async_op=True`` and :meth:`wait`, the tensor that was passed must not be
    changed. All ranks make their calls and waits in the same order: backward follows that order.
    Inside :func:`varcomm.debug` they compare it.
    """

    def __init__(self, finish: Callable[[], torch.Tensor]) -> None:
        self._finish: Callable[[], torch.Tensor] | None = finish
        self._result: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        """Finish the operation and return its result, which is differentiable.

        A second call returns the same tensor.

        Raises
        ------
        ArgumentError
            If the tensor passed at the start has been changed in place since.
        DisagreementError
            Inside :func:`varcomm.debug`, on every rank, if they wait for different calls.
        """
        if self._result is None:
            assert self._finish is not None
            self._result = self._finish()
            self._finish = None  # which holds the input and what was sent
        return self._result


@dataclass
class _Begun:
    """Where :class:`_Start` leaves what it began: an object that transforms hand on as it is."""

    pending: Pending | None = None


class _Start(torch.autograd.Function):
    """Begin to communicate with the plain tensor behind `x`, whatever transform wraps it."""

    @staticmethod
    def forward(x: torch.Tensor, operator: Operator, recorded: bool, begun: _Begun) -> torch.Tensor:
        begun.pending = begin(operator, x, recorded)
        return x.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> None:
        return None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Any, operator: Operator, *_: Any) -> None:
        refuse_vmap(operator)


@kept_from_compilation
def start(operator: Operator, x: torch.Tensor) -> Handle:
    """Begin to communicate; the graph gets its node when the result is there."""
    begun = _Begun()
    with torch.no_grad():
        _Start.apply(x, operator, is_recorded(x, None), begun)  # type: ignore[no-untyped-call]
    version, pending = _version(x), begun.pending
    assert pending is not None

    def finish() -> torch.Tensor:
        where = f"{operator.name} on {operator.group}: "
        if pending.number is not None and debugging():
            call = {"operation": f"wait for {operator.name}", "which call": pending.number}
            compare(operator.group, call)
        if _version(x) != version:
            raise ArgumentError(
                f"{where}the tensor was changed in place between async_op=True and wait(). Change "
                "a clone, or wait first."
            )
        return apply(operator, x, pending)

    return Handle(finish)


def run(operator: Operator, x: torch.Tensor, async_op: bool) -> torch.Tensor | Handle:
    """Apply the operator, or begin to."""
    return start(operator, x) if async_op else apply(operator, x)


def _version(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place; inference tensors do not count."""
    return 0 if tensor.is_inference() else tensor._version
