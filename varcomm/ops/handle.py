"""Asynchronous calls: begin to communicate now, get the result by ``wait()``.

Such a call has two nodes in the graph, one where it starts and one where it is waited for. Backward
goes the other way: at the second node it *starts* the adjoint, at the first it *waits* for it.
autograd runs nodes in the reverse order of their recording, so all that was computed between start
and wait is differentiated while the adjoint travels. The backward of each node is made of the same
two nodes, for the adjoint operator: so it is for derivatives of any order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from varcomm.errors import ArgumentError
from varcomm.ops.autograd import (
    apply,
    apply_with_token,
    begin,
    checked_gradient,
    is_recorded,
    joined,
    kept_from_compilation,
)
from varcomm.ops.batching import batch_last, compare_batches, of_batch, of_each
from varcomm.ops.library import Meanwhile, not_before, start_in_graph, wait_in_graph
from varcomm.ops.operator import Operator
from varcomm.transport.agreement import compare, debugging, fail
from varcomm.transport.engine import Pending

__all__ = ["Handle", "run", "start"]


class Handle:
    """A collective that is under way, or is done.

    Between the call with ``async_op=True`` and :meth:`wait`, the tensor that was passed must not be
    changed. What is computed between the two runs while the data travel, and in backward while the
    gradients do. All ranks make their calls and waits in the same order: backward follows that
    order, in reverse. Inside :func:`varcomm.debug` they compare it.

    Examples
    --------
    >>> import torch, varcomm
    >>> def fn(rank):
    ...     under_way = varcomm.all_reduce(torch.tensor([rank, 10]), async_op=True)
    ...     meanwhile = rank + 1
    ...     return under_way.wait().tolist(), meanwhile
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
            self._finish = None  # which holds the input and what was sent
        return self._result

    def meanwhile(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x`, as an input of what is to be computed while the data travel.

        It matters in compiled code, where an order that the data do not ask for is not kept: there
        the backward of :meth:`wait` waits for the gradient of what this returns. Elsewhere, what
        comes before `wait()` overlaps, in both directions.

        Parameters
        ----------
        x : torch.Tensor
            Any tensor.

        Returns
        -------
        torch.Tensor
            `x`, or in compiled code a view of it.
        """
        return x

    def after(self, x: torch.Tensor) -> None:
        """Let compiled code not wait before it has computed `x`; elsewhere it has.

        Parameters
        ----------
        x : torch.Tensor
            A result of what is to be computed while the data travel.
        """


class _HandleInGraph(Handle):
    """A collective that a graph begins and waits for."""

    def __init__(self, operator: Operator, x: torch.Tensor) -> None:
        # as it is now: a graph has no versions, and where nothing changes x no copy is compiled;
        # whoever waits asks for a gradient, not who starts
        with torch.enable_grad():
            x, operator = x.clone(), operator.in_one_round
        self._ticket, promise = start_in_graph(operator, x, None)
        super().__init__(lambda: wait_in_graph(operator, x, self._ticket, promise)[0])

    def meanwhile(self, x: torch.Tensor) -> torch.Tensor:
        x, self._ticket = Meanwhile.apply(x, self._ticket)  # type: ignore[no-untyped-call]
        return x

    def after(self, x: torch.Tensor) -> None:
        self._ticket = not_before(self._ticket, x)


def start(operator: Operator, x: torch.Tensor) -> Handle:
    """Begin to communicate; the result belongs to the graph."""
    if torch.compiler.is_compiling():
        if torch._C._are_functorch_transforms_active():
            result = apply(operator.in_one_round, x)  # which runs it as it is, at once
            return Handle(lambda: result)
        return _HandleInGraph(operator, x)
    begun = _start(operator, x, None)
    changed = (
        f"{operator.name} on {operator.group}: the tensor was changed in place between "
        "async_op=True and wait(). Change a clone, or wait first."
    )
    return Handle(lambda: _wait(begun, changed)[0])


def run(operator: Operator, x: torch.Tensor, async_op: bool) -> torch.Tensor | Handle:
    """Apply the operator, or begin to."""
    return start(operator, x) if async_op else apply(operator, x)


@dataclass
class _Shared:
    """What the two nodes of a call share: an object that transforms hand on as it is."""

    of: int | None = None  # the number of the call whose backward this is, if ranks compare
    number: int | None = None  # its own
    pending: Pending | None = None  # from the start to the wait
    adjoint: _Begun | None = None  # in a backward, from that of the wait to that of the start


@dataclass(frozen=True)
class _Begun:
    """A call between its two nodes; `ticket` is the empty tensor that ties them in the graph."""

    operator: Operator
    x: torch.Tensor
    version: int
    ticket: torch.Tensor
    shared: _Shared


def _start(
    operator: Operator, x: torch.Tensor, token: torch.Tensor | None, of: int | None = None
) -> _Begun:
    operator, shared = operator.in_one_round, _Shared(of)
    transformed = torch._C._are_functorch_transforms_active()
    node = _start_in_transforms if transformed else _Start.apply
    ticket = node(x, token, operator, is_recorded(x, token), shared)
    return _Begun(operator, x, _version(x), ticket, shared)


def _wait(begun: _Begun, changed: str) -> tuple[torch.Tensor, torch.Tensor]:
    operator, pending = begun.operator, begun.shared.pending
    assert pending is not None
    error = ArgumentError(changed) if _version(begun.x) != begun.version else None
    if pending.number is not None and debugging():
        what = f"wait for {operator.name}"
        if error is not None:
            fail(operator.group, what, error)
        compare(operator.group, {"operation": what, "which call": pending.number})
    if error is not None:
        raise error
    transformed = torch._C._are_functorch_transforms_active()
    node = _wait_in_transforms if transformed else _Wait.apply
    return node(begun.x, begun.ticket, operator, begun.shared)


class _Start(torch.autograd.Function):
    """Begin to communicate with the plain tensor behind `x`, whatever transform wraps it.

    Its backward ends what that of :class:`_Wait` has begun, the adjoint.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        token: torch.Tensor | None,
        operator: Operator,
        recorded: bool,
        shared: _Shared,
    ) -> torch.Tensor:
        ctx.shared, ctx.has_token = shared, token is not None
        return _started(operator, x, recorded, shared)

    @staticmethod
    def backward(ctx: Any, of_ticket: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # tickets lead only from start to wait, so the wait's backward has been here just before
        begun, ctx.shared.adjoint = ctx.shared.adjoint, None
        changed = (
            f"{begun.operator.name} on {begun.operator.group}, in backward: the gradient was "
            f"changed in place between its start, in the backward of wait(), and its end, in the "
            "backward of async_op=True. Let hooks return new tensors."
        )
        result, passed_on = _wait(begun, changed)
        return result, passed_on if ctx.has_token else None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> torch.Tensor:
        tangent, of_token, *_ = tangents
        assert tangent is not None
        # the wait moves the tangent of x, and takes from here the token that it goes with
        empty = tangent.new_empty(0, dtype=torch.float32)
        return joined(empty, of_token)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Any,
        x: torch.Tensor,
        token: Any,
        operator: Operator,
        recorded: bool,
        shared: _Shared,
    ) -> tuple[torch.Tensor, int]:
        size = info.batch_size
        compare_batches(operator.name, operator.group, size, x)
        batch, of_token = batch_last(x, in_dims[0], size), of_batch(token, in_dims[1])
        ticket = _StartInTransforms.apply(  # type: ignore[no-untyped-call]
            batch, of_token, operator.batched(size), recorded, shared
        )
        return of_each(ticket, size), 1


class _Wait(torch.autograd.Function):
    """End what :class:`_Start` has begun with `x`; its backward begins the adjoint.

    `x` is here for the sake of its tangents. Gradients reach it through the ticket. Tokens are what
    they are for operators that are applied at once.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, ticket: torch.Tensor, operator: Operator, shared: _Shared
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output = _waited(x, shared)
        _keep(ctx, operator, shared, output[1])
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient, of_token = gradients
        (token,) = ctx.saved_tensors
        adjoint = ctx.operator.adjoint
        checked_gradient(adjoint, gradient)
        if not ctx.needs_input_grad[1]:
            # started under no_grad(): there is no other node that could wait
            result, _ = apply_with_token(adjoint, gradient, token + of_token, ctx.shared.number)
            return result, None, None, None
        ctx.shared.adjoint = _start(adjoint, gradient, token + of_token, ctx.shared.number)
        return None, ctx.shared.adjoint.ticket, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        tangent, of_ticket, *_ = tangents
        (token,) = ctx.saved_tensors
        assert tangent is not None
        return apply_with_token(ctx.operator, tangent, joined(token, of_ticket))

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, x: torch.Tensor, ticket: Any, operator: Operator, shared: _Shared
    ) -> tuple[Any, Any]:
        size = info.batch_size
        batch, of_ticket = batch_last(x, in_dims[0], size), of_batch(ticket, in_dims[1])
        result, token = _WaitInTransforms.apply(  # type: ignore[no-untyped-call]
            batch, of_ticket, operator.batched(size), shared
        )
        return (result, of_each(token, size)), (result.dim() - 1, 1)


class _StartInTransforms(_Start):
    """The same in the form that ``torch.func`` asks for, which costs three times as much."""

    @staticmethod
    def forward(  # type: ignore[override]
        x: torch.Tensor,
        token: torch.Tensor | None,
        operator: Operator,
        recorded: bool,
        shared: _Shared,
    ) -> torch.Tensor:
        return _started(operator, x, recorded, shared)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.shared, ctx.has_token = inputs[4], inputs[1] is not None


class _WaitInTransforms(_Wait):
    """Likewise."""

    @staticmethod
    def forward(  # type: ignore[override]
        x: torch.Tensor, ticket: torch.Tensor, operator: Operator, shared: _Shared
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return _waited(x, shared)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        _keep(ctx, inputs[2], inputs[3], output[1])


@kept_from_compilation
def _start_in_transforms(*inputs: Any) -> torch.Tensor:
    return _StartInTransforms.apply(*inputs)  # type: ignore[no-any-return, no-untyped-call]


@kept_from_compilation
def _wait_in_transforms(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _WaitInTransforms.apply(*inputs)  # type: ignore[no-any-return, no-untyped-call]


def _started(operator: Operator, x: torch.Tensor, recorded: bool, shared: _Shared) -> torch.Tensor:
    shared.pending = begin(operator, x, recorded, shared.of)
    shared.number = shared.pending.number
    return x.new_empty(0, dtype=torch.float32)


def _waited(x: torch.Tensor, shared: _Shared) -> tuple[torch.Tensor, torch.Tensor]:
    pending, shared.pending = shared.pending, None
    assert pending is not None
    # as a tensor of its own, though memory may be a view's: whoever gets it may write into it
    return pending.wait().data, x.new_empty(0, dtype=torch.float32)


def _keep(ctx: Any, operator: Operator, shared: _Shared, token: torch.Tensor) -> None:
    ctx.operator, ctx.shared = operator, shared
    ctx.save_for_backward(token)
    ctx.save_for_forward(token)


def _version(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place; inference tensors do not count."""
    return 0 if tensor.is_inference() else tensor._version
