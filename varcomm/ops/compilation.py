"""Functions and values of programs that torch.compile compiles."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import torch

from varcomm._torch_private import let_vary

P = ParamSpec("P")
R = TypeVar("R")


def uncompiled(reason: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let torch.compile break its graph at a function, and print the reason if it may not.

    This is torch.compiler.disable, which by itself would import the compiler into every program.
    """

    def decorate(fn: Callable[P, R]) -> Callable[P, R]:
        disabled: Any = _Disabled(fn, reason)

        @wraps(fn)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if torch.compiler.is_dynamo_compiling() or "torch._dynamo" in sys.modules:
                return disabled.fn(*args, **kwargs)  # type: ignore[no-any-return]
            return fn(*args, **kwargs)

        return call

    return decorate


class _Disabled(ModuleType):
    """A holder of ``torch.compiler.disable(fn)``, made when the compiler reads the attribute.

    The compiler traces ``__getattr__`` of other objects, but calls that of a module.
    """

    def __init__(self, fn: Callable[..., Any], reason: str) -> None:
        super().__init__(fn.__name__)
        self.made = fn, reason

    def __getattr__(self, name: str) -> Any:
        if name != "fn":
            raise AttributeError(name)
        fn, reason = self.made
        self.fn = torch.compiler.disable(fn, reason=reason)
        return self.fn


kept_from_compilation = uncompiled(
    "it runs as it is, between graphs; torch.export takes it with strict=False"
)


# torch.compile makes constants of sizes 0 and 1; an extent has none.
_ABOVE = 2


def extent_of(*counts: int, device: torch.device | None = None) -> torch.Tensor:
    """Return a tensor without elements whose shape holds these numbers.

    torch.compile makes constants of ints that a module holds; the shapes of tensors may change.
    """
    shape = (*(count + _ABOVE for count in counts), 0)
    # products of numbers of rows, as strides are, may be larger than any int64
    return let_vary(
        torch.empty_strided(shape, [0] * len(shape), device=device), *range(len(counts))
    )


def count_in(extent: torch.Tensor, place: int) -> int:
    """Return one of the numbers that a shape holds."""
    return extent.shape[place] - _ABOVE
