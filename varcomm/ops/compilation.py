"""Functions and values of programs that torch.compile compiles."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from itertools import count
from secrets import randbits
from typing import Generic, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import torch

from varcomm.errors import ArgumentError

__all__ = [
    "UNCOMPILED",
    "ByNumber",
    "counts_in",
    "extent_of",
    "kept_from_compilation",
    "uncompiled",
]

P = ParamSpec("P")
R = TypeVar("R")
Known = TypeVar("Known")

# The reason that torch.compile and torch.export print where they may not break a graph.
UNCOMPILED = "it runs as it is, between graphs; torch.export takes it with strict=False"


def kept_from_compilation(fn: Callable[P, R]) -> Callable[P, R]:
    """Let torch.compile break its graph at `fn`, which it runs as it is."""
    return uncompiled(UNCOMPILED)(fn)


def uncompiled(reason: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let torch.compile break its graph at a function; it prints the reason where it may not.

    This is torch.compiler.disable, which by itself would import the compiler into every program.
    """

    def decorate(fn: Callable[P, R]) -> Callable[P, R]:
        disabled: list[Callable[P, R]] = []

        @wraps(fn)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if "torch._dynamo" not in sys.modules:
                return fn(*args, **kwargs)
            if not disabled:
                disabled.append(torch.compiler.disable(fn, reason=reason))
            return disabled[0](*args, **kwargs)

        # the marks of torch.compiler.disable, so that the compiler does not look inside
        vars(call).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=reason)
        return call

    return decorate


class ByNumber(Generic[Known]):
    """Objects that are alive, by number, so that one graph does for each of them.

    A number is a tensor, because torch.compile makes constants of the ints of a module. Another
    process has other numbers: a graph that was saved here finds nothing there, and nothing wrong.
    """

    def __init__(self) -> None:
        self._alive: WeakValueDictionary[int, Known] = WeakValueDictionary()
        self._numbers = count(randbits(62))

    def give(self, known: Known) -> torch.Tensor:
        """Return a number for an object; it is valid as long as the object is alive."""
        number = next(self._numbers)
        self._alive[number] = known
        return torch.tensor(number)

    def find(self, number: torch.Tensor, what: str) -> Known:
        """Return the object of a number, or raise ArgumentError, which calls the object `what`."""
        found = self._alive.get(int(number))
        if found is None:
            raise ArgumentError(
                f"{what} exists no longer, or is of another process. Keep it as long as the graph, "
                "and record the graph where it runs."
            )
        return found


# torch.compile makes constants of sizes 0 and 1; an extent has none.
_ABOVE = 2


def extent_of(*counts: int, device: torch.device | None = None) -> torch.Tensor:
    """Return a tensor without elements whose shape holds these numbers.

    torch.compile makes constants of ints that a module holds, and compiles again for each other
    value. The shapes of tensors may change.
    """
    shape = (*(count + _ABOVE for count in counts), 0)
    # products of numbers of rows, as strides are, may be larger than any int64
    extent = torch.empty_strided(shape, [0] * len(shape), device=device)
    # the mark of torch._dynamo.maybe_mark_dynamic, which would import the compiler
    vars(extent)["_dynamo_weak_dynamic_indices"] = set(range(len(counts)))
    return extent


def counts_in(extent: torch.Tensor) -> tuple[int, ...]:
    """Return the numbers that a shape holds.

    >>> counts_in(extent_of(3, 0, 10**12))
    (3, 0, 1000000000000)
    """
    return tuple(count - _ABOVE for count in extent.shape[:-1])
