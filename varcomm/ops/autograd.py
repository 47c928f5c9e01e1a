"""The one autograd rule that all operators share: differentiate by applying the adjoint."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch.autograd.forward_ad as forward_ad

from varcomm.ops.batching import batch_last, compare_batches, of_batch, of_each
from varcomm.ops.checks import checked_tensor
from varcomm.ops.library import (
    apply_in_graph,
    begin_in_graph,
    in_graph,
    is_traced,
)
from varcomm.ops.operator import Operator, checking, started
from varcomm.transport.engine import Pending

__all__ = [
    "UNCOMPILED",
    "apply",
    "apply_with_token",
    "begin",
    "checked_gradient",
    "in_forward_mode",
    "is_recorded",
    "joined",
    "kept_from_compilation",
    "uncompiled",
]

# What torch.compile and torch.export say where they may not break a graph.
UNCOMPILED = "it runs as it is, between graphs; torch.export takes it with strict=False"

P = ParamSpec("P")
R = TypeVar("R")


def kept_from_compilation(fn: Callable[P, R]) -> Callable[P, R]:
    """Let torch.compile break its graph at `fn`, which it runs as it is."""
    return uncompiled(UNCOMPILED)(fn)


def uncompiled(reason: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let torch.compile break its graph at a function, and say why where it may not (fullgraph).

    Not by torch.compiler.disable, which would import the compiler into every program.
    """

    def decorate(fn: Callable[P, R]) -> Callable[P, R]:
        disabled: list[Callable[P, R]] = []

        @wraps(fn)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if "torch._dynamo" not in sys.modules:
                return fn(*args, **kwargs)
            if not disabled:
                disabled.append(torch._dynamo.disable(fn, reason=reason))
            return disabled[0](*args, **kwargs)

        # as torch.compiler.disable does at a function, so that the compiler does not look inside
        vars(call).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=reason)
        return call

    return decorate


def apply(operator: Operator, x: torch.Tensor) -> torch.Tensor:
    """Apply an operator, so that it can be differentiated."""
    if torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active():
        result, _ = apply_in_graph(operator, x, None)
    else:
        result, _ = apply_with_token(operator, x, None)
    return result


def apply_with_token(
    operator: Operator, x: torch.Tensor, token: torch.Tensor | None, of: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply an operator with the token of what it is a derivative of; return a token beside.

    In backward `of` is the number of the call that this is the derivative of, if ranks compare.
    """
    recorded = is_recorded(x, token)
    if torch._C._are_functorch_transforms_active():
        return _apply_in_transforms(x, token, operator, recorded)
    if recorded or _has_tangent(x) or (token is not None and _has_tangent(token)):
        return _Apply.apply(x, token, operator, recorded, of)  # type: ignore[no-any-return, no-untyped-call]
    return _applied(operator, x, recorded, of)[0], x.new_empty(0, dtype=torch.float32)


@kept_from_compilation
def _apply_in_transforms(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply, where transforms of ``torch.func`` are compiled as well.

    Torch operators have no rules for them: forward mode would be wrong without a word, and vmap
    would send a message for each entry of a batch.
    """
    return _ApplyInTransforms.apply(*inputs)  # type: ignore[no-any-return, no-untyped-call]


def _has_tangent(x: torch.Tensor) -> bool:
    return forward_ad.unpack_dual(x).tangent is not None


def _applied(
    operator: Operator, x: torch.Tensor, recorded: bool, of: int | None = None
) -> tuple[torch.Tensor, int | None]:
    """Return the result, and the number of the call if ranks compare."""
    if is_traced(x):
        return apply_in_graph(operator, x, None)[0], None
    pending = started(operator, x, recorded, of)
    # as a tensor of its own, though memory may be a view's: whoever gets it may write into it
    return pending.wait().data, pending.number


class _Apply(torch.autograd.Function):
    """Apply an operator; differentiate it by applying the adjoint.

    Beside its result it returns a *token*, an empty tensor that the graph connects to the input.
    The adjoint that backward applies takes it as a second input; so does the operator that forward
    mode applies to a tangent. So the second derivative is recorded on all ranks or on none, even
    where a gradient or a tangent on one rank does not depend on anything (a loss that is linear
    there, or none at all), and no rank waits for a peer that has nothing to differentiate. The
    derivative of a token is the token of what was applied, so that the third derivative and all
    others go through the same calls on all ranks as well.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        token: torch.Tensor | None,
        operator: Operator,
        recorded: bool,
        of: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        result, number = _applied(operator, x, recorded, of)
        of_result = x.new_empty(0, dtype=torch.float32)
        _keep(ctx, token, operator, of_result, number)
        return result, of_result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient, of_token = gradients
        (token,) = ctx.saved_tensors
        adjoint = ctx.operator.adjoint
        checked_gradient(adjoint, gradient)
        result, passed_on = apply_with_token(adjoint, gradient, token + of_token, ctx.number)
        return result, passed_on if ctx.has_token else None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        tangent, of_token, *_ = tangents
        (token,) = ctx.saved_tensors
        assert tangent is not None
        return apply_with_token(ctx.operator, tangent, joined(token, of_token))

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, x: torch.Tensor, token: Any, operator: Operator, *_: Any
    ) -> tuple[Any, Any]:
        size = info.batch_size
        compare_batches(operator.name, operator.group, size, x)
        batch = batch_last(x, in_dims[0], size)
        of_token = of_batch(token, in_dims[1])
        result, passed_on = apply_with_token(operator.batched(size), batch, of_token)
        return (result, of_each(passed_on, size)), (result.dim() - 1, 1)


def checked_gradient(adjoint: Operator, gradient: torch.Tensor) -> None:
    """Raise ArgumentError if what `adjoint` is to be applied to in backward is not dense."""
    with checking(adjoint.name, adjoint.group) as where:
        checked_tensor(gradient, f"{where.removesuffix(': ')}, in backward: ", "gradient")


class _ApplyInTransforms(_Apply):
    """The same in the form that ``torch.func`` asks for, which costs three times as much."""

    @staticmethod
    def forward(  # type: ignore[override]
        x: torch.Tensor, token: torch.Tensor | None, operator: Operator, recorded: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return _applied(operator, x, recorded)[0], x.new_empty(0, dtype=torch.float32)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        _keep(ctx, inputs[1], inputs[2], output[1])


def _keep(
    ctx: Any,
    token: torch.Tensor | None,
    operator: Operator,
    of_result: torch.Tensor,
    number: int | None = None,
) -> None:
    ctx.operator, ctx.number = operator, number
    ctx.has_token = token is not None
    ctx.save_for_backward(of_result)
    ctx.save_for_forward(of_result)


def joined(token: torch.Tensor, of_token: torch.Tensor | None) -> torch.Tensor:
    """Return a token that depends on both; within a ``jvp``, as :func:`in_forward_mode` says."""
    if of_token is None:
        return token
    with forward_ad._set_fwd_grad_enabled(True):
        return token + of_token


def in_forward_mode(jvp: Callable[..., R]) -> Callable[..., R]:
    """Let what a ``jvp`` computes be differentiated in forward mode again.

    It is given what `ctx` saved, as a second argument.

    torch turns forward mode off in the ``jvp`` of a Function. Inside of ``torch.func.jvp`` it is
    then off for the transforms around that as well, and their derivatives would lack what torch's
    own operations do there. Turned on, the saved inputs must not bring along tangents of their own.
    """

    @wraps(jvp)
    def call(ctx: Any, *tangents: torch.Tensor | None) -> R:
        saved = ctx.saved_tensors
        if not torch._C._are_functorch_transforms_active():
            return jvp(ctx, saved, *tangents)
        with forward_ad._set_fwd_grad_enabled(True):
            plain = [None if x is None else forward_ad.unpack_dual(x).primal for x in saved]
            return jvp(ctx, plain, *tangents)

    return call


def begin(operator: Operator, x: torch.Tensor, recorded: bool, of: int | None = None) -> Pending:
    """Start to communicate, or write into the graph that is being recorded that it starts."""
    if in_graph(x):
        return begin_in_graph(operator, x)
    return started(operator, x, recorded, of)


def is_recorded(x: torch.Tensor, token: torch.Tensor | None) -> bool:
    """Tell whether what is applied to `x` belongs to the graph."""
    return torch.is_grad_enabled() and (
        x.requires_grad or (token is not None and token.requires_grad)
    )
