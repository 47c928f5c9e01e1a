"""Types of command-line arguments, and a line of progress."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

__all__ = [
    "comma_separated",
    "float_dtype",
    "nbytes",
    "one_of",
    "positive",
    "progress",
    "seconds",
    "skew",
]

T = TypeVar("T")

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def comma_separated(read: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Return a type that reads several values with commas between them."""
    return lambda text: [read(part) for part in text.split(",")]


def one_of(names: Sequence[str], noun: str) -> Callable[[str], str]:
    """Return a type that accepts some names."""

    def read(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is not {noun}; use {', '.join(names)}")
        return text

    return read


def positive(text: str) -> int:
    """Read a positive integer."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def seconds(text: str) -> float:
    """Read a positive, finite number of seconds."""
    if not re.fullmatch(r"\d*\.?\d+(e-?\d+)?", text) or not 0 < float(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return float(text)


def nbytes(text: str) -> int:
    """Read a number of bytes that fits into the memory of this machine.

    >>> nbytes("768"), nbytes("16K"), nbytes("1M")
    (768, 16384, 1048576)
    """
    found = re.fullmatch(r"(\d{1,30})([KMG]?)", text.strip().upper())
    if found is None or int(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes; use 768, 16K or 1M")
    number = int(found[1]) * _UNITS[found[2]]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if number > memory:
        raise argparse.ArgumentTypeError(f"{text!r} exceeds the memory, {memory / 2**30:.3g}G")
    return number


def skew(text: str) -> str:
    """Read how shards differ: ``even``, ``empty`` or weights."""
    if text in ("even", "empty") or (re.fullmatch(r"\d+(:\d+)+", text) and text.strip("0:")):
        return text
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a skew; use even, empty (the first rank has no rows), or weights that "
        "ranks use in turn, such as 1:8"
    )


def float_dtype(text: str) -> str:
    """Read the name of a floating dtype of torch."""
    dtype = getattr(torch, text, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a dtype to measure; use float32, ...")
    return text


def check_writable(path: Path, parser: argparse.ArgumentParser) -> None:
    """Refuse a file that cannot be written, before the work."""
    is_new = not path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        parser.error(f"{path} cannot be written: {error.strerror}")
    if is_new:
        path.unlink()


def progress(words: str) -> None:
    """Show on a terminal what is being done; an empty text removes it."""
    if sys.stderr.isatty():
        print(f"\r{words:<60}\r", end="", file=sys.stderr, flush=True)
