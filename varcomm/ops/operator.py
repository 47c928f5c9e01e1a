"""A collective as a linear operator, and the one rule by which all operators are differentiated.

The derivative of an operator is the operator; its backward applies the adjoint. Each application
also returns a *token*: an empty tensor that autograd connects to the input, and a further input of
derivatives. So a second derivative is recorded on all ranks or on none, even if the gradient on one
rank depends on nothing.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, TypeVar

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch._library.autograd import Info, make_autograd_impl
from torch._library.effects import EffectType
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

from varcomm.errors import ArgumentError, CommunicationError, DisagreementError
from varcomm.ops.checks import checked_flag, checked_tensor, holds_values
from varcomm.ops.compilation import kept_from_compilation
from varcomm.sizes import ShardSizes
from varcomm.transport.debug import debugging
from varcomm.transport.engine import EngineFailure, Pending, recorders, span
from varcomm.transport.engines.choose import engine_for
from varcomm.transport.group import Group, named

Kind = TypeVar("Kind", bound=type["Operator"])
Tensors = tuple[Tensor, Tensor]


class Operator(ABC):
    """A linear map between the tensors of all ranks; its subclasses are frozen dataclasses."""

    name: ClassVar[str]
    schema: ClassVar[str]  # of its arguments in a graph
    names: ClassVar[tuple[str, ...]]  # of the fields that are arguments there
    group: Group

    def start(self, x: Tensor) -> Pending:
        """Begin to communicate; return this rank's part of the result, once it is waited for."""
        return self.prepared(x)(x)

    def prepared(self, x: Tensor) -> Callable[[Tensor], Pending]:
        """Return :meth:`start` for tensors with the shape, dtype and device of `x`.

        A subclass defines this method or :meth:`start`.
        """
        return self.start

    @abstractmethod
    def result(self, x: Tensor) -> Tensor:
        """Return an uninitialised tensor with the metadata of the result."""

    @property
    @abstractmethod
    def adjoint(self) -> Operator:
        """The transposed map, for the inner product summed over ranks."""

    @property
    def in_one_round(self) -> Self:
        """The same map with all its messages in flight once it has started, for Handles."""
        return self

    def describe(self, x: Tensor) -> dict[str, Any]:
        """Return the mapping that :func:`~varcomm.transport.agreement.compare` compares."""
        shown = [name for name in self.names if name not in ("elsewhere", "divisor")]
        found = {name.replace("one_round", "async_op"): getattr(self, name) for name in shown}
        return {n: list(v) if isinstance(v, tuple) else v for n, v in found.items()}

    def arguments(self) -> tuple[Any, ...]:
        """Return the operator's arguments in a graph, in the order of `schema`."""
        return self.group.name, self.group.rank, *(_plain(getattr(self, n)) for n in self.names)

    @classmethod
    def from_arguments(cls, group: str, rank: int, *fields: Any) -> Self:
        """Return the operator of these arguments."""
        return cls(named(group, rank), *map(_plain, fields))  # type: ignore[call-arg]


def _plain(value: Any) -> Any:
    # schemas and Dynamo accept only plain tuples
    return tuple(value) if isinstance(value, list | tuple) else value


class checking:
    """Surround the checks of a call's arguments; returns the beginning of their messages.

    `flags` must be bools. Inside debug(), a wrong argument on one rank is an error on all ranks.
    """

    def __init__(self, name: str, group: Group, **flags: bool) -> None:
        self.name, self.group, self.flags = name, group, flags

    def __enter__(self) -> str:
        where = f"{self.name} on {self.group.label}: "
        try:
            if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
                raise ArgumentError(
                    f"{where}torch.jit.trace would record this rank's messages as constants. Use "
                    "torch.compile, torch.export or make_fx, which record an operator."
                )
            for flag, value in self.flags.items():
                checked_flag(value, flag, where)
        except ArgumentError as error:
            self.__exit__(None, error, None)
            raise
        return where

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        agreed = isinstance(error, DisagreementError | CommunicationError)  # all ranks raise these
        if isinstance(error, Exception) and not agreed and debugging():
            from varcomm.transport.agreement import fail

            fail(self.group, self.name, error)


_dispatch_mode = torch._C._get_dispatch_mode
_FAKE, _PROXY = torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY

_TENSORS = frozenset((Tensor, torch.nn.Parameter))
_SIZES = frozenset((ShardSizes, tuple, list))
_INT = frozenset((int,))
_PLAIN = frozenset((int, bool, torch.Size))
_MOST = 64  # operators that a group or plan keeps


def call(
    make: Callable[..., Operator],
    owner: Any,
    x: Tensor,
    sizes: Sequence[int],
    how: tuple[Any, ...],
    async_op: bool,
) -> TensorOrHandle:
    """Apply ``make(owner, x, sizes, *how, async_op)``, which checks its arguments.

    The owner, a group or plan, keeps the operator for calls with equal arguments.
    """
    types = tuple(map(type, how))
    if (
        torch.compiler.is_compiling()
        or (type(x) not in _TENSORS and not _is_like_ordinary(x))
        or type(async_op) is not bool
        or type(sizes) not in _SIZES
        or not _INT.issuperset(map(type, sizes))  # torch.jit.trace has tensors for ints
        or not _PLAIN.issuperset(types)
        or x.is_nested
        or _dispatch_mode(_PROXY)
        or debugging()
    ):
        return run(make(owner, x, sizes, *how, async_op), x, async_op)
    kept: dict[Any, Operator] = vars(owner).setdefault("operators", {})
    key = make, tuple(sizes), how, types, async_op, x.shape, x.dtype, x.device, x.layout
    operator = kept.get(key)
    if operator is None:
        operator = _kept(make(owner, x, sizes, *how, async_op), x)
        if len(kept) >= _MOST:
            kept.clear()
        kept[key] = operator
    if async_op:
        return start(operator, x)  # type: ignore[return-value]
    return _apply(operator, x, is_plain=True)[0]  # type: ignore[return-value]


def _is_like_ordinary(x: object) -> bool:
    """Return whether a tensor of a subclass is served by operators for ordinary tensors."""
    return isinstance(x, Tensor) and not _is_traced(x) and holds_values(x)


def _kept(operator: Operator, x: Tensor) -> Operator:
    """Return the operator, prepared for tensors like `x` alone; as its adjoint will be."""
    own: dict[str, Any] = vars(operator)
    own["kept_adjoint"] = None
    if type(operator).prepared is not Operator.prepared:
        own["start"] = operator.prepared(x)
    return operator


def _adjoint(operator: Operator, gradient: Tensor) -> Operator:
    own: dict[str, Any] = vars(operator)
    if "kept_adjoint" not in own:
        return operator.adjoint
    if own["kept_adjoint"] is None:
        own["kept_adjoint"] = _kept(operator.adjoint, gradient)
    return own["kept_adjoint"]  # type: ignore[no-any-return]


def run(operator: Operator, x: Tensor, async_op: bool) -> TensorOrHandle:
    """Apply the operator, or begin to."""
    return start(operator, x) if async_op else apply(operator, x)  # type: ignore[return-value]


def apply(operator: Operator, x: Tensor) -> Tensor:
    """Apply an operator, differentiably."""
    if torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active():
        return _recorded(operator, x, None)[0]
    return _apply(operator, x)[0]


def _apply(
    operator: Operator,
    x: Tensor,
    tokens: tuple[Tensor | None, ...] = (),
    of: int | None = None,
    is_plain: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the result, and the token of a call that can be differentiated.

    A derivative passes the tokens and the number `of` its call.
    """
    given = [token for token in tokens if token is not None] if tokens else ()
    recorded = is_recorded(x, given)
    if torch._C._are_functorch_transforms_active():
        return _apply_in_transforms(x, operator, recorded, of, *given)
    if recorded or forward_ad.unpack_dual(x).tangent is not None:
        return _Rule.apply(x, operator, recorded, of, *given)  # type: ignore[no-any-return, no-untyped-call]
    if is_plain:  # no fake tensor, and no tracer records it
        return _communicated(operator, x, recorded, of)[0], None
    return _run(operator, x, recorded, of)[0], None


def is_recorded(x: Tensor, tokens: Sequence[Tensor] = ()) -> bool:
    """Return whether the result of a call belongs to the graph."""
    if not torch.is_grad_enabled() or x.requires_grad or not tokens:
        return torch.is_grad_enabled() and x.requires_grad
    return any(token.requires_grad for token in tokens)


class _Rule(torch.autograd.Function):
    """Apply an operator; differentiate it by applying the adjoint."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, operator: Operator, recorded: bool, of: int | None, *_: Tensor
    ) -> Tensors:
        result, ctx.number = _run(operator, x, recorded, of)
        token = _token(x)
        _keep(ctx, operator, token)
        return result, token

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, of_token: Tensor) -> tuple[Tensor | None, ...]:
        (token,) = ctx.saved_tensors
        _check_gradient(ctx.operator, gradient)
        adjoint = _adjoint(ctx.operator, gradient)
        result, passed_on = _apply(adjoint, gradient, (token, of_token), ctx.number)
        return result, None, None, None, *[passed_on] * (len(ctx.needs_input_grad) - 4)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *others: Tensor | None) -> Tensors:
        result, token = _apply(ctx.operator, tangent, (*ctx.saved_tensors, *others[3:]))
        return result, _token(tangent) if token is None else token

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, operator: Operator, *_: Any) -> Any:
        refuse_vmap(f"{operator.name} on {operator.group}: ")


class _RuleInTransforms(_Rule):
    """The rule in the form that ``torch.func`` requires, which costs three times as much."""

    @staticmethod
    def forward(  # type: ignore[override]
        x: Tensor, operator: Operator, recorded: bool, of: int | None, *_: Tensor
    ) -> Tensors:
        return _run(operator, x, recorded, of)[0], _token(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.number = None
        _keep(ctx, inputs[1], output[1])


@kept_from_compilation  # a recorded operator would lose tangents
def _apply_in_transforms(*inputs: Any) -> Tensors:
    return _RuleInTransforms.apply(*inputs)  # type: ignore[no-any-return, no-untyped-call]


def _keep(ctx: Any, operator: Operator, token: Tensor) -> None:
    ctx.operator = operator
    ctx.save_for_backward(token)
    ctx.save_for_forward(token)


def _token(x: Tensor) -> Tensor:
    return x.new_empty(0, dtype=torch.float32)


def _check_gradient(operator: Operator, gradient: Tensor) -> None:
    if type(gradient) is not Tensor or gradient.layout is not torch.strided:
        adjoint = operator.adjoint
        with checking(adjoint.name, adjoint.group) as where:
            checked_tensor(gradient, f"{where.removesuffix(': ')}, in backward: ", "gradient")


def _run(
    operator: Operator, x: Tensor, recorded: bool, of: int | None
) -> tuple[Tensor, int | None]:
    """Return the result, and the number of the call if ranks compare calls."""
    if _is_traced(x):
        return _recorded(operator, x, None)[0], None
    return _communicated(operator, x, recorded, of)


def begin(operator: Operator, x: Tensor, recorded: bool) -> Pending:
    """Start to communicate, for rules of other modules; in a graph, apply at once."""
    if in_graph(x):
        result = _recorded(operator, x, None)[0]
        return Pending([], lambda: result)
    return _started(operator, x, recorded, overlaps=True)


def _communicated(
    operator: Operator, x: Tensor, recorded: bool, of: int | None
) -> tuple[Tensor, int | None]:
    """Return the result, and the number of the call if ranks compare calls."""
    number = _entered(operator, x, recorded, of)
    began = time.monotonic()
    try:
        pending = operator.start(x) if not recorders else _recorded_start(operator, x)
        if operator.group.in_flight:
            pending.earlier = tuple(operator.group.in_flight)
        result = pending.wait()
    except EngineFailure as error:
        raise _failed(operator, x.dtype, x.shape, began, error) from error.__cause__
    # detached from a view's base: the caller may write into the result
    return result.data, number


def _started(
    operator: Operator,
    x: Tensor,
    recorded: bool,
    of: int | None = None,
    overlaps: bool = False,
) -> Pending:
    """Start to communicate; the caller waits."""
    number = _entered(operator, x, recorded, of, overlaps)
    failed = partial(_failed, operator, x.dtype, x.shape, time.monotonic())
    try:
        pending = operator.start(x) if not recorders else _recorded_start(operator, x)
    except EngineFailure as error:  # in the first of several rounds
        raise failed(error) from error.__cause__
    pending.number, pending.failed = number, failed
    pending.earlier = tuple(operator.group.in_flight)
    return pending


def _entered(
    operator: Operator, x: Tensor, recorded: bool, of: int | None, overlaps: bool = False
) -> int | None:
    """Return the number of the call if ranks compare calls, which is inside debug().

    Calls that do not overlap with others first complete those of Handles.
    """
    number = _compared(operator, x, recorded, of) if debugging() else None
    if in_flight := operator.group.in_flight:
        for each in () if overlaps else tuple(in_flight):
            each.complete()
        in_flight[:] = [each for each in in_flight if not each.done]
    return number


def _recorded_start(operator: Operator, x: Tensor) -> Pending:
    with span(operator.name):
        return operator.start(x)


def _compared(operator: Operator, x: Tensor, recorded: bool, of: int | None) -> int:
    from varcomm.transport.agreement import compare  # needed inside debug() only

    with checking(operator.name, operator.group):
        engine_for(operator.group, x.device)
    described = {"operation": operator.name, **operator.describe(x)}
    described |= {"dtype": str(x.dtype), "device": x.device.type, "requires_grad": recorded}
    if of is not None:
        described["backward of call"] = of
    return compare(operator.group, described)


def _failed(
    operator: Operator, dtype: torch.dtype, shape: torch.Size, began: float, error: EngineFailure
) -> CommunicationError:
    from varcomm.transport.failure import failure

    words = operator.describe(torch.empty(shape, dtype=dtype, device="meta"))
    words = {"dtype": str(dtype).removeprefix("torch."), "shape": list(shape), **words}
    details = ", ".join(f"{word} {value}" for word, value in words.items())
    return failure(operator.name, operator.group, began, error, f"Here it has {details}. ")


# --- Asynchronous calls have two nodes of autograd. In backward the node of the wait starts the
# adjoint, and the node of the start waits for it. All other derivatives communicate at once.


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


def start(operator: Operator, x: Tensor) -> Handle:
    """Begin to communicate; the result belongs to the graph."""
    operator = operator.in_one_round
    transformed = torch._C._are_functorch_transforms_active()
    if in_graph(x) or transformed or forward_ad.unpack_dual(x).tangent is not None:
        with torch.enable_grad():  # wait() decides whether there is a gradient
            result = apply(operator, x)
        return Handle(lambda: result if torch.is_grad_enabled() else result.detach())
    flight = _Flight(operator)
    ticket = _Start.apply(x, flight, is_recorded(x))  # type: ignore[no-untyped-call]
    return Handle(lambda: _Wait.apply(x, ticket, flight)[0])  # type: ignore[no-untyped-call]


class _Flight:
    """An asynchronous call, shared by its two nodes in autograd's graph.

    In forward it is in flight from the start to the wait, in backward from the wait to the start.
    Meanwhile the tensor that it sends must not change.
    """

    def __init__(self, operator: Operator) -> None:
        self.operator = operator
        self.sent: tuple[Operator, Tensor, int, Pending] | None = None
        self.result: Tensor | None = None  # of a backward that communicated at once

    def begin(self, operator: Operator, x: Tensor, recorded: bool, of: int | None = None) -> None:
        pending = _started(operator, x, recorded, of, overlaps=True)
        if not pending.done:
            operator.group.in_flight.append(pending)
        self.sent = operator, x, _version(x), pending

    def wait(self, name: str, period: str) -> tuple[Tensor, int | None]:
        """Return the result, and the number of the call if ranks compare calls."""
        assert self.sent is not None
        operator, x, version, pending = self.sent
        error = None
        if _version(x) != version:
            where = "" if operator is self.operator else ", in backward"
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


def _version(tensor: Tensor) -> int:
    """Return the number of changes in place; inference tensors do not count them."""
    return 0 if tensor.is_inference() else tensor._version


class _Start(torch.autograd.Function):
    """Begin to communicate; in backward, wait for the adjoint. Returns the ticket for the wait."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: _Flight, recorded: bool) -> Tensor:
        ctx.flight = flight
        flight.begin(flight.operator, x, recorded)
        return _token(x)

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
        token = _token(x)
        _keep(ctx, flight.operator, token)
        ctx.flight = flight
        return result, token

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor, of_token: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None]:
        (token,) = ctx.saved_tensors
        flight = ctx.flight
        _check_gradient(ctx.operator, gradient)
        adjoint = _adjoint(ctx.operator, gradient)
        if not ctx.needs_input_grad[1]:  # the call started under no_grad()
            return _apply(adjoint, gradient, (token, of_token), ctx.number)[0], None, None
        if is_recorded(gradient, (token, of_token)) or in_graph(gradient):
            flight.result, _ = _apply(adjoint, gradient, (token, of_token), ctx.number)
        else:
            flight.begin(adjoint.in_one_round, gradient, False, ctx.number)
        return None, token.new_empty(0), None


def refuse_vmap(where: str) -> NoReturn:
    """Raise ArgumentError: a collective is not for batches of ``vmap``."""
    raise ArgumentError(
        f"{where}vmap, and with it jacrev, jacfwd and hessian, has no rule for communication. "
        "Loop over torch.func.vjp or jvp, in as many directions on every rank."
    )


# --- Graphs: for torch.compile, make_fx, torch.export and fake tensors each class is one operator
#
#     varcomm::NAME(x, token, after, group, rank, ...fields) -> (result, token)
#
# It is an effect, so that no compiler drops or moves it. `after` is the token of the call before,
# which keeps the order in generated code. Two ranks may share a cache of compiled code, so the rank
# is an argument.

_library = torch.library.Library("varcomm", "DEF")

_TYPES = {
    "bool": "bool",
    "int": "int",
    "torch.Tensor": "Tensor",
    "tuple[int, ...]": "SymInt[]",
}

# a replayed CUDA graph runs no Python
_TAGS = torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe


def records_graph() -> bool:
    """Return whether make_fx or torch.export records calls."""
    return _dispatch_mode(_PROXY) is not None


def in_graph(x: Tensor | None) -> bool:
    """Return whether calls on `x` are recorded or pretended; for None, whether they would be."""
    return torch.compiler.is_compiling() or _is_traced(x)


def _is_traced(x: Tensor | None) -> bool:
    if records_graph():
        return True
    if x is None:
        return _dispatch_mode(_FAKE) is not None
    return isinstance(x, (FakeTensor, FunctionalTensor))


def _recorded(operator: Operator, x: Tensor, token: Tensor | None) -> Tensors:
    arguments = operator.arguments()
    if isinstance(x, FakeTensor) and not (torch.compiler.is_compiling() or records_graph()):
        # beside a fake `x`, tensors must be fakes; a recorder makes constants of them by itself
        convert = x.fake_mode.from_tensor
        real = (isinstance(a, Tensor) and not isinstance(a, FakeTensor) for a in arguments)
        arguments = tuple(convert(a) if r else a for a, r in zip(arguments, real, strict=True))
    return getattr(torch.ops.varcomm, operator.name)(x, token, None, *arguments)  # type: ignore[no-any-return]


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

    def kernel(x: Tensor, token: object, after: object, *arguments: Any) -> Tensors:
        return _communicated(kind.from_arguments(*arguments), x, False, None)[0], _token(x)

    def fake(x: Tensor, token: object, after: object, *arguments: Any) -> Tensors:
        return kind.from_arguments(*arguments).result(x), _token(x)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.operator, ctx.has_token = kind.from_arguments(*inputs[3:]), inputs[1] is not None
        ctx.save_for_backward(output[1])

    def backward(ctx: Any, gradient: Tensor, of_token: Tensor) -> tuple[Any, ...]:
        (token,) = ctx.saved_tensors
        result, passed_on = _recorded(ctx.operator.adjoint, gradient, token + of_token)
        others = [None] * (len(ctx.needs_input_grad) - 2)
        return result, passed_on if ctx.has_token else None, *others

    formula = make_autograd_impl(op, Info(backward, keep))

    def without_tangents(keys: torch._C.DispatchKeySet, x: Tensor, *rest: Any) -> Tensors:
        if forward_ad.unpack_dual(x).tangent is not None:  # which torch would drop silently
            raise ArgumentError(
                f"{name}: a recorded operator has no forward mode. Use torch.func.jvp of the "
                "function before it is compiled, exported or traced."
            )
        return formula(keys, x, *rest)  # type: ignore[no-any-return]

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

    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(op, fake, lib=_library)
    _library.impl(name, without_tangents, "Autograd", with_keyset=True)
    torch.library._register_effectful_op(op, EffectType.ORDERED)
    torch.library.register_torch_dispatch(
        f"varcomm::{name}", FunctionalTensorMode, in_order, lib=_library
    )
    return kind
