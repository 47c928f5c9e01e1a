"""Optional packages, and the errors of libraries that write files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from varcomm.errors import ArgumentError, MissingPackageError


def package(name: str, use: str) -> Any:
    """Return an optional package, or raise MissingPackageError."""
    try:
        return import_module(name)
    except ImportError as error:
        top = name.partition(".")[0]
        raise MissingPackageError(f"{use} needs {top}: pip install {top}.") from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise the error of any library as an ArgumentError that names the file."""
    try:
        yield
    except (ArgumentError, MissingPackageError):
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ArgumentError(f"{path} cannot be written: {reason}.") from error
