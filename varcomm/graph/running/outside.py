"""What is settled once, and kept, is settled outside of whatever torch.func is doing."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

__all__ = ["outside_transforms"]

P = ParamSpec("P")
R = TypeVar("R")


def outside_transforms(fn: Callable[P, R]) -> Callable[P, R]:
    """Let `fn`, which takes numbers of nodes and keeps something, see plain tensors.

    Inside of ``torch.func.jvp`` and its like all that is computed is wrapped for the time of the
    transform. Neither could it be kept, nor sent to other ranks as it is.
    """

    @wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch._C._functorch.peek_interpreter_stack() is None:
            return fn(*args, **kwargs)
        with temporarily_clear_interpreter_stack():
            return fn(*map(_plain, args), **kwargs)  # type: ignore[arg-type]

    return call


def _plain(value: object) -> object:
    while isinstance(value, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(
        value
    ):
        value = torch._C._functorch.get_unwrapped(value)
    return value
