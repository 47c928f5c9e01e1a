"""Plain values as bytes, and back, without pickle.

A pickle is a program, which any process in the network of a job could send. This is JSON; a value
that JSON lacks, such as a tuple, is a dict with its kind as the one key.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable
from typing import Any

import torch

# By name: an unknown attribute of torch would be imported.
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}

# How values of a kind become JSON, and the reverse.
_KINDS: dict[str, tuple[type | tuple[type, ...], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "tuple": (tuple, list, tuple),
    "set": ((set, frozenset), sorted, set),
    "bytes": (bytes, lambda value: base64.b85encode(value).decode(), base64.b85decode),
    "dict": (dict, lambda value: [list(pair) for pair in value.items()], dict),
    "dtype": (torch.dtype, lambda value: str(value).removeprefix("torch."), lambda n: dtype_of(n)),
    "tensor": (torch.Tensor, lambda value: _parts(value), lambda parts: _tensor(*parts)),
}


def to_bytes(value: Any) -> bytes:
    """Return a plain value as bytes, or raise TypeError.

    Plain are None, a bool, int, float, str, bytes, torch.dtype, Tensor, and a list, tuple, set or
    dict of such. Subclasses become their base class; tensors keep their kind of device and
    `requires_grad`.
    """
    return json.dumps(_encoded(value), separators=(",", ":")).encode()


def from_bytes(data: bytes) -> Any:
    """Return the value of these bytes, or raise ValueError if :func:`to_bytes` made no such."""
    try:
        return _decoded(json.loads(data))
    except Exception as error:  # as many kinds as there are malformed bytes
        raise ValueError(f"{data[:100]!r} is no plain value: {error!r}") from error


def _encoded(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [*map(_encoded, value)]
    for name, (kind, encode, _) in _KINDS.items():
        if isinstance(value, kind):
            return {name: _encoded(encode(value))}
    raise TypeError(f"{value!r} of type {type(value).__qualname__} is no plain value")


def _decoded(encoded: Any) -> Any:
    if isinstance(encoded, list):
        return [*map(_decoded, encoded)]
    if isinstance(encoded, dict):
        ((name, content),) = encoded.items()
        return _KINDS[name][2](_decoded(content))
    return encoded


def _parts(value: torch.Tensor) -> list[Any]:
    if type(value) is not torch.Tensor or value.layout != torch.strided:
        raise TypeError(f"a {type(value).__qualname__} of {value.layout} is no plain value")
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
        raise ValueError(f"{name!r} is no dtype")
    return found
