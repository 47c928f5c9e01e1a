"""The rule of a collective: its forward, its adjoint, and the metadata of its result.

A collective is a linear operator between the tensors of all ranks. Its class says how rows are sent
(:meth:`Operator.prepared`), what the transposed map is (:attr:`Operator.adjoint`), and which shape
the result has (:meth:`Operator.result`). Derivatives (:mod:`.handle`) and recorded graphs
(:mod:`.graph_operator`) follow from these three.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from varcomm.errors import CommunicationError
from varcomm.ops.checks import checking
from varcomm.transport.call_log import RECORDED, CallLog, Entry, word_of
from varcomm.transport.debug import debugging
from varcomm.transport.engine import EngineFailure, Pending, recorders, span
from varcomm.transport.engines.choose import engine_for
from varcomm.transport.group import Calls, Group, named


class Operator(ABC):
    """A linear map between the tensors of all ranks; its subclasses are frozen dataclasses."""

    name: ClassVar[str]
    schema: ClassVar[str]  # of its arguments in a graph
    names: ClassVar[tuple[str, ...]]  # of the fields that are arguments there
    communicates: ClassVar[bool] = True  # ranks must make its calls in one order
    holds_tensors: ClassVar[bool] = False  # such as indices, which nothing else may keep alive
    group: Group

    def send(self, x: Tensor) -> Pending:
        """Send `x`; the Pending returns this rank's part of the result."""
        return self.prepared(x)(x)

    def prepared(self, x: Tensor) -> Callable[[Tensor], Pending]:
        """Return :meth:`send` for tensors with the shape, dtype and device of `x`.

        A subclass defines this method, or :meth:`send` if there is nothing to prepare.
        """
        return self.send

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
        shown = [name for name in self.names if name not in ("elsewhere", "divisor", "compares")]
        values = {name.replace("one_round", "async_op"): getattr(self, name) for name in shown}
        return {n: list(v) if isinstance(v, tuple) else v for n, v in values.items()}

    def in_log(self, x: Tensor) -> dict[str, Any]:
        """Return what :meth:`describe` does, but for words that need values of a tensor."""
        return self.describe(x)

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


class Call:
    """An operator for tensors of one shape, dtype and device.

    What the first tensor needs is kept for the next: the prepared messages, and the adjoint.
    """

    __slots__ = ("_adjoint", "entry", "log", "operator", "recorded", "send")

    def __init__(self, operator: Operator) -> None:
        self.operator = operator
        self.send: Callable[[Tensor], Pending] | None = None
        self.log: CallLog | None = operator.group.log if operator.communicates else None
        self.entry: Entry | None = None  # in the log
        self.recorded: Entry | None = None  # of a call that autograd records
        self._adjoint: Call | None = None

    @property
    def adjoint(self) -> Call:
        """The call that backward makes."""
        if self._adjoint is None:
            self._adjoint = Call(self.operator.adjoint)
        return self._adjoint

    @property
    def in_one_round(self) -> Call:
        """The call with all its messages in flight once it has started."""
        operator = self.operator.in_one_round
        return self if operator is self.operator else Call(operator)


def send(
    call: Call, x: Tensor, recorded: bool, of: int | None = None, overlaps: bool = False
) -> Pending:
    """Send `x`, without a derivative; the result of the Pending may be a view.

    Every call of an operator comes here, in forward and in backward. Inside debug() ranks first
    compare the call, and whether autograd has `recorded` it; their next sum compares both outside
    of debug(). A backward passes the number `of` its call. A call that does not overlap with others
    first completes those of Handles.
    """
    operator = call.operator
    number = _compared(operator, x, recorded, of) if debugging() else None
    in_flight = operator.group.in_flight
    if in_flight:
        for each in () if overlaps else tuple(in_flight):
            each.complete()
        in_flight[:] = [each for each in in_flight if not each.done]
    failed = partial(_failed, operator, x.dtype, x.shape, time.monotonic())
    log, entry = call.log, None
    try:
        if call.send is None:
            call.send = operator.prepared(x)
        if log is not None:  # before the messages, since those of a sum carry its own entry
            entry = (call.recorded if recorded else call.entry) or _in_log(call, x, recorded)
            log.add(entry)
        if recorders:
            with span(operator.name):
                pending = call.send(x)
        else:
            pending = call.send(x)
    except BaseException as error:
        if log is not None and entry is not None:  # refused on this rank alone
            log.remove(entry)
        if isinstance(error, EngineFailure):  # in the first of several rounds
            raise failed(error) from error.__cause__
        raise
    pending.number, pending.failed = number, failed
    if in_flight:
        pending.earlier = tuple(in_flight)
    return pending


_MOST = 512  # calls and names that a group or plan keeps; a network has several per layer
_OF_A_RANK = frozenset({"send", "recv", "async_op"})  # which may differ between ranks


def _in_log(call: Call, x: Tensor, recorded: bool) -> Entry:
    """Return the entry of a call, which must be equal on all ranks, and keep it."""
    operator, calls = call.operator, call.operator.group.calls
    key = "name", operator, x.dtype, x.shape, recorded  # new calls have equal operators
    entry: Entry | None = None if operator.holds_tensors else calls.get(key)
    if entry is None:
        name = _name(operator, x)
        # without messages in backward, no rank waits for one that has no backward
        if recorded and operator.adjoint.communicates:
            name += RECORDED
        entry = name, word_of(name)
        if not operator.holds_tensors:
            keep(calls, key, entry)
    if recorded:
        call.recorded = entry
    else:
        call.entry = entry
    return entry


def keep(calls: Calls, key: object, value: object) -> None:
    """Keep a value for the next call with equal arguments."""
    if len(calls) >= _MOST:
        calls.clear()
    calls[key] = value


def _name(operator: Operator, x: Tensor) -> str:
    words = operator.in_log(x).items()
    of = ", ".join(f"{word} {value}" for word, value in words if word not in _OF_A_RANK)
    return f"{operator.name} of {str(x.dtype).removeprefix('torch.')}, {of}"


def is_recorded(x: Tensor, tokens: Sequence[Tensor] = ()) -> bool:
    """Return whether the result of a call belongs to the graph."""
    of_tokens = len(tokens) > 0 and any(token.requires_grad for token in tokens)
    return torch.is_grad_enabled() and (x.requires_grad or of_tokens)


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
