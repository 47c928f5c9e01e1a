"""A collective as a linear operator.

A primitive is a pair of :class:`Operator` classes, each the other's adjoint. What follows from that
alone is written once, in :mod:`varcomm.ops.autograd`, :mod:`varcomm.ops.handle` and
:mod:`varcomm.ops.library`: derivatives of any order, forward mode, asynchronous calls, nodes in
graphs that are compiled, comparison between ranks, the range in the profiler.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from functools import partial
from typing import Any, ClassVar, Self

import torch

from varcomm.errors import ArgumentError, CommunicationError, GroupError
from varcomm.ops.checks import checked_flag
from varcomm.transport.agreement import compare, debugging, fail
from varcomm.transport.engine import EngineFailure, Pending
from varcomm.transport.engines import engine_for
from varcomm.transport.failure import failure
from varcomm.transport.group import Group, named
from varcomm.transport.trace import span

__all__ = ["Operator", "checking", "started"]


class Operator(ABC):
    """A linear map between what all ranks hold before and after a collective.

    Subclasses are frozen dataclasses that hold the group and whatever else the map depends on.
    """

    name: ClassVar[str]
    schema: ClassVar[str]  # of its arguments in a graph
    names: ClassVar[tuple[str, ...]]  # of the fields that are arguments there
    group: Group

    @abstractmethod
    def start(self, x: torch.Tensor) -> Pending:
        """Begin to communicate; return what gives this rank's part of the result."""

    @abstractmethod
    def result(self, x: torch.Tensor) -> torch.Tensor:
        """Return what :meth:`start` will give, but for its values, which are not initialised."""

    @property
    @abstractmethod
    def adjoint(self) -> Operator:
        """The transposed map, for the inner product summed over ranks."""

    @property
    def in_one_round(self) -> Self:
        """The same map, with all communication under way once it has started.

        What runs asynchronously has nobody to begin a second round.
        """
        return self

    def batched(self, size: int) -> Operator:
        """Return the same map of `size` tensors at once, side by side along a last dimension.

        Another operator, if it holds shapes: it holds that dimension too.
        """
        return self

    @abstractmethod
    def describe(self, x: torch.Tensor) -> dict[str, Any]:
        """Return the mapping that :func:`~varcomm.transport.agreement.compare` compares."""

    def arguments(self) -> tuple[Any, ...]:
        """Return the operator as a graph holds it, in the order of `schema`."""
        fields = [_plain(getattr(self, name)) for name in self.names]
        return self.group.name, self.group.rank, *fields

    @classmethod
    def from_arguments(cls, group: str, rank: int, *fields: Any) -> Self:
        """Make the operator again."""
        return cls(named(group, rank), *map(_plain, fields))  # type: ignore[call-arg]


def _plain(value: Any) -> Any:
    """Return sizes as a tuple of no class of its own, which schemas and Dynamo do not know."""
    return tuple(value) if isinstance(value, list | tuple) else value


def started(operator: Operator, x: torch.Tensor, recorded: bool, of: int | None = None) -> Pending:
    """Start to communicate, after ranks have compared the call where they do.

    `of` is the number of the call whose backward this is, where that was compared as well.
    """
    number = None
    if debugging():
        with checking(operator.name, operator.group):
            engine_for(operator.group, x.device)
        call = {"operation": operator.name, **operator.describe(x)}
        more = {"dtype": str(x.dtype), "device": x.device.type, "requires_grad": recorded}
        if of is not None:
            more["backward of call"] = of
        number = compare(operator.group, call | more)
    failed = partial(_failed, operator, x.dtype, x.shape, time.monotonic())
    with span(operator.name):
        try:
            pending = operator.start(x)
        except EngineFailure as error:  # in the first of several rounds
            raise failed(error) from error.__cause__
    pending.number, pending.failed = number, failed
    return pending


def _failed(
    operator: Operator, dtype: torch.dtype, shape: torch.Size, began: float, error: EngineFailure
) -> CommunicationError:
    """Return the error for a call that an engine could not complete: what it was, and for whom."""
    told = operator.describe(torch.empty(shape, dtype=dtype, device="meta"))
    held = ", ".join(f"{word} {value}" for word, value in told.items())
    kind = str(dtype).removeprefix("torch.")
    details = f"It is of {kind} {list(shape)} here, with {held}. "
    return failure(operator.name, operator.group, began, error, details)


class checking:
    """Surround the checks of a call's arguments; gives how their messages start.

    `flags` must be bools, before anything else: what torch.distributed takes at the same position
    may be a group or a ReduceOp. Inside :func:`varcomm.debug`, an argument that is wrong on this
    rank is an error on all.
    """

    def __init__(self, name: str, group: Group, **flags: bool) -> None:
        self.name, self.group, self.flags = name, group, flags

    def __enter__(self) -> str:
        where = f"{self.name} on {self.group.label}: "
        try:
            if torch._C._get_tracing_state() is not None:
                raise ArgumentError(
                    f"{where}torch.jit.trace would record what this rank sends as constants. Take "
                    "torch.compile, torch.export or make_fx, which record an operator."
                )
            for flag, value in self.flags.items():
                checked_flag(value, flag, where)
        except ArgumentError as error:
            self._told(error)
            raise
        return where

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._told(error)

    def _told(self, error: BaseException | None) -> None:
        if isinstance(error, ArgumentError | GroupError) and debugging():
            fail(self.group, self.name, error)
