"""Files that are written while a run goes on."""

from __future__ import annotations

import os
from pathlib import Path

from varcomm.errors import ArgumentError

__all__ = ["check_writable", "is_kept", "write_whole"]


def check_writable(path: Path) -> None:
    """Raise ArgumentError if a file cannot be written, before anything is measured for it."""
    if not path.absolute().parent.is_dir():
        raise ArgumentError(f"there is no folder {path.absolute().parent} for {path.name}")
    try:
        is_new = not path.exists()
        with path.open("ab"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise ArgumentError(f"{path} cannot be written: {error.strerror}") from error


def is_kept(path: Path) -> bool:
    """Tell whether a file keeps what was written last, as a pipe does not."""
    return path.is_file() or not path.exists()


def write_whole(path: Path, text: str) -> None:
    """Write a file beside it first, so that whatever ends this leaves the old one or the new."""
    place = path.resolve()
    if not is_kept(path) or not os.access(place.parent, os.W_OK):
        path.write_text(text)
        return
    beside = place.with_name(f".{os.getpid()}.part")
    try:
        beside.write_text(text)
        beside.replace(place)
    finally:
        beside.unlink(missing_ok=True)
