"""Plain values as bytes, and back, without pickle.

A pickle is a program, which any process in the network of a job could send. This is JSON; a value
that JSON lacks, such as a tuple, is a dict with its kind as the one key.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

# By name: an unknown attribute of torch would be imported.
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}

# How values of a kind become JSON, and the reverse.
_KINDS: dict[str, tuple[type | tuple[type, ...], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "tuple": (tuple, list, tuple),
    "set": ((set, frozenset), sorted, set),
    "complex": (complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    "device": (torch.device, str, torch.device),
    "bytes": (bytes, lambda value: base64.b85encode(value).decode(), base64.b85decode),
    "Counter": (Counter, dict, Counter),
    "dict": (dict, lambda value: [list(pair) for pair in value.items()], dict),
    "dtype": (torch.dtype, lambda value: str(value).removeprefix("torch."), lambda n: dtype_of(n)),
    "tensor": (torch.Tensor, lambda value: _parts(value), lambda parts: _tensor(*parts)),
}


def to_bytes(value: Any) -> bytes:
    """Return a plain value as bytes, or raise TypeError.

    Plain are None, a bool, int, float, complex, str, bytes, torch.dtype, torch.device, Tensor, and
    a list, tuple, set, Counter or dict of such. Subclasses become their base class; tensors keep
    their kind of device and `requires_grad`.
    """
    return json.dumps(encoded(value), separators=(",", ":")).encode()


def from_bytes(data: bytes) -> Any:
    """Return the value of these bytes, or raise ValueError if :func:`to_bytes` made no such."""
    try:
        return decoded(json.loads(data))
    except Exception as error:  # as many kinds as there are malformed bytes
        raise ValueError(f"{data[:100]!r} is not a plain value: {error!r}") from error


def encoded(value: Any) -> Any:
    """Return a plain value as JSON has it, or raise TypeError."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [*map(encoded, value)]
    for name, (kind, encode, _) in _KINDS.items():
        if isinstance(value, kind):
            return {name: encoded(encode(value))}
    raise TypeError(f"{value!r} of type {type(value).__qualname__} is not a plain value")


def decoded(content: Any) -> Any:
    """Return the value that :func:`encoded` was given."""
    if isinstance(content, list):
        return [*map(decoded, content)]
    if isinstance(content, dict):
        ((name, inner),) = content.items()
        return _KINDS[name][2](decoded(inner))
    return content


def _parts(value: torch.Tensor) -> list[Any]:
    if type(value) is not torch.Tensor or value.layout != torch.strided:
        raise TypeError(f"a {type(value).__qualname__} of {value.layout} is not a plain value")
    flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes()
    return [value.dtype, tuple(value.shape), value.device.type, value.requires_grad, data]


def _tensor(
    dtype: torch.dtype, shape: tuple[int, ...], device: str, requires_grad: bool, data: bytes
) -> torch.Tensor:
    # torch imports a module for some names
    if device != "cpu" and not (device == "cuda" and torch.cuda.is_available()):
        raise ValueError(f"there is no device {device!r} here")
    if math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes for {dtype} of shape {shape}")
    found = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return found.reshape(shape).to(device).requires_grad_(requires_grad)


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name, such as ``"float32"``, or raise ValueError."""
    found = _DTYPES.get(f"torch.{name}")
    if found is None:
        raise ValueError(f"{name!r} is not a dtype")
    return found
