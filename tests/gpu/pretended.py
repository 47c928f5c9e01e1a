"""Tensors that say that they are on a GPU, and count the host's looks at their values.

A :class:`Pretended` tensor holds its values on the CPU, with real autograd and on real ranks. Its
`device` is ``cuda:0``. An operation that mixes it with a CPU tensor raises, as on a GPU. An
operation for which the host would wait for a GPU is recorded as a look; a CUDA graph refuses most
of them.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

GPU = torch.device("cuda", 0)
_ROOT = Path(__file__).parents[2]

# Operators whose result or its shape the host must know.
_LOOKS = frozenset((
    "_local_scalar_dense", "_unique", "_unique2", "allclose", "bincount", "equal", "histc", "item",
    "is_nonzero", "masked_select", "multinomial", "nonzero", "nonzero_static", "segment_reduce",
    "unique_consecutive", "unique_dim",
))  # fmt: skip
_INDEXING = frozenset(("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"))
# Operators that take operands from two devices.
_COPIES = frozenset(("copy_", "copy"))


class MixedDevicesError(RuntimeError):
    """An operation on a tensor on the GPU and one on the CPU."""


class Pretended(Tensor):
    """A tensor with its values on the CPU that says that it is on a GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, data: Tensor) -> Pretended:
        return Tensor._make_subclass(cls, data, data.requires_grad)

    device = property(lambda self: GPU)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def get_device(self) -> int:
        return 0

    def is_pinned(self, device: object = None) -> bool:
        return False

    def to(self, *how: Any, **options: Any) -> Tensor:
        return _moved(self, *how, **options)

    def cpu(self, memory_format: Any = None) -> Tensor:
        return _moved(self, "cpu")

    def cuda(self, *how: Any, **options: Any) -> Tensor:
        return self

    def new_tensor(self, data: Any, **options: Any) -> Tensor:
        return torch.tensor(data, **{"dtype": self.dtype, "device": GPU, **options})

    def as_subclass(self, cls: type[Tensor]) -> Tensor:
        if isinstance(self, cls):
            return self
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunctionSubclass():
            return Tensor.as_subclass(self, _on_gpu_too(cls))

    def tolist(self) -> Any:
        seen("tolist")
        return plain(self).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert a cuda:0 tensor to numpy. Call .cpu() first.")

    def __array__(self, dtype: Any = None) -> Any:
        raise TypeError("can't convert a cuda:0 tensor to numpy. Call .cpu() first.")

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Pretended({plain(self)!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        seen("pickle")
        return Pretended, (plain(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> Pretended:
        if id(self) not in memo:
            copy = self.detach().clone().requires_grad_(self.requires_grad)
            if getattr(self, "_is_param", False):
                copy = torch.nn.Parameter(copy, self.requires_grad)
            vars(copy).update({k: v for k, v in vars(self).items() if k != "_is_param"})
            memo[id(self)] = copy
        return memo[id(self)]

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        # indices of x[...] may be on the CPU, from where they are copied
        values = (args[0], *args[2:]) if name in _INDEXING else args
        operands = [x for x in tree_leaves((values, kwargs)) if isinstance(x, Tensor)]
        located = [x for x in operands if not hasattr(x, "is_anywhere")]
        if located and not any(isinstance(x, Pretended) for x in located):
            with torch._C._DisableTorchDispatch():
                return func(*args, **kwargs)
        _check_devices(name, operands)
        _record(name, args, kwargs, operands)
        if "device" in kwargs:  # that of the memory, in C++
            kwargs["device"] = torch.device("cpu")
        with torch._C._DisableTorchDispatch():
            out = func(*args, **kwargs)
        return out if name == "copy_" else tree_map(_on_gpu, out)


@cache
def _on_gpu_too(kind: type[Tensor]) -> type[Tensor]:
    """Return a class like `kind` whose tensors are pretended ones."""
    return kind if issubclass(kind, Pretended) else type(kind.__name__, (kind, Pretended), {})


def _on_gpu(value: Any) -> Any:
    return Pretended(value) if type(value) is Tensor else value


def plain(x: Tensor) -> Tensor:
    """Return the values on the CPU, in the same memory and outside autograd's graph."""
    with torch._C._DisableTorchDispatch():
        return x.detach()


def _check_devices(name: str, operands: list[Tensor]) -> None:
    """Refuse operands on two devices; a GPU reads a CPU tensor of no dimension as a number."""
    if name in _COPIES:
        return
    others = [x for x in operands if not isinstance(x, Pretended) and x.dim() > 0]
    if others and len(others) < len(operands):
        raise MixedDevicesError(
            f"{name}: expected all tensors to be on the same device, but found cuda:0 and cpu "
            f"(shapes {[list(x.shape) for x in operands]})."
        )


# --- Looks


_recorders: list[Callable[[str], object]] = []


def seen(name: str) -> None:
    """Record a look at values, with the lines of the project's code that led to it."""
    if _recorders:
        lines = [
            f"{frame.filename.removeprefix(f'{_ROOT}{os.sep}')}:{frame.lineno}"
            for frame in traceback.extract_stack()
            if frame.filename.startswith(str(_ROOT)) and "/tests/gpu/pre" not in frame.filename
        ]
        own = [line for line in lines if line.startswith(("varcomm", "models"))]
        where = " < ".join(reversed((own or lines)[-3:]))
        for record in _recorders:
            record(f"{name} at {where}")


@contextmanager
def looks() -> Iterator[list[str]]:
    """Collect the looks at values of pretended tensors."""
    found: list[str] = []
    _recorders.append(found.append)
    try:
        yield found
    finally:
        _recorders.remove(found.append)


def _record(name: str, args: tuple[Any, ...], kwargs: Any, operands: list[Tensor]) -> None:
    """Record the looks of an operator."""
    if name in _LOOKS:
        seen(name)
    elif name in _INDEXING:
        for index in (i for i in args[1] if i is not None):
            if index.dtype in (torch.bool, torch.uint8):
                seen(f"{name} by a mask")
            elif not isinstance(index, Pretended):
                seen(f"{name} by an index on the CPU")
    elif name == "repeat_interleave":
        if kwargs.get("output_size") is None:
            seen("repeat_interleave without output_size")
    elif name in _COPIES and len({isinstance(x, Pretended) for x in operands}) == 2:
        # whether memory is pinned is not known without a GPU
        waits = not kwargs.get("non_blocking", len(args) > 2 and args[2])
        if waits or isinstance(operands[0], Pretended):
            seen(f"{name} between CPU and GPU")


# --- Functions that take a device


class _Move(torch.autograd.Function):
    """Copy a tensor from one device to the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.was_on_gpu = isinstance(x, Pretended)
        if x.numel():
            seen("copy to the CPU" if ctx.was_on_gpu else "copy of a CPU tensor to the GPU")
        values = plain(x).clone(memory_format=torch.preserve_format)
        return values if ctx.was_on_gpu else Pretended(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _Move.apply(gradient)  # type: ignore[no-any-return, no-untyped-call]


def _moved(x: Tensor, *how: Any, copy: bool = False, **options: Any) -> Tensor:
    """Return ``x.to(...)``; torch's own takes both devices for the CPU."""
    others = [value for value in (*how, *options.values()) if isinstance(value, Tensor)]
    if others:
        device, dtype = others[0].device, others[0].dtype
    else:
        device, dtype, *_ = torch._C._nn._parse_to(*how, **options)
    if device is not None and device.type != x.device.type:
        x, copy = _Move.apply(x), False
    with torch._C.DisableTorchFunctionSubclass(), torch._C.DisableTorchFunction():
        return Tensor.to(x, dtype=x.dtype if dtype is None else dtype, copy=copy)


class _Transfers(TorchFunctionMode):
    """Copy CPU tensors to the pretended GPU, differentiably."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("to", "as_tensor", "asarray") and isinstance(args[0], Tensor):
            return _moved(*args, **kwargs)
        if name == "cuda" and isinstance(args[0], Tensor):
            return _moved(args[0], GPU)
        return func(*args, **kwargs)


def _is_called_by_backward(frame: FrameType | None) -> bool:
    """Return whether C++ code of autograd calls: its zeros are for tensors on any device."""
    between = f"{os.sep}torch{os.sep}", "graph_recorder.py"  # a further dispatch mode
    while frame is not None and any(part in frame.f_code.co_filename for part in between):
        if frame.f_code.co_name == "_engine_run_backward":
            return True
        frame = frame.f_back
    return False


class _Factories(TorchDispatchMode):
    """Make new tensors with ``device="cuda"`` pretended ones."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        operands = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if device is None or any(isinstance(x, Pretended) for x in operands):
            return func(*args, **kwargs)
        of_backward = not operands and _is_called_by_backward(sys._getframe(1))
        if device.type != "cuda" and not of_backward:
            return func(*args, **kwargs)
        kwargs |= {"device": torch.device("cpu"), "pin_memory": False}
        if func is torch.ops.aten._to_copy.default:
            seen("copy of a CPU tensor to the GPU")
        out = tree_map(_on_gpu, func(*args, **kwargs))
        if of_backward:
            out.is_anywhere = True
        return out


# Functions of torch.cuda that a library calls to learn where it is.
_CUDA = {
    "_lazy_init": lambda: None,
    "current_device": lambda: 0,
    "is_current_stream_capturing": lambda: False,
}


_grouped = clip_grad._group_tensors_by_device_and_dtype


def _grouped_by_pretended_device(lists: Any, with_indices: bool = False) -> Any:
    """Group the tensors to clip; torch reads the device of the memory, in C++."""
    found = _grouped(lists, with_indices)
    return {(each[0][0][0].device, dtype): each for (_, dtype), each in found.items()}


@contextmanager
def pretended() -> Iterator[torch.device]:
    """Serve ``cuda:0`` by pretended tensors in this thread."""
    future = torch.__future__
    swaps = future.get_swap_module_params_on_conversion()
    future.set_swap_module_params_on_conversion(True)  # ``Module.to`` keeps its parameters
    torch._C._set_only_lift_cpu_tensors(True)  # ``torch.tensor`` makes a CPU tensor, and copies it
    try:
        grouped = mock.patch.object(
            clip_grad, "_group_tensors_by_device_and_dtype", _grouped_by_pretended_device
        )
        with mock.patch.multiple(torch.cuda, **_CUDA), grouped, _Factories(), _Transfers():
            yield GPU
    finally:
        future.set_swap_module_params_on_conversion(swaps)
        torch._C._set_only_lift_cpu_tensors(False)
