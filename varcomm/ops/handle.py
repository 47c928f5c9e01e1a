"""Asynchronous calls: begin to communicate now, get the result by ``wait()``.

Such a call has two nodes in autograd's graph, one for its start and one for its wait. Backward
visits them in reverse: the node of the wait *starts* the adjoint, the node of the start *waits* for
it, and everything computed between the two is differentiated while the adjoint travels. Derivatives
of a backward, transforms of ``torch.func``, forward mode and graphs apply the operator at once, by
the rule of :mod:`varcomm.ops.operator`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad

from varcomm.errors import ArgumentError
from varcomm.ops.operator import (
    Operator,
    apply,
    apply_with_token,
    checked_gradient,
    in_graph,
    is_recorded,
    started,
)
from varcomm.transport.debug import debugging
from varcomm.transport.engine import Pending

__all__ = ["Handle", "run", "start"]


class Handle:
    """A collective in flight, or done.

    Between the call with ``async_op=True`` and :meth:`wait`, the tensor that was passed must not be
    changed. Computations between the two overlap with the messages, and so do their gradients in
    backward. All ranks make their calls and waits in the same order; inside :func:`varcomm.debug`
    they compare it. In compiled code the call communicates at once.

    Examples
    --------
    >>> import torch, varcomm
    >>> def fn(rank):
    ...     handle = varcomm.all_reduce(torch.tensor([rank, 10]), async_op=True)
    ...     meanwhile = rank + 1
    ...     return handle.wait().tolist(), meanwhile
    >>> varcomm.launch(fn, 2)
    [([1, 20], 1), ([1, 20], 2)]
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
            self._finish = None  # it holds the input and the sent bytes
        return self._result

    def meanwhile(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x`, as an input of a computation that overlaps with the messages.

        Parameters
        ----------
        x : torch.Tensor
            Any tensor.

        Returns
        -------
        torch.Tensor
            `x`.
        """
        return x

    def after(self, x: torch.Tensor) -> None:
        """Name a result of the computation that overlaps with the messages; does nothing.

        Parameters
        ----------
        x : torch.Tensor
            Any tensor.
        """


def run(operator: Operator, x: torch.Tensor, async_op: bool) -> torch.Tensor | Handle:
    """Apply the operator, or begin to."""
    return start(operator, x) if async_op else apply(operator, x)


def start(operator: Operator, x: torch.Tensor) -> Handle:
    """Begin to communicate; the result belongs to the graph."""
    operator = operator.in_one_round
    if in_graph(x) or _is_transformed(x):
        with torch.enable_grad():  # wait() decides whether there is a gradient
            result = apply(operator, x)
        return Handle(lambda: result if torch.is_grad_enabled() else result.detach())
    call = _Call(operator, is_recorded(x))
    ticket = _Start.apply(x, call)  # type: ignore[no-untyped-call]
    return Handle(lambda: _Wait.apply(x, ticket, call)[0])  # type: ignore[no-untyped-call]


def _is_transformed(x: torch.Tensor) -> bool:
    if torch._C._are_functorch_transforms_active():
        return True
    return forward_ad.unpack_dual(x).tangent is not None


@dataclass(eq=False)
class _InFlight:
    """An operator that has started on a tensor, which must not change until it is waited for."""

    operator: Operator
    x: torch.Tensor
    version: int
    pending: Pending

    @classmethod
    def begin(
        cls, operator: Operator, x: torch.Tensor, recorded: bool, of: int | None = None
    ) -> _InFlight:
        return cls(operator, x, _version(x), started(operator, x, recorded, of))

    def wait(self, changed: str) -> torch.Tensor:
        """Return the result; raise ArgumentError with `changed` if the tensor has changed."""
        operator, number = self.operator, self.pending.number
        error = None
        if _version(self.x) != self.version:
            error = ArgumentError(f"{operator.name} on {operator.group}{changed}")
        if number is not None and debugging():
            from varcomm.transport.agreement import compare, fail

            what = f"wait for {operator.name}"
            if error is not None:
                fail(operator.group, what, error)
            compare(operator.group, {"operation": what, "which call": number})
        if error is not None:
            raise error
        # as a tensor of its own, though its memory may be a view's: the caller may write into it
        return self.pending.wait().data


@dataclass(eq=False)
class _Call:
    """An asynchronous call, shared by its two nodes in autograd's graph."""

    operator: Operator
    recorded: bool
    forward: _InFlight | None = None  # from the start to the wait
    backward: _InFlight | torch.Tensor | None = None  # from the wait's backward to the start's


class _Start(torch.autograd.Function):
    """Begin to communicate; in backward, wait for the adjoint. Returns the ticket for the wait."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: _Call) -> torch.Tensor:
        ctx.call = call
        call.forward = _InFlight.begin(call.operator, x, call.recorded)
        return x.new_empty(0, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, of_ticket: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        # tickets lead only from start to wait, so the backward of the wait has just run
        begun, ctx.call.backward = ctx.call.backward, None
        if isinstance(begun, _InFlight):
            begun = begun.wait(
                ", in backward: the gradient was changed in place between its start, in the "
                "backward of wait(), and its end, in the backward of async_op=True. Let hooks "
                "return new tensors."
            )
        return begun, None


class _Wait(torch.autograd.Function):
    """Wait for the result; in backward, begin the adjoint. Gradients reach `x` by the ticket."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, ticket: torch.Tensor, call: _Call
    ) -> tuple[torch.Tensor, torch.Tensor]:
        begun = call.forward
        assert begun is not None
        result = begun.wait(
            ": the tensor was changed in place between async_op=True and wait(). Change a clone, "
            "or wait first."
        )
        call.forward = None  # not before: after a refused wait, wait() can be called again
        ctx.operator, ctx.call, ctx.number = call.operator, call, begun.pending.number
        token = x.new_empty(0, dtype=torch.float32)
        ctx.save_for_backward(token)
        return result, token

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor, of_token: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        (token,) = ctx.saved_tensors
        adjoint = ctx.operator.adjoint
        checked_gradient(adjoint, gradient)
        has_start = ctx.needs_input_grad[1]  # not if the call started under no_grad()
        if has_start and not is_recorded(gradient, token, of_token) and not in_graph(gradient):
            ctx.call.backward = _InFlight.begin(adjoint.in_one_round, gradient, False, ctx.number)
            return None, token.new_empty(0), None
        result, _ = apply_with_token(adjoint, gradient, token, of_token, of=ctx.number)
        if not has_start:
            return result, None, None
        ctx.call.backward = result
        return None, token.new_empty(0), None


def _version(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place; inference tensors do not count."""
    return 0 if tensor.is_inference() else tensor._version
