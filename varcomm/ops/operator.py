"""A collective as a linear operator, and the one rule by which all operators are differentiated.

A primitive is a pair of :class:`Operator` classes, each the other's adjoint. This module derives
everything else from the pair: derivatives of any order, forward mode, operators of torch.library
for graphs that are recorded before they run, comparison between ranks, the range in the profiler.

The rule: the derivative of an operator is the operator, and its backward applies the adjoint.
Beside its result every application returns a *token*, an empty tensor that autograd connects to the
input. A backward passes the token on to the adjoint that it applies, and forward mode to the
operator that it applies to a tangent. So a second derivative is recorded on all ranks or on none,
even if the gradient on one rank depends on nothing, and no rank waits for a peer that has nothing
to differentiate. The derivative of a token is the token of the applied operator: derivatives of
any order go through the same calls on all ranks.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial, wraps
from typing import Any, ClassVar, NoReturn, Self, TypeVar

import torch
import torch.autograd.forward_ad as forward_ad
from torch._library.autograd import Info, make_autograd_impl
from torch._library.effects import EffectType
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

from varcomm.errors import ArgumentError, CommunicationError, DisagreementError
from varcomm.ops.checks import checked_flag, checked_tensor
from varcomm.ops.compilation import kept_from_compilation
from varcomm.sizes import ShardSizes
from varcomm.transport.debug import debugging
from varcomm.transport.engine import EngineFailure, Pending, engine_for, span
from varcomm.transport.group import Group, named

__all__ = [
    "Operator",
    "apply",
    "apply_with_token",
    "begin",
    "checked_gradient",
    "checking",
    "fake_mode",
    "in_forward_mode",
    "in_graph",
    "is_recorded",
    "is_traced",
    "known",
    "refuse_linearize",
    "refuse_vmap",
    "started",
    "torch_operator",
]

R = TypeVar("R")
Kind = TypeVar("Kind", bound=type["Operator"])
Kept = TypeVar("Kept", bound="Operator")
Tensors = tuple[torch.Tensor, torch.Tensor]


class Operator(ABC):
    """A linear map between the tensors of all ranks before and after a collective.

    Subclasses are frozen dataclasses that hold the group and all that the map depends on.
    """

    name: ClassVar[str]
    schema: ClassVar[str]  # of its arguments in a graph
    names: ClassVar[tuple[str, ...]]  # of the fields that are arguments there
    group: Group

    @abstractmethod
    def start(self, x: torch.Tensor) -> Pending:
        """Begin to communicate; return this rank's part of the result, once it is waited for."""

    @abstractmethod
    def result(self, x: torch.Tensor) -> torch.Tensor:
        """Return an uninitialised tensor with the metadata of the result."""

    @property
    @abstractmethod
    def adjoint(self) -> Operator:
        """The transposed map, for the inner product summed over ranks."""

    @property
    def in_one_round(self) -> Self:
        """The same map with all its messages in flight once it has started, for Handles."""
        return self

    @abstractmethod
    def describe(self, x: torch.Tensor) -> dict[str, Any]:
        """Return the mapping that :func:`~varcomm.transport.agreement.compare` compares."""

    def arguments(self) -> tuple[Any, ...]:
        """Return the operator's arguments in a graph, in the order of `schema`."""
        return self.group.name, self.group.rank, *(_plain(getattr(self, n)) for n in self.names)

    @classmethod
    def from_arguments(cls, group: str, rank: int, *fields: Any) -> Self:
        """Return the operator of these arguments."""
        return cls(named(group, rank), *map(_plain, fields))  # type: ignore[call-arg]


def _plain(value: Any) -> Any:
    # schemas and Dynamo take tuples of no class of their own
    return tuple(value) if isinstance(value, list | tuple) else value


# --- The checks of a call -------------------------------------------------------------------------


class checking:
    """Surround the checks of a call's arguments; gives how their messages start.

    `flags` must be bools, before anything else: torch.distributed has a group or a ReduceOp at some
    of their positions. Inside :func:`varcomm.debug`, an argument that is wrong on this rank is an
    error on all.
    """

    def __init__(self, name: str, group: Group, **flags: bool) -> None:
        self.name, self.group, self.flags = name, group, flags

    def __enter__(self) -> str:
        where = f"{self.name} on {self.group.label}: "
        try:
            if _is_jit_tracing():
                raise ArgumentError(
                    f"{where}torch.jit.trace would record what this rank sends as constants. Use "
                    "torch.compile, torch.export or make_fx, which record an operator."
                )
            for flag, value in self.flags.items():
                checked_flag(value, flag, where)
        except ArgumentError as error:
            self._tell(error)
            raise
        return where

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._tell(error)

    def _tell(self, error: BaseException | None) -> None:
        told = isinstance(error, DisagreementError | CommunicationError)  # all ranks raise these
        if isinstance(error, Exception) and not told and debugging():
            from varcomm.transport.agreement import fail

            fail(self.group, self.name, error)


def _is_jit_tracing() -> bool:
    return torch.jit.is_tracing()  # type: ignore[attr-defined, no-any-return, no-untyped-call]


def checked_gradient(adjoint: Operator, gradient: torch.Tensor) -> None:
    """Raise ArgumentError if the gradient that arrives in backward is not dense."""
    if type(gradient) is not torch.Tensor or gradient.layout is not torch.strided:
        with checking(adjoint.name, adjoint.group) as where:
            checked_tensor(gradient, f"{where.removesuffix(': ')}, in backward: ", "gradient")


_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
_SIZES = frozenset((ShardSizes, tuple, list))
_INT = frozenset((int,))
_PLAIN = frozenset((int, bool))
_MOST = 64  # operators that a group or plan keeps

_dispatch_mode = torch._C._get_dispatch_mode
_FAKE, _PROXY = torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY


def known(
    make: Callable[..., Kept], owner: Any, x: torch.Tensor, sizes: Sequence[int], *rest: Any
) -> Kept:
    """Return ``make(owner, x, sizes, *rest)``, kept by the owner for calls with equal arguments.

    `make` checks the arguments, so that a known call needs no checks; the owner is a group or plan.
    """
    if (
        torch.compiler.is_compiling()
        or type(x) not in _TENSORS
        or x.is_nested
        or _dispatch_mode(_PROXY)
    ):
        return make(owner, x, sizes, *rest)
    numbers = tuple(sizes) if type(sizes) in _SIZES else (None,)
    if not (_INT.issuperset(map(type, numbers)) and _PLAIN.issuperset(map(type, rest))):
        return make(owner, x, sizes, *rest)
    # torch.jit.trace makes tensors of the numbers in a shape: no key equals another there
    kept: dict[Any, Kept] = vars(owner).setdefault("operators", {})
    key = make, numbers, *rest, *map(type, rest), x.shape, x.dtype, x.device, x.layout
    operator = kept.get(key)
    if operator is None:
        operator = make(owner, x, sizes, *rest)
        if len(kept) >= _MOST:
            kept.clear()
        kept[key] = operator
    return operator


# --- The rule -------------------------------------------------------------------------------------


def apply(operator: Operator, x: torch.Tensor) -> torch.Tensor:
    """Apply an operator, differentiably."""
    if torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active():
        return _recorded(operator, x, None)[0]
    return _apply(operator, x, (), None)[0]


def apply_with_token(
    operator: Operator, x: torch.Tensor, *tokens: torch.Tensor | None, of: int | None = None
) -> Tensors:
    """Apply an operator with the tokens of the call whose derivative this is; return its token.

    In backward `of` is the number of the call that this is the derivative of, if ranks compare
    calls.
    """
    given = tuple(token for token in tokens if token is not None)
    result, token = _apply(operator, x, given, of)
    return result, x.new_empty(0, dtype=torch.float32) if token is None else token


def _apply(
    operator: Operator, x: torch.Tensor, tokens: tuple[torch.Tensor, ...], of: int | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    recorded = is_recorded(x, *tokens)
    if torch._C._are_functorch_transforms_active():
        return _apply_in_transforms(x, operator, recorded, of, *tokens)
    if recorded or forward_ad.unpack_dual(x).tangent is not None:
        return _Rule.apply(x, operator, recorded, of, *tokens)  # type: ignore[no-any-return, no-untyped-call]
    return _run(operator, x, recorded, of)[0], None


def is_recorded(x: torch.Tensor, *tokens: torch.Tensor | None) -> bool:
    """Return whether the result of a call belongs to the graph."""
    if not torch.is_grad_enabled() or x.requires_grad or not tokens:
        return torch.is_grad_enabled() and x.requires_grad
    return any(token is not None and token.requires_grad for token in tokens)


class _Rule(torch.autograd.Function):
    """Apply an operator; differentiate it by applying the adjoint."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        operator: Operator,
        recorded: bool,
        of: int | None,
        *tokens: torch.Tensor,
    ) -> Tensors:
        result, number = _run(operator, x, recorded, of)
        token = x.new_empty(0, dtype=torch.float32)
        _keep(ctx, operator, token, number)
        return result, token

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, of_token: torch.Tensor) -> tuple[Any, ...]:
        (token,) = ctx.saved_tensors
        adjoint = ctx.operator.adjoint
        checked_gradient(adjoint, gradient)
        result, passed_on = apply_with_token(adjoint, gradient, token, of_token, of=ctx.number)
        return result, None, None, None, *[passed_on] * (len(ctx.needs_input_grad) - 4)

    @staticmethod
    def jvp(
        ctx: Any, tangent: torch.Tensor, _: None, __: None, ___: None, *of_tokens: Any
    ) -> Tensors:
        (token,) = ctx.saved_tensors
        return apply_with_token(ctx.operator, tangent, token, *of_tokens)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, operator: Operator, *_: Any) -> Any:
        refuse_vmap(f"{operator.name} on {operator.group}: ")


class _RuleInTransforms(_Rule):
    """The same in the form that ``torch.func`` asks for, which costs three times as much."""

    @staticmethod
    def forward(  # type: ignore[override]
        x: torch.Tensor,
        operator: Operator,
        recorded: bool,
        of: int | None,
        *tokens: torch.Tensor,
    ) -> Tensors:
        return _run(operator, x, recorded, of)[0], x.new_empty(0, dtype=torch.float32)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        _keep(ctx, inputs[1], output[1], None)


@kept_from_compilation
def _apply_in_transforms(*inputs: Any) -> Tensors:
    """Apply, also where transforms of ``torch.func`` are compiled, for which a graph has no rules.

    A recorded operator would lose tangents without an error.
    """
    return _RuleInTransforms.apply(*inputs)  # type: ignore[no-any-return, no-untyped-call]


def _keep(ctx: Any, operator: Operator, token: torch.Tensor, number: int | None) -> None:
    ctx.operator, ctx.number = operator, number
    ctx.save_for_backward(token)
    ctx.save_for_forward(token)


def _run(
    operator: Operator, x: torch.Tensor, recorded: bool, of: int | None
) -> tuple[torch.Tensor, int | None]:
    """Return the result, and the number of the call if ranks compare calls."""
    if is_traced(x):
        return _recorded(operator, x, None)[0], None
    pending = started(operator, x, recorded, of)
    # as a tensor of its own, though its memory may be a view's: the caller may write into it
    return pending.wait().data, pending.number


def started(operator: Operator, x: torch.Tensor, recorded: bool, of: int | None = None) -> Pending:
    """Start to communicate; inside :func:`varcomm.debug`, after ranks have compared the call."""
    number = _compared(operator, x, recorded, of) if debugging() else None
    failed = partial(_failed, operator, x.dtype, x.shape, time.monotonic())
    try:
        with span(operator.name):
            pending = operator.start(x)
    except EngineFailure as error:  # in the first of several rounds
        raise failed(error) from error.__cause__
    pending.number, pending.failed = number, failed
    return pending


def _compared(operator: Operator, x: torch.Tensor, recorded: bool, of: int | None) -> int:
    from varcomm.transport.agreement import compare  # needed inside debug() only

    with checking(operator.name, operator.group):
        engine_for(operator.group, x.device)
    call = {"operation": operator.name, **operator.describe(x)}
    more = {"dtype": str(x.dtype), "device": x.device.type, "requires_grad": recorded}
    if of is not None:
        more["backward of call"] = of
    return compare(operator.group, call | more)


def _failed(
    operator: Operator, dtype: torch.dtype, shape: torch.Size, began: float, error: EngineFailure
) -> CommunicationError:
    from varcomm.transport.failure import failure

    described = operator.describe(torch.empty(shape, dtype=dtype, device="meta"))
    held = ", ".join(f"{word} {value}" for word, value in described.items())
    kind = str(dtype).removeprefix("torch.")
    details = f"It is of {kind} {list(shape)} here, with {held}. "
    return failure(operator.name, operator.group, began, error, details)


def begin(operator: Operator, x: torch.Tensor, recorded: bool) -> Pending:
    """Start to communicate, for rules that are written elsewhere; in a graph, apply at once."""
    if in_graph(x):
        result = _recorded(operator, x, None)[0]
        return Pending([], lambda: result)
    return started(operator, x, recorded)


def in_forward_mode(jvp: Callable[..., R]) -> Callable[..., R]:
    """Let torch's own operations within a ``jvp`` be differentiated in forward mode again.

    The ``jvp`` is given the tensors that `ctx` saved, as a second argument. torch turns forward
    mode off in it: inside ``torch.func.jvp``, for the transforms around that as well. Turned on,
    saved inputs must not have tangents of their own.
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


# --- What has no rule -----------------------------------------------------------------------------


def refuse_vmap(where: str) -> NoReturn:
    """Raise ArgumentError: a collective is not for batches of ``vmap``."""
    raise ArgumentError(
        f"{where}vmap, and with it jacrev, jacfwd and hessian, has no rule for communication. "
        "Loop over torch.func.vjp or jvp, in as many directions on every rank."
    )


def refuse_linearize(where: str, writers: str) -> None:
    """Raise ArgumentError if ``torch.func.linearize`` records.

    It computes once all that does not depend on the tangents, also tensors that `writers` write
    into: the first call of its result would change them for the next.
    """
    if torch.compiler.is_compiling() or forward_ad._current_level < 0 or not _dispatch_mode(_PROXY):
        return
    if not torch._C._are_functorch_transforms_active():
        raise ArgumentError(
            f"{where}torch.func.linearize keeps tensors that {writers} write into, and its result "
            "would be wrong when called twice. Use torch.func.jvp."
        )


# --- Graphs: operators of torch.library -----------------------------------------------------------

# torch.compile, make_fx, torch.export and fake tensors cannot look into a message on a wire. For
# them each class of operators is one torch operator,
#
#     varcomm::NAME(x, token, after, group, rank, ...fields) -> (result, token)
#
# Its kernel is `Operator.start`, its fake kernel `Operator.result`, its backward the rule above. It
# is an effect, so that no compiler drops it or changes its place in a graph: other ranks wait for
# it. `after` is the token of the call before, in a graph that a compiler lowers: a plain dependency
# that keeps the order in generated code too. The rank is an argument because graphs of two ranks
# differ, and with them the keys under which compiled code is cached.

_library = torch.library.Library("varcomm", "DEF")

# The types of an operator's fields in a schema.
_TYPES = {
    "bool": "bool",
    "int": "int",
    "torch.Tensor": "Tensor",
    "torch.memory_format": "MemoryFormat",
    "tuple[int, ...]": "SymInt[]",
}

# Results keep the memory format of their input; a replayed CUDA graph runs no Python, which counts,
# compares and waits for messages.
_TAGS = (
    torch.Tag.pt2_compliant_tag,
    torch.Tag.needs_exact_strides,
    torch.Tag.cudagraph_unsafe,
)


def is_traced(x: torch.Tensor | None) -> bool:
    """Return whether calls on `x` are recorded or pretended; for None, whether they would be."""
    if _dispatch_mode(_PROXY) is not None:
        return True
    if x is None:
        return fake_mode() is not None
    return isinstance(x, (FakeTensor, FunctionalTensor))


def fake_mode() -> object:
    """Return the FakeTensorMode that is entered, or None."""
    return _dispatch_mode(_FAKE)


def in_graph(x: torch.Tensor | None) -> bool:
    """Return whether a graph is recorded, by torch.compile or as :func:`is_traced` tells."""
    return torch.compiler.is_compiling() or is_traced(x)


def _recorded(operator: Operator, x: torch.Tensor, token: torch.Tensor | None) -> Tensors:
    call = getattr(torch.ops.varcomm, operator.name)
    return call(x, token, None, *_arguments(operator, x))  # type: ignore[no-any-return]


def _arguments(operator: Operator, x: torch.Tensor) -> tuple[Any, ...]:
    """Return the operator as a graph holds it; its tensors are fakes if only `x` is one."""
    arguments = operator.arguments()
    if torch.compiler.is_compiling() or _dispatch_mode(_PROXY) or not isinstance(x, FakeTensor):
        return arguments  # a recorder makes constants of its own of them
    convert = x.fake_mode.from_tensor
    plain = (isinstance(a, torch.Tensor) and not isinstance(a, FakeTensor) for a in arguments)
    return tuple(convert(a) if p else a for a, p in zip(arguments, plain, strict=True))


def torch_operator(kind: Kind) -> Kind:
    """Make the torch operator of a class of operators."""
    if not hasattr(kind, "schema"):
        own = [field for field in fields(kind) if field.name != "group"]  # type: ignore[arg-type]
        kind.names = tuple(field.name for field in own)
        form = "".join(f", {_TYPES[str(field.type)]} {field.name}" for field in own)
        kind.schema = f"str group, int rank{form}"
    name, schema = kind.name, f"Tensor x, Tensor? token, Tensor? after, {kind.schema}"
    _library.define(f"{name}({schema}) -> (Tensor, Tensor)", tags=_TAGS)
    op = getattr(torch.ops.varcomm, name).default

    def run(x: torch.Tensor, token: object, after: object, *arguments: Any) -> Tensors:
        pending = started(kind.from_arguments(*arguments), x, recorded=False)
        return pending.wait(), x.new_empty(0, dtype=torch.float32)

    def fake(x: torch.Tensor, token: object, after: object, *arguments: Any) -> Tensors:
        return kind.from_arguments(*arguments).result(x), x.new_empty(0, dtype=torch.float32)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.operator, ctx.has_token = kind.from_arguments(*inputs[3:]), inputs[1] is not None
        ctx.save_for_backward(output[1])

    def backward(ctx: Any, gradient: torch.Tensor, of_token: torch.Tensor) -> tuple[Any, ...]:
        (token,) = ctx.saved_tensors
        result, passed_on = _recorded(ctx.operator.adjoint, gradient, token + of_token)
        others = [None] * (len(ctx.needs_input_grad) - 2)
        return result, passed_on if ctx.has_token else None, *others

    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(op, fake, lib=_library)
    formula = make_autograd_impl(op, Info(backward, keep))
    _library.impl(name, _without_tangents(name, formula), "Autograd", with_keyset=True)
    torch.library._register_effectful_op(op, EffectType.ORDERED)
    torch.library.register_torch_dispatch(
        f"varcomm::{name}", FunctionalTensorMode, partial(_in_order, op), lib=_library
    )
    return kind


def _in_order(
    op: Any, mode: FunctionalTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None
) -> Tensors:
    """Record a call after the one before it, by a dependency that lowering keeps.

    An effect alone keeps its place in the graph that torch 2.13 lowers, not in the generated code.
    """
    x, token, _, *others = args
    last = vars(mode).get("_varcomm_token")
    result: Tensors = mode.__torch_dispatch__(op, types, (x, token, last, *others), kwargs or {})
    vars(mode)["_varcomm_token"] = result[1]
    return result


def _without_tangents(name: str, formula: Callable[..., Tensors]) -> Callable[..., Tensors]:
    """Return the formula for autograd, refusing the tangents that torch would silently drop."""

    def called(keys: torch._C.DispatchKeySet, x: torch.Tensor, *arguments: Any) -> Tensors:
        if forward_ad.unpack_dual(x).tangent is not None:
            raise ArgumentError(
                f"{name}: a recorded operator has no forward mode. Use torch.func.jvp of the "
                "function before it is compiled, exported or traced."
            )
        return formula(keys, x, *arguments)

    return called
