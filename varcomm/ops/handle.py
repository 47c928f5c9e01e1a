"""Calls of collectives: started, waited for, and differentiated.

There is one verb: :func:`start` sends a tensor and returns a Handle. An eager call is
``start(call, x).wait()``; :func:`at_once` and :func:`apply` are its short cuts.

The derivative of an operator is the operator; its backward applies the adjoint. Each application
also returns a *token*: an empty tensor that autograd connects to the input, and a further input of
derivatives. So a second derivative is recorded on all ranks or on none, even if the gradient on one
rank depends on nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from varcomm._torch_private import transforms_active, version_of
from varcomm.errors import ArgumentError
from varcomm.ops.checks import TENSORS, checked_tensor, checking, has_tangent, holds_values
from varcomm.ops.compilation import kept_from_compilation
from varcomm.ops.graph_operator import (
    Tensors,
    call_in_graph,
    in_graph,
    is_traced,
    records_graph,
    token_of,
)
from varcomm.ops.rule import Call, Operator, is_recorded, keep, send
from varcomm.sizes import ShardSizes
from varcomm.transport.debug import debugging
from varcomm.transport.engine import Pending


class Handle:
    """A collective that is in flight or complete.

    Computations between the call with ``async_op=True`` and :meth:`wait` overlap with the messages,
    in backward too. Do not change the input before :meth:`wait`. All ranks call and wait in the
    same order. Compiled code communicates at once.

    See Also
    --------
    all_gather_v, ExchangePlan

    Examples
    --------
    >>> import torch, varcomm
    >>> def fn(rank):
    ...     handle = varcomm.all_reduce(torch.tensor([rank, 10]), async_op=True)
    ...     return handle.wait()
    >>> varcomm.launch(fn, 2)
    [tensor([ 1, 20]), tensor([ 1, 20])]
    """

    def __init__(self, finish: Callable[[], Tensor]) -> None:
        self._finish: Callable[[], Tensor] | None = finish
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        """Return the result, differentiable and always the same tensor.

        Raises
        ------
        ArgumentError
            If the input has been changed in place after the start.
        DisagreementError
            Inside :func:`varcomm.debug`, on every rank, if they wait for different calls.
        """
        if self._result is None:
            assert self._finish is not None
            self._result = self._finish()
            self._finish = None  # it holds the input
        return self._result


if TYPE_CHECKING:

    class TensorOrHandle(Tensor, Handle):
        """The result of a call: a tensor, or with ``async_op=True`` a Handle."""

        def split(self, *how: Any) -> Any:
            """Return parts of the tensor, which torch does not type."""

else:
    TensorOrHandle = Tensor | Handle


# --- The verb and its short cuts


def start(call: Call, x: Tensor) -> Handle:
    """Send `x` by a call in one round; the result belongs to autograd's graph."""
    if in_graph(x) or transforms_active() or has_tangent(x):
        recorded = is_recorded(x)
        with torch.enable_grad():  # wait() decides whether there is a gradient
            result = apply(call.operator, x, recorded)
        return Handle(lambda: result if torch.is_grad_enabled() else result.detach())
    flight = _Flight(call)
    ticket: Tensor = _Start.apply(x, flight, is_recorded(x))  # type: ignore[no-untyped-call]
    return Handle(lambda: _Wait.apply(x, ticket, flight)[0])  # type: ignore[no-untyped-call]


def at_once(call: Call, x: Tensor) -> Tensor:
    """Return ``start(call, x).wait()`` outside of debug() and of graphs, in one node."""
    if (
        (x.requires_grad and torch.is_grad_enabled())
        or transforms_active()
        or forward_ad.unpack_dual(x).tangent is not None
    ):
        return _differentiated(call, x)[0]
    # detached from a view's base: the caller may write into the result
    return send(call, x, recorded=False).wait().data


def apply(operator: Operator, x: Tensor, recorded: bool | None = None) -> Tensor:
    """Return ``start(Call(operator), x).wait()`` of any tensor, recorded in a graph."""
    if torch.compiler.is_compiling() and not transforms_active():
        return call_in_graph(operator, x, is_recorded(x) if recorded is None else recorded)[0]
    return _differentiated(Call(operator), x)[0]


def send_in_rule(operator: Operator, x: Tensor, requires_grad: bool) -> Pending:
    """Send `x` inside a rule of autograd of another module; a graph records it at once."""
    if in_graph(x):
        result = call_in_graph(operator, x, requires_grad)[0]
        return Pending([], lambda: result)
    _refuse_batch(operator, x)
    return send(Call(operator), x, requires_grad, overlaps=True)


# --- Calls with equal arguments

_SIZES = frozenset((ShardSizes, tuple, list))
_INT = frozenset((int,))
_PLAIN = frozenset((int, bool, torch.Size))


def collective(
    make: Callable[..., Operator],
    owner: Any,
    x: Tensor,
    sizes: Sequence[int],
    how: tuple[Any, ...],
    async_op: bool,
) -> TensorOrHandle:
    """Start the operator ``make(owner, x, sizes, *how)``, which checks these, or apply it.

    The owner, a group or plan, keeps the call in its `calls` for equal arguments.
    """
    types = tuple(map(type, how))
    if (
        torch.compiler.is_compiling()
        or (type(x) not in TENSORS and not (isinstance(x, Tensor) and holds_values(x)))
        or type(async_op) is not bool
        or type(sizes) not in _SIZES
        or not _INT.issuperset(map(type, sizes))  # torch.jit.trace has tensors for ints
        or not _PLAIN.issuperset(types)
        or x.is_nested
        or records_graph()
        or debugging()
    ):
        return start_or_apply(make(owner, x, sizes, *how), x, async_op)
    key = make, tuple(sizes), how, types, async_op, x.shape, x.dtype, x.device, x.layout
    call: Call | None = owner.calls.get(key)
    if call is None:
        operator = make(owner, x, sizes, *how)
        call = Call(operator.in_one_round if async_op else operator)
        keep(owner.calls, key, call)
    return start(call, x) if async_op else at_once(call, x)  # type: ignore[return-value]


def start_or_apply(operator: Operator, x: Tensor, async_op: bool) -> TensorOrHandle:
    """Start the operator, or apply it."""
    if type(async_op) is not bool:
        with checking(operator.name, operator.group, async_op=async_op):
            raise AssertionError("checking() refuses other flags than bools")
    if async_op:
        return start(Call(operator.in_one_round), x)  # type: ignore[return-value]
    return apply(operator, x)  # type: ignore[return-value]


# --- Derivatives of a call that communicates at once


def _differentiated(
    call: Call, x: Tensor, tokens: tuple[Tensor | None, ...] = (), of: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the result, and the token of a call that can be differentiated.

    A derivative passes the tokens and the number `of` its call.
    """
    given = [token for token in tokens if token is not None]
    requires_grad = is_recorded(x, given)
    if transforms_active():
        return _in_transforms(x, call, requires_grad, of, *given)
    if requires_grad or has_tangent(x):
        return _Rule.apply(x, call, requires_grad, of, *given)  # type: ignore[no-any-return, no-untyped-call]
    return _forward(call, x, requires_grad, of)[0], None


def _forward(
    call: Call, x: Tensor, requires_grad: bool, of: int | None
) -> tuple[Tensor, int | None]:
    """Return the result, and the number of the call if ranks compare calls."""
    if is_traced(x):
        return call_in_graph(call.operator, x, requires_grad)[0], None
    pending = send(call, x, requires_grad, of)
    return pending.wait().data, pending.number


class _Rule(torch.autograd.Function):
    """Apply an operator; differentiate it by applying the adjoint."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, call: Call, requires_grad: bool, of: int | None, *_: Tensor
    ) -> Tensors:
        result, ctx.number = _forward(call, x, requires_grad, of)
        token = token_of(x)
        _keep(ctx, call, token)
        return result, token

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, of_token: Tensor) -> tuple[Tensor | None, ...]:
        (token,) = ctx.saved_tensors
        adjoint = ctx.call.adjoint
        _check_gradient(adjoint.operator, gradient)
        result, passed_on = _differentiated(adjoint, gradient, (token, of_token), ctx.number)
        return result, None, None, None, *[passed_on] * (len(ctx.needs_input_grad) - 4)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *others: Tensor | None) -> Tensors:
        result, token = _differentiated(ctx.call, tangent, (*ctx.saved_tensors, *others[3:]))
        return result, token_of(tangent) if token is None else token

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, call: Call, *_: Any) -> Any:
        refuse_vmap(f"{call.operator.name} on {call.operator.group}: ")


class _RuleInTransforms(_Rule):
    """The rule in the form that ``torch.func`` requires, which costs three times as much."""

    @staticmethod
    def forward(  # type: ignore[override]
        x: Tensor, call: Call, requires_grad: bool, of: int | None, *_: Tensor
    ) -> Tensors:
        return _forward(call, x, requires_grad, of)[0], token_of(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.number = None
        _keep(ctx, inputs[1], output[1])


@kept_from_compilation  # a recorded operator would lose tangents
def _in_transforms(*inputs: Any) -> Tensors:
    return _RuleInTransforms.apply(*inputs)  # type: ignore[no-any-return, no-untyped-call]


def _keep(ctx: Any, call: Call, token: Tensor) -> None:
    ctx.call = call
    ctx.save_for_backward(token)
    ctx.save_for_forward(token)


def _check_gradient(adjoint: Operator, gradient: Tensor) -> None:
    if type(gradient) is not Tensor or gradient.layout is not torch.strided:
        with checking(adjoint.name, adjoint.group) as where:
            checked_tensor(gradient, f"{where.removesuffix(': ')}, in backward: ", "gradient")
    else:
        _refuse_batch(adjoint, gradient)


def _refuse_batch(operator: Operator, gradient: Tensor) -> None:
    """Raise ArgumentError for a batch of ``is_grads_batched``, which looks like one tensor."""
    if type(gradient) is Tensor and not transforms_active():
        try:
            gradient.data_ptr()
        except RuntimeError:
            refuse_vmap(f"{operator.name} on {operator.group}: is_grads_batched uses vmap; ")


def refuse_vmap(where: str) -> NoReturn:
    """Raise ArgumentError: a collective is not for batches of ``vmap``."""
    raise ArgumentError(
        f"{where}vmap, and with it jacrev, jacfwd and hessian, has no rule for communication. "
        "Loop over torch.func.vjp or jvp, in as many directions on every rank."
    )


# --- Derivatives of a call in flight have two nodes. In backward the node of the wait starts the
# adjoint, and the node of the start waits for it. All other derivatives communicate at once.


class _Flight:
    """An asynchronous call, shared by its two nodes in autograd's graph.

    In forward it is in flight from the start to the wait, in backward from the wait to the start.
    Meanwhile the tensor that it sends must not change.
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        self.sent: tuple[Call, Tensor, int, Pending] | None = None
        self.result: Tensor | None = None  # of a backward that communicated at once

    def begin(self, call: Call, x: Tensor, requires_grad: bool, of: int | None = None) -> None:
        pending = send(call, x, requires_grad, of, overlaps=True)
        if not pending.done:
            call.operator.group.in_flight.append(pending)
        self.sent = call, x, version_of(x), pending

    def wait(self, name: str, period: str) -> tuple[Tensor, int | None]:
        """Return the result, and the number of the call if ranks compare calls."""
        assert self.sent is not None
        call, x, version, pending = self.sent
        operator, error = call.operator, None
        if version_of(x) != version:
            where = "" if call is self.call else ", in backward"
            error = ArgumentError(
                f"{operator.name} on {operator.group}{where}: the {name} was changed in place "
                f"between {period}. Change a clone."
            )
        if pending.number is not None and debugging():
            from varcomm.transport.agreement import compare, fail

            what = f"wait for {operator.name}"
            if error is not None:
                fail(operator.group, what, error)
            compare(operator.group, {"operation": what, "which call": pending.number})
        if error is not None:
            raise error
        result = pending.wait().data
        self.sent = None  # only now: a refused wait is refused again
        return result, pending.number


class _Start(torch.autograd.Function):
    """Begin to communicate; in backward, wait for the adjoint. Returns the ticket for the wait."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: _Flight, requires_grad: bool) -> Tensor:
        ctx.flight = flight
        flight.begin(flight.call, x, requires_grad)
        return token_of(x)

    @staticmethod
    def backward(ctx: Any, of_ticket: Tensor) -> tuple[Tensor | None, None, None]:
        # tickets lead only from start to wait, so the backward of the wait has just run
        flight, result = ctx.flight, ctx.flight.result
        if flight.sent is not None:
            result, _ = flight.wait("gradient", "the backward of wait() and that of async_op=True")
        flight.result = None
        return result, None, None


class _Wait(torch.autograd.Function):
    """Wait for the result; in backward, begin the adjoint. Gradients reach `x` by the ticket."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ticket: Tensor, flight: _Flight) -> Tensors:
        result, ctx.number = flight.wait("tensor", "async_op=True and wait()")
        token = token_of(x)
        _keep(ctx, flight.call, token)
        ctx.flight = flight
        return result, token

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor, of_token: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None]:
        (token,) = ctx.saved_tensors
        flight, adjoint = ctx.flight, ctx.call.adjoint
        _check_gradient(adjoint.operator, gradient)
        if not ctx.needs_input_grad[1]:  # the call started under no_grad()
            return _differentiated(adjoint, gradient, (token, of_token), ctx.number)[0], None, None
        if is_recorded(gradient, (token, of_token)) or in_graph(gradient):
            result = _differentiated(adjoint, gradient, (token, of_token), ctx.number)
            flight.result = result[0]
        else:
            flight.begin(adjoint.in_one_round, gradient, False, ctx.number)
        return None, token.new_empty(0), None
