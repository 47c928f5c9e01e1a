"""Pickling of calls for ranks that never ran the caller's script."""

from __future__ import annotations

import importlib.util
import io
import pickle
from collections.abc import Callable
from types import FunctionType
from typing import Any

from varcomm.errors import ArgumentError, MissingPackageError

__all__ = ["dumps", "pickled_call"]


def dumps(value: object) -> bytes:
    """Pickle with cloudpickle, which accepts lambdas and a script's classes; else with pickle."""
    try:
        import cloudpickle
    except ImportError:
        return pickle.dumps(value)
    data: bytes = cloudpickle.dumps(value)
    return data


def pickled_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Pickle ``(fn, args)``, or raise if the ranks could not read it."""
    if not callable(fn):
        raise ArgumentError(f"fn must be callable as fn(rank, *args); got {fn!r}.")
    by_name = importlib.util.find_spec("cloudpickle") is None
    try:
        return _dumps_by_name((fn, args)) if by_name else dumps((fn, args))
    except Exception as error:
        if by_name:
            raise MissingPackageError(
                f"{fn!r} and its arguments cannot be sent to the ranks by name ({error}). "
                'To send them by value: pip install "varcomm[launch]"'
            ) from error
        raise ArgumentError(
            f"{fn!r} or its arguments cannot be pickled to be sent to the ranks: {error!r}"
        ) from error


class _PicklerByName(pickle.Pickler):
    """Refuses objects of ``__main__``, which in the ranks is another module."""

    def persistent_id(self, obj: object) -> None:
        """Check each object of the pickle; give none of them an id."""
        if isinstance(obj, (type, FunctionType)) and obj.__module__ == "__main__":
            raise pickle.PicklingError(f"{obj.__qualname__} is defined in __main__")


def _dumps_by_name(value: object) -> bytes:
    buffer = io.BytesIO()
    _PicklerByName(buffer).dump(value)
    return buffer.getvalue()
