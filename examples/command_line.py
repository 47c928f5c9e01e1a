"""Checks of the options of the examples, without the slow import of torch."""

import argparse
from pathlib import Path


def positive(text: str, least: int = 1) -> int:
    """Return an integer that is at least `least`."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"need a whole number from {least} on, got {text!r}")
    return int(text)


def image(text: str) -> Path:
    """Return the path of a picture."""
    if Path(text).suffix not in {".png", ".pdf", ".svg"}:
        raise argparse.ArgumentTypeError(f"need a name that ends in .png, .pdf or .svg: {text!r}")
    return Path(text)


def hindrance(picture: Path) -> str | None:
    """Return the reason why the picture cannot be written, or None; leave no file."""
    try:
        was_there = picture.exists()
        picture.parent.mkdir(parents=True, exist_ok=True)
        picture.open("ab").close()
    except OSError as error:
        return f"argument --picture: cannot write {str(picture)!r}: {error.strerror}"
    if not was_there:
        picture.unlink()
    return None
