"""What the options of the examples may be; without torch, which takes seconds to import."""

import argparse
from pathlib import Path


def positive(text: str, least: int = 1) -> int:
    """Return a whole number from 1 on, or from `least`."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"need a whole number from {least} on, got {text!r}")
    return int(text)


def image(text: str) -> Path:
    """Return the name of a picture."""
    if Path(text).suffix not in {".png", ".pdf", ".svg"}:
        raise argparse.ArgumentTypeError(f"need a name that ends in .png, .pdf or .svg: {text!r}")
    return Path(text)


def hindrance(picture: Path) -> str | None:
    """Say why the picture could not be written once all is done; leaves no file behind."""
    try:
        was_there = picture.exists()
        picture.parent.mkdir(parents=True, exist_ok=True)
        picture.open("ab").close()
    except OSError as error:
        return f"argument --picture: cannot write {str(picture)!r}: {error.strerror}"
    if not was_there:
        picture.unlink()
    return None
