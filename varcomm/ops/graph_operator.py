"""Collectives in recorded graphs: of torch.compile, make_fx, torch.export and fake tensors.

There each class of operators is one operator of torch::

    varcomm::NAME(x, token, after, recorded, group, rank, ...fields) -> (result, token)

It is an effect, so that no compiler drops or moves it. `after` is the token of the call before,
which keeps the order in generated code. Whether autograd has `recorded` a call is known when it is
traced, not when it runs. Two ranks may share a cache of compiled code, so the rank is an argument.
The tokens in derivatives are those of :mod:`.handle`.
"""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from varcomm._torch_private import FunctionalTensorMode, register_effect
from varcomm.errors import ArgumentError
from varcomm.ops.checks import has_tangent, is_compilers, is_fake
from varcomm.ops.rule import Call, Operator, is_recorded, send

Kind = TypeVar("Kind", bound=type[Operator])
Tensors = tuple[Tensor, Tensor]


def records_graph() -> bool:
    """Return whether make_fx or torch.export records calls."""
    return get_proxy_mode() is not None


def in_graph(x: Tensor | None) -> bool:
    """Return whether calls on `x` are recorded or pretended; for None, whether they would be."""
    return torch.compiler.is_compiling() or is_traced(x)


def is_traced(x: Tensor | None) -> bool:
    """Return the same outside of code that torch.compile traces."""
    return records_graph() or is_compilers(torch.empty(0) if x is None else x)


def token_of(x: Tensor) -> Tensor:
    """Return a new token, on the device of `x`."""
    return x.new_empty(0, dtype=torch.float32)


def call_in_graph(
    operator: Operator, x: Tensor, recorded: bool, token: Tensor | None = None
) -> Tensors:
    """Apply the operator of a graph."""
    arguments = operator.arguments()
    if not (torch.compiler.is_compiling() or records_graph()) and hasattr(x, "fake_mode"):
        # beside a fake `x`, tensors must be fakes; a recorder makes constants of them by itself
        convert = x.fake_mode.from_tensor
        real = (isinstance(a, Tensor) and not is_fake(a) for a in arguments)
        arguments = tuple(convert(a) if r else a for a, r in zip(arguments, real, strict=True))
    op = getattr(torch.ops.varcomm, operator.name)
    return op(x, token, None, recorded, *arguments)  # type: ignore[no-any-return]


class _Library(torch.library.Library):
    """A library with kernels of autograd that refuse tangents, which torch would drop silently."""

    def impl(
        self, op_name: Any, fn: Any, dispatch_key: str = "", *args: Any, **options: Any
    ) -> None:
        """Register a kernel; register_autograd passes that of autograd."""
        if dispatch_key == "Autograd":
            fn = partial(_without_tangents, op_name, fn)
        super().impl(op_name, fn, dispatch_key, *args, **options)  # type: ignore[no-untyped-call]


def _without_tangents(name: str, kernel: Any, keys: object, x: Tensor, *rest: Any) -> Tensors:
    if has_tangent(x):
        raise ArgumentError(
            f"{name}: a recorded operator has no forward mode. Use torch.func.jvp of the function "
            "before it is compiled, exported or traced."
        )
    return kernel(keys, x, *rest)  # type: ignore[no-any-return]


_library: torch.library.Library = _Library("varcomm", "DEF")  # type: ignore[no-untyped-call]

_FIRST = "Tensor x, Tensor? token, Tensor? after, bool recorded"
_TYPES = {
    "bool": "bool",
    "int": "int",
    "torch.Tensor": "Tensor",
    "tuple[int, ...]": "SymInt[]",
}

# a replayed CUDA graph runs no Python
_TAGS = torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe


def torch_operator(kind: Kind) -> Kind:
    """Make the operator of torch for a class of operators."""
    if not hasattr(kind, "schema"):
        own = [field for field in fields(kind) if field.name != "group"]  # type: ignore[arg-type]
        kind.names = tuple(field.name for field in own)
        form = "".join(f", {_TYPES[str(field.type)]} {field.name}" for field in own)
        kind.schema = f"str group, int rank{form}"
    name, schema = kind.name, f"{_FIRST}, {kind.schema}"
    _library.define(f"{name}({schema}) -> (Tensor, Tensor)", tags=_TAGS)
    op = getattr(torch.ops.varcomm, name).default

    def forward(
        x: Tensor, token: object, after: object, recorded: bool, *arguments: Any
    ) -> Tensors:
        call = Call(kind.from_arguments(*arguments))
        return send(call, x, recorded).wait().data, token_of(x)

    def fake(x: Tensor, token: object, after: object, recorded: bool, *arguments: Any) -> Tensors:
        return kind.from_arguments(*arguments).result(x), token_of(x)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.operator, ctx.has_token = kind.from_arguments(*inputs[4:]), inputs[1] is not None
        ctx.save_for_backward(output[1])

    def backward(ctx: Any, gradient: Tensor, of_token: Tensor) -> tuple[Any, ...]:
        (token,) = ctx.saved_tensors
        token = token + of_token
        recorded = is_recorded(gradient, (token,))
        result, passed_on = call_in_graph(ctx.operator.adjoint, gradient, recorded, token)
        others = [None] * (len(ctx.needs_input_grad) - 2)
        return result, passed_on if ctx.has_token else None, *others

    def in_order(
        mode: FunctionalTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Tensors:
        # an effect keeps its place in the graph that torch 2.13 lowers, not in the generated code
        x, token, _, *others = args
        last = vars(mode).get("_varcomm_token")
        result: Tensors = mode.__torch_dispatch__(
            op, types, (x, token, last, *others), kwargs or {}
        )
        vars(mode)["_varcomm_token"] = result[1]
        return result

    _library.impl(name, forward, "CompositeExplicitAutograd")
    torch.library.register_fake(op, fake, lib=_library)
    torch.library.register_autograd(op, backward, setup_context=keep, lib=_library)
    register_effect(op)
    torch.library.register_torch_dispatch(
        f"varcomm::{name}", FunctionalTensorMode, in_order, lib=_library
    )
    return kind
