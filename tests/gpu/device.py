"""Tests on a GPU that were written without one: their tensors are made on its device."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

ROOT = Path(__file__).parents[2]
TESTS, LIBRARY = f"{ROOT / 'tests'}{os.sep}", f"{ROOT / 'varcomm'}{os.sep}"

FACTORIES = frozenset((
    "arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn",
    "randperm", "tensor", "zeros",
))  # fmt: skip


class _OnDevice(TorchFunctionMode):
    """Make tensors on a device for which tests name none; what varcomm makes is left alone."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func.__name__ not in FACTORIES or kwargs.get("device") is not None or not _of_tests():
            return func(*args, **kwargs)
        if kwargs.get("generator") is None:
            return func(*args, **kwargs | {"device": self.device})
        requires_grad = kwargs.pop("requires_grad", False)  # of the leaf on the device
        return func(*args, **kwargs).to(self.device).requires_grad_(requires_grad)


def _of_tests() -> bool:
    """Return whether a test calls, directly or through another library."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(TESTS) and file != __file__:
            return True
        if file.startswith(LIBRARY):
            return False
        frame = frame.f_back
    return False


@contextmanager
def on_device(name: str, strict: bool = False) -> Iterator[None]:
    """Make tensors of tests on a device; `strict` uses the stand-in for NCCL.

    "pretended" is a GPU without one.
    """
    with ExitStack() as stack:
        if strict:
            from tests.transport.strict_nccl import strict_nccl

            stack.enter_context(strict_nccl(["cpu" if name == "cpu" else "cuda"]))
        if name == "pretended":
            from tests.gpu.pretended import pretended

            device = stack.enter_context(pretended())
        else:
            device = torch.device(name)
        if name != "cpu":
            stack.enter_context(_OnDevice(device))
        yield


def on_cpu(values: Any) -> Any:
    """Return nested values with their tensors on the CPU."""
    return tree_map(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, values)
