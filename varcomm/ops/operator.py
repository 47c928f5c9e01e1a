"""A collective as a linear operator, and the one autograd rule that all of them share.

A primitive is a pair of :class:`Operator` classes, each the other's adjoint. What follows from that
alone is written here once: derivatives of any order, forward mode, asynchronous calls, comparison
between ranks, the range in the profiler.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from varcomm.errors import ArgumentError
from varcomm.transport.agree import compare, debugging, fail
from varcomm.transport.engine import Pending
from varcomm.transport.group import Group
from varcomm.transport.trace import span

__all__ = ["Handle", "Operator", "apply", "checking", "run", "start"]


class Operator(ABC):
    """A linear map between what all ranks hold before and after a collective.

    Subclasses are frozen dataclasses that hold the group and whatever else the map depends on.
    """

    name: ClassVar[str]
    group: Group

    @abstractmethod
    def start(self, x: torch.Tensor) -> Pending:
        """Begin to communicate; return what gives this rank's part of the result."""

    @property
    @abstractmethod
    def adjoint(self) -> Operator:
        """The transposed map, for the inner product summed over ranks."""

    @abstractmethod
    def describe(self, x: torch.Tensor) -> dict[str, Any]:
        """Tell what must fit between ranks, as :func:`varcomm.transport.agree.compare` takes it."""


class Handle:
    """A collective that is under way, or is done.

    Between the call with ``async_op=True`` and :meth:`wait`, the tensor that was passed must not be
    changed. Every rank waits for its handles in the same order.
    """

    def __init__(self, finish: Callable[[], torch.Tensor]) -> None:
        self._finish = finish
        self._result: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        """Finish the operation and return its result, which is differentiable.

        A second call returns the same tensor.

        Raises
        ------
        ArgumentError
            If the tensor passed at the start has been changed in place since.
        """
        if self._result is None:
            self._result = self._finish()
        return self._result


class _Apply(torch.autograd.Function):
    """Apply an operator; differentiate it by applying the adjoint.

    Beside its result it returns a *token*, an empty tensor that the graph connects to the input.
    The adjoint that backward applies takes it as a second input. So the second derivative is
    recorded on all ranks or on none, even where the gradient on one rank does not depend on
    anything (a loss that is linear there, or none at all), and no rank waits for a peer that has
    nothing to differentiate. The gradient of a token is the token of the adjoint that was applied,
    so that the third derivative and all others go through the same calls on all ranks as well.
    """

    @staticmethod
    def forward(
        x: torch.Tensor,
        token: torch.Tensor | None,
        operator: Operator,
        pending: Pending | None,
        recorded: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        result = (pending or _begin(operator, x, recorded)).wait()
        return result, x.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.operator = inputs[2]
        ctx.has_token = inputs[1] is not None
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient, of_token = gradients
        (token,) = ctx.saved_tensors
        result, passed_on = _apply(ctx.operator.adjoint, gradient, token + of_token)
        return result, passed_on if ctx.has_token else None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        tangent = tangents[0]
        assert tangent is not None
        result = apply(ctx.operator, tangent)
        return result, result.new_zeros(0)


class _Start(torch.autograd.Function):
    """Begin to communicate with the plain tensor behind `x`, whichever transform wraps it."""

    @staticmethod
    def forward(
        x: torch.Tensor, operator: Operator, recorded: bool, begun: list[Pending]
    ) -> torch.Tensor:
        begun.append(_begin(operator, x, recorded))
        return x.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> None:
        return None


@contextmanager
def checking(name: str, group: Group) -> Iterator[str]:
    """Surround the checks of a call's arguments; yields how their messages start.

    Inside :func:`varcomm.debug`, an argument that is wrong on this rank is an error on all.
    """
    try:
        yield f"{name} on {group}: "
    except ArgumentError as error:
        if debugging():
            fail(group, name, error)
        raise


def run(operator: Operator, x: torch.Tensor, async_op: bool) -> torch.Tensor | Handle:
    """Apply the operator, or begin to."""
    return start(operator, x) if async_op else apply(operator, x)


def apply(operator: Operator, x: torch.Tensor, pending: Pending | None = None) -> torch.Tensor:
    """Apply an operator, so that it can be differentiated; or finish what has been begun."""
    result, _ = _apply(operator, x, None, pending)
    return result


def _apply(
    operator: Operator,
    x: torch.Tensor,
    token: torch.Tensor | None,
    pending: Pending | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    recorded = _is_recorded(x, token)
    return _Apply.apply(x, token, operator, pending, recorded)  # type: ignore[no-any-return, no-untyped-call]


def start(operator: Operator, x: torch.Tensor) -> Handle:
    """Begin to communicate; the graph gets its node when the result is there."""
    begun: list[Pending] = []
    with torch.no_grad():
        _Start.apply(x, operator, _is_recorded(x, None), begun)  # type: ignore[no-untyped-call]
    version = _version(x)

    def finish() -> torch.Tensor:
        if _version(x) != version:
            raise ArgumentError(
                f"{operator.name} on {operator.group}: the tensor was changed in place between "
                "async_op=True and wait(). Change a clone, or wait first."
            )
        return apply(operator, x, pending=begun[0])

    return Handle(finish)


def _begin(operator: Operator, x: torch.Tensor, recorded: bool) -> Pending:
    if debugging():
        call = {"operation": operator.name, **operator.describe(x)}
        compare(operator.group, call | {"dtype": str(x.dtype), "requires_grad": recorded})
    with span(operator.name):
        return operator.start(x)


def _is_recorded(x: torch.Tensor, token: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and (
        x.requires_grad or (token is not None and token.requires_grad)
    )


def _version(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place; inference tensors do not count."""
    return 0 if tensor.is_inference() else tensor._version
