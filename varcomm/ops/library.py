"""Operators of torch.library, for what records a graph before it runs it.

torch.compile, make_fx, torch.export and fake tensors cannot look into a message on a wire. For them
each :class:`~varcomm.ops.operator.Operator` is three torch operators:

``varcomm::NAME(x, token, ...) -> (result, token)``
    communicates and waits. Tokens are those of :mod:`varcomm.ops.autograd`.
``varcomm::NAME_start(x, token, ...) -> (ticket, promise)``
    begins to. The ticket holds the number under which this process keeps what is under way. The
    promise has the shape of the result, and memory for one element.
``varcomm::NAME_wait(x, ticket, promise, ...) -> (result, token)``
    ends it. It takes `x` so that its memory is not used for something else before.

What is moved, and how, is said once, in ``Operator.start``, which these run as calls outside of
graphs do. Here is only what a graph needs beside it: a schema, made of the operator's fields, with
the group by its name; a fake kernel, which is ``Operator.result``; a formula for autograd. All are
effects in one order, so that a compiler neither drops nor reorders them: other ranks wait for them.
The rank is an argument as well: graphs of two ranks differ, and so must the keys under which
compiled code is cached.

The gradient of a ticket is the ticket of the adjoint, and that of a promise is the gradient that
the adjoint has to move. So the backward of a wait starts the adjoint, the backward of a start waits
for it, and a compiler sees what may run between the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from itertools import count
from typing import Any, TypeVar

import torch
import torch.autograd.forward_ad as forward_ad
from torch._library.autograd import Info, make_autograd_impl
from torch._library.effects import EffectType
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from varcomm.errors import ArgumentError
from varcomm.ops.inductor import keep_order
from varcomm.ops.operator import Operator, started
from varcomm.transport.engine import Pending

__all__ = [
    "Meanwhile",
    "apply_in_graph",
    "begin_in_graph",
    "fake_mode",
    "in_graph",
    "is_traced",
    "not_before",
    "refuse_linearize",
    "start_in_graph",
    "torch_operator",
    "wait_in_graph",
]

Kind = TypeVar("Kind", bound=type[Operator])
Tensors = tuple[torch.Tensor, torch.Tensor]

_library = torch.library.Library("varcomm", "DEF")

# How the types of an operator's fields are called in a schema.
_TYPES = {
    "bool": "bool",
    "int": "int",
    "torch.Tensor": "Tensor",
    "torch.memory_format": "MemoryFormat",
    "tuple[int, ...]": "SymInt[]",
}

# Results keep the memory format of what comes in; a replayed CUDA graph runs no Python, where
# messages are counted, compared, and waited for.
_TAGS = (
    torch.Tag.pt2_compliant_tag,
    torch.Tag.needs_exact_strides,
    torch.Tag.cudagraph_unsafe,
)

# All classes of operators that have been made torch operators.
KINDS: list[type[Operator]] = []

# What has been started in a graph and not yet been waited for.
_under_way: dict[int, Pending] = {}
_numbers = count(1)


def is_traced(x: torch.Tensor | None) -> bool:
    """Tell whether what happens to `x` is recorded, or only pretended: nothing can travel then.

    Of None, whether it would be.
    """
    if _is_recorded():
        return True
    if x is None:
        return fake_mode() is not None
    return isinstance(x, (FakeTensor, FunctionalTensor))


def fake_mode() -> object:
    """Return the FakeTensorMode that is entered, or None."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


def _is_recorded() -> bool:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def in_graph(x: torch.Tensor | None) -> bool:
    """Tell whether a graph is being recorded, by torch.compile or as :func:`is_traced` tells."""
    return torch.compiler.is_compiling() or is_traced(x)


def refuse_linearize(where: str, what: str) -> None:
    """Raise ArgumentError if ``torch.func.linearize`` records.

    It computes once what does not depend on the tangents, also tensors that `what` writes into:
    the first call of what it returns would change them for the next.
    """
    if torch.compiler.is_compiling() or forward_ad._current_level < 0 or not _is_recorded():
        return
    if not torch._C._are_functorch_transforms_active():
        raise ArgumentError(
            f"{where}torch.func.linearize keeps tensors that {what} write into, and its result "
            "would be wrong when called twice. Take torch.func.jvp."
        )


def apply_in_graph(operator: Operator, x: torch.Tensor, token: torch.Tensor | None) -> Tensors:
    """Record that the operator is applied; return the result and its token."""
    call = getattr(torch.ops.varcomm, operator.name)
    return call(x, token, *_arguments(operator, x))  # type: ignore[no-any-return]


def start_in_graph(operator: Operator, x: torch.Tensor, token: torch.Tensor | None) -> Tensors:
    """Record that the operator begins; return ticket and promise."""
    call = getattr(torch.ops.varcomm, f"{operator.name}_start")
    return call(x, token, *_arguments(operator, x))  # type: ignore[no-any-return]


def wait_in_graph(
    operator: Operator, x: torch.Tensor, ticket: torch.Tensor, promise: torch.Tensor | None
) -> Tensors:
    """Record that what has begun is waited for; return the result and its token."""
    call = getattr(torch.ops.varcomm, f"{operator.name}_wait")
    return call(x, ticket, promise, *_arguments(operator, x))  # type: ignore[no-any-return]


def _arguments(operator: Operator, x: torch.Tensor) -> tuple[Any, ...]:
    """Return the operator as a graph holds it; its tensors are fakes where `x` is no more."""
    arguments = operator.arguments()
    if torch.compiler.is_compiling() or _is_recorded() or not isinstance(x, FakeTensor):
        return arguments  # what records it makes constants of its own of them
    convert = x.fake_mode.from_tensor
    plain = (isinstance(a, torch.Tensor) and not isinstance(a, FakeTensor) for a in arguments)
    return tuple(convert(a) if p else a for a, p in zip(arguments, plain, strict=True))


def begin_in_graph(operator: Operator, x: torch.Tensor) -> Pending:
    """Record both, for those who begin and wait outside of graphs as well."""
    ticket, promise = start_in_graph(operator, x, None)
    return Pending([], lambda: wait_in_graph(operator, x, ticket, promise)[0])


def torch_operator(kind: Kind) -> Kind:
    """Make the three torch operators of a class of operators."""
    if not hasattr(kind, "schema"):
        own = [field for field in fields(kind) if field.name != "group"]  # type: ignore[arg-type]
        kind.names = tuple(field.name for field in own)
        form = "".join(f", {_TYPES[str(field.type)]} {field.name}" for field in own)
        kind.schema = f"str group, int rank{form}"
    for suffix, inputs, (run, fake, keep, differentiate) in (
        ("", "Tensor x, Tensor? token", _whole(kind)),
        ("_start", "Tensor x, Tensor? token", _start(kind)),
        ("_wait", "Tensor x, Tensor ticket, Tensor? promise", _wait(kind)),
    ):
        name = kind.name + suffix
        _library.define(f"{name}({inputs}, {kind.schema}) -> (Tensor, Tensor)", tags=_TAGS)
        _library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"varcomm::{name}", _in_order(name, fake), lib=_library)
        formula = make_autograd_impl(
            getattr(torch.ops.varcomm, name).default, Info(differentiate, keep)
        )
        _library.impl(name, _without_tangents(name, formula), "Autograd", with_keyset=True)
        torch.library._register_effectful_op(f"varcomm::{name}", EffectType.ORDERED)
    KINDS.append(kind)
    return kind


@torch.library.custom_op("varcomm::not_before", mutates_args=())
def not_before(ticket: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a copy of `ticket` that a graph knows only when it knows `value`.

    A compiler may compute things in any order in which each comes after what it is made of, and
    would wait at once for what has begun. With this the wait comes after what is to overlap.
    """
    return ticket.clone()


not_before.register_fake(lambda ticket, value: torch.empty_like(ticket))
not_before.register_autograd(lambda ctx, of_ticket: (of_ticket, None))


class Meanwhile(torch.autograd.Function):
    """A tensor and a ticket, the same; in backward, the ticket is known after the gradient is."""

    @staticmethod
    def forward(x: torch.Tensor, ticket: torch.Tensor) -> Tensors:
        return x.view_as(x), ticket.view_as(ticket)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        """Keep nothing."""

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Tensors:
        gradient, of_ticket = gradients
        return gradient, not_before(of_ticket, gradient)


Functions = tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any], Callable[..., Any]]


def _whole(kind: type[Operator]) -> Functions:
    """Return kernel, fake kernel, and the two parts of autograd's formula."""

    def run(x: torch.Tensor, token: torch.Tensor | None, *arguments: Any) -> Tensors:
        operator = kind.from_arguments(*arguments)
        return started(operator, x, recorded=False).wait(), _token(x)

    def fake(x: torch.Tensor, token: torch.Tensor | None, *arguments: Any) -> Tensors:
        return kind.from_arguments(*arguments).result(x), _token(x)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.operator, ctx.has_token = kind.from_arguments(*inputs[2:]), inputs[1] is not None
        ctx.save_for_backward(output[1])

    def differentiate(ctx: Any, gradient: torch.Tensor, of_token: torch.Tensor) -> tuple[Any, ...]:
        (token,) = ctx.saved_tensors
        result, passed_on = apply_in_graph(ctx.operator.adjoint, gradient, token + of_token)
        return _gradients(ctx, result, passed_on if ctx.has_token else None)

    return run, fake, keep, differentiate


def _start(kind: type[Operator]) -> Functions:
    def run(x: torch.Tensor, token: torch.Tensor | None, *arguments: Any) -> Tensors:
        operator = kind.from_arguments(*arguments)
        number = next(_numbers)
        _under_way[number] = started(operator, x, recorded=False)
        ticket = torch.full((), number, dtype=torch.float64)
        return ticket, _promise(operator, x)

    def fake(x: torch.Tensor, token: torch.Tensor | None, *arguments: Any) -> Tensors:
        ticket = torch.empty((), dtype=torch.float64)
        return ticket, _promise(kind.from_arguments(*arguments), x)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.operator, ctx.has_token = kind.from_arguments(*inputs[2:]), inputs[1] is not None
        ctx.set_materialize_grads(False)

    def differentiate(
        ctx: Any, ticket: torch.Tensor | None, gradient: torch.Tensor | None
    ) -> tuple[Any, ...]:
        if ticket is None or gradient is None:  # the wait was given no promise, and has done all
            return _gradients(ctx, None, None)
        result, passed_on = wait_in_graph(ctx.operator.adjoint, gradient, ticket, None)
        return _gradients(ctx, result, passed_on if ctx.has_token else None)

    return run, fake, keep, differentiate


def _wait(kind: type[Operator]) -> Functions:
    def run(
        x: torch.Tensor, ticket: torch.Tensor, promise: torch.Tensor | None, *arguments: Any
    ) -> Tensors:
        pending = _under_way.pop(int(ticket), None)
        if pending is None:
            raise ArgumentError(
                f"{kind.name}_wait on rank {arguments[1]}: ticket {ticket.item()} is of nothing "
                "under way. Wait once for each start."
            )
        return pending.wait(), _token(x)

    def fake(
        x: torch.Tensor, ticket: torch.Tensor, promise: torch.Tensor | None, *arguments: Any
    ) -> Tensors:
        return kind.from_arguments(*arguments).result(x), _token(x)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.operator, ctx.has_promise = kind.from_arguments(*inputs[3:]), inputs[2] is not None
        ctx.save_for_backward(output[1])

    def differentiate(ctx: Any, gradient: torch.Tensor, of_token: torch.Tensor) -> tuple[Any, ...]:
        (token,) = ctx.saved_tensors
        adjoint, token = ctx.operator.adjoint, token + of_token
        if not ctx.has_promise or not ctx.needs_input_grad[2]:
            # no other node could wait
            return _gradients(ctx, apply_in_graph(adjoint, gradient, token)[0], None, None)
        ticket, _ = start_in_graph(adjoint.in_one_round, gradient, token)
        return _gradients(ctx, None, ticket, gradient)

    return run, fake, keep, differentiate


def _in_order(name: str, fake: Callable[..., Tensors]) -> Callable[..., Tensors]:
    """Return a fake kernel at whose first call a compiler is told how to keep our order."""

    def called(*arguments: Any) -> Tensors:
        keep_order(getattr(torch.ops.varcomm, name).default)
        return fake(*arguments)

    return called


def _without_tangents(name: str, formula: Callable[..., Tensors]) -> Callable[..., Tensors]:
    """Return the formula, which torch would let drop tangents: an operator has no rule for them."""

    def called(keys: torch._C.DispatchKeySet, x: torch.Tensor, *arguments: Any) -> Tensors:
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
            raise ArgumentError(
                f"{name}: what was recorded has no forward mode. Take torch.func.jvp of the "
                "function before it is compiled, exported or traced."
            )
        return formula(keys, x, *arguments)

    return called


def _token(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(0, dtype=torch.float32)


def _promise(operator: Operator, x: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the shape of the result, so that autograd lets a gradient through."""
    dtype = x.dtype if x.is_floating_point() or x.is_complex() else torch.float32
    return x.new_zeros((), dtype=dtype).expand(operator.result(x).shape)


def _gradients(ctx: Any, *of_tensors: torch.Tensor | None) -> tuple[Any, ...]:
    return (*of_tensors, *[None] * (len(ctx.needs_input_grad) - len(of_tensors)))
