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
    *("check_writable", "comma_separated", "float_dtype", "nbytes", "number_of", "one_of"),
    *("positive", "progress", "seconds", "skew"),
]

T = TypeVar("T")

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def comma_separated(read: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Return a type that reads several values with commas between them."""
    return lambda text: [read(part) for part in text.split(",")]


def one_of(names: Sequence[str], noun: str) -> Callable[[str], str]:
    """Return a type that accepts some names."""
    return lambda text: _checked(text, text in names, f"is not {noun}; use {', '.join(names)}")


def positive(text: str) -> int:
    """Read a positive integer."""
    return int(_checked(text, text.isdecimal() and int(text), "is not a positive integer"))


def seconds(text: str) -> float:
    """Read a positive, finite number of seconds."""
    is_number = re.fullmatch(r"\d*\.?\d+(e-?\d+)?", text) and 0 < float(text) < float("inf")
    return float(_checked(text, is_number, "is not a positive number of seconds"))


def nbytes(text: str) -> int:
    """Read a number of bytes that fits into the memory of this machine.

    >>> nbytes("768"), nbytes("16K"), nbytes("1M")
    (768, 16384, 1048576)
    """
    found = re.fullmatch(r"0*([1-9]\d{0,29})([KMG]?)", text.strip().upper())
    _checked(text, found, "is not a number of bytes; use 768, 16K or 1M")
    number = int(found[1]) * _UNITS[found[2]] if found else 0
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    _checked(text, number <= memory, f"exceeds the memory, {memory / 2**30:.3g}G")
    return number


def skew(text: str) -> str:
    """Read how shards differ: ``even``, ``empty`` or weights."""
    is_weights = re.fullmatch(r"\d+(:\d+)+", text) and text.strip("0:")
    return _checked(
        text,
        text in ("even", "empty") or is_weights,
        "is not a skew; use even, empty (the first rank has no rows), or weights that ranks use in "
        "turn, such as 1:8",
    )


def float_dtype(text: str) -> str:
    """Read the name of a floating dtype of torch."""
    dtype = getattr(torch, text, None)
    is_wide = isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize >= 2
    return _checked(text, is_wide, "is not a dtype to measure; use float32, ...")


def _checked(text: str, is_right: object, words: str) -> str:
    if not is_right:
        raise argparse.ArgumentTypeError(f"{text!r} {words}")
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


def number_of(count: int, noun: str) -> str:
    """Return a count with its noun in the right number.

    >>> number_of(1, "rank"), number_of(2000, "rank")
    ('1 rank', '2,000 ranks')
    """
    return f"{count:,} {noun}{'s' * (count != 1)}"


def progress(words: str) -> None:
    """Show on a terminal what is being done; an empty text removes it."""
    if sys.stderr.isatty():
        print(f"\r{words:<60}\r", end="", file=sys.stderr, flush=True)
