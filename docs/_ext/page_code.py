"""The code on pages: its blocks, and what they print."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any


def blocks_of(page: Path, language: str = "python") -> list[str]:
    """Return the blocks of a page in this language."""
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def run(block: str, names: dict[str, Any]) -> str:
    """Run one block with these names, and return the text that this process prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block, "page", "exec"), names)
    return printed.getvalue().strip()
