"""Types of command-line arguments, and a line of progress."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import TypeVar

__all__ = ["did_you_mean", "nbytes", "one_of", "positive", "progress", "separated", "skew"]

T = TypeVar("T")

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def separated(read: Callable[[str], T], by: str = ",") -> Callable[[str], list[T]]:
    """Return a type that reads several values with commas, or another text, between them."""
    return lambda text: [read(part) for part in text.split(by)]


def one_of(names: Sequence[str], noun: str) -> Callable[[str], str]:
    """Return a type that accepts some names."""

    def read(text: str) -> str:
        words = f"is not {noun}{did_you_mean(text, names)}; use {', '.join(names)}"
        return _checked(text, text in names, words)

    return read


def did_you_mean(text: str, names: Iterable[str]) -> str:
    """Return a question with the name that is spelt like `text`, or "".

    >>> did_you_mean("metiss", ["metis", "rcb"])
    ' (did you mean metis?)'
    """
    found = get_close_matches(text, names, 1)
    return f" (did you mean {found[0]}?)" if found else ""


def positive(text: str) -> int:
    """Read a positive integer."""
    return int(_checked(text, text.isdecimal() and int(text), "is not a positive integer"))


def nbytes(text: str) -> int:
    """Read a number of bytes.

    >>> nbytes("768"), nbytes("16K"), nbytes("1M")
    (768, 16384, 1048576)
    """
    found = re.fullmatch(r"([1-9]\d{0,14})([KMG]?)", text.upper())
    _checked(text, found, "is not a number of bytes; use 768, 16K or 1M")
    return int(found[1]) * _UNITS[found[2]] if found else 0


def skew(text: str) -> str:
    """Read how shards differ: ``even``, ``empty`` or weights."""
    is_weights = re.fullmatch(r"\d+(:\d+)+", text) and text.strip("0:")
    words = "is not a skew; use even, empty (the first rank has no rows), or weights such as 1:8"
    return _checked(text, text in ("even", "empty") or is_weights, words)


def _checked(text: str, is_right: object, words: str) -> str:
    if not is_right:
        raise argparse.ArgumentTypeError(f"{text!r} {words}")
    return text


def progress(words: str) -> None:
    """Show on a terminal what is being done; an empty text removes it."""
    if sys.stderr.isatty():
        print(f"\r{words:<60}\r", end="", file=sys.stderr, flush=True)
