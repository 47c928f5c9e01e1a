"""Plain values as bytes, and back: what ranks tell each other is data, and never runs anything.

A pickle is a program, and whoever can reach the network of a job could send one. This is JSON, in
which what JSON does not have, tuples for instance, is a dict with one key that tells what it is.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

__all__ = ["from_bytes", "to_bytes"]

_MAKE: dict[str, Callable[[Any], Any]] = {
    "tuple": lambda items: tuple(map(_made, items)),
    "set": lambda items: set(map(_made, items)),
    "bytes": base64.b85decode,
    "dict": lambda pairs: {_made(key): _made(value) for key, value in pairs},
}


def to_bytes(value: Any) -> bytes:
    """Return a value as bytes.

    Parameters
    ----------
    value : None, bool, int, float, str, bytes, or a list, tuple, set or dict of such
        Whatever is a subclass of these becomes one of them.

    Raises
    ------
    TypeError
        If it is, or has, anything else.

    Examples
    --------
    >>> from_bytes(to_bytes({1: ("a", None, b"b"), "more": [0.1, {2}]}))
    {1: ('a', None, b'b'), 'more': [0.1, {2}]}
    """
    return json.dumps(_said(value), separators=(",", ":")).encode()


def from_bytes(data: bytes) -> Any:
    """Return the value that :func:`to_bytes` was given.

    Raises
    ------
    ValueError
        If the bytes are not what it returns.
    """
    try:
        return _made(json.loads(data))
    except (TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{data[:100]!r} is no plain value: {error!r}") from error


def _said(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_said(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [_said(item) for item in value]}
    if isinstance(value, set | frozenset):
        return {"set": [_said(item) for item in sorted(value)]}
    if isinstance(value, bytes):
        return {"bytes": base64.b85encode(value).decode()}
    if isinstance(value, dict):
        return {"dict": [[_said(key), _said(item)] for key, item in value.items()]}
    raise TypeError(f"{value!r} of type {type(value).__qualname__} is no plain value")


def _made(said: Any) -> Any:
    if isinstance(said, list):
        return [_made(item) for item in said]
    if isinstance(said, dict):
        ((kind, content),) = said.items()
        return _MAKE[kind](content)
    return said
