"""The code on pages that explain runs from top to bottom, and prints what its comments say."""

import contextlib
import io
import re
from pathlib import Path

import pytest

import varcomm

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGES = [
    str(page.relative_to(DOCS))
    for name in ("how_it_works", "coming_from")
    for page in sorted((DOCS / name).glob("*.md"))
    if page.name != "index.md"
] + ["sharp_bits.md", "start.md"]


def comments_of(block):
    """Return the comments below calls of `print`: the lines that these calls print."""
    lines, printing = [], False
    for line in block.splitlines():
        if line.startswith("#"):
            assert printing, f"nothing is printed above {line!r}"
            lines.append(line.removeprefix("#").removeprefix(" "))
        else:
            printing = line.startswith(("print(", "    print(")) or (printing and not line)
    return "\n".join(lines)


def run(block, names):
    """Run one block, and return the text that it prints in this process."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block, "page", "exec"), names)
    return printed.getvalue().strip()


@pytest.mark.parametrize("page", PAGES)
def test_pages(page, worlds, monkeypatch):
    monkeypatch.setattr(varcomm, "launch", lambda fn, size, *args: worlds.run(size, fn, *args))
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert blocks, "a page that explains has an example"
    names = {"__name__": "__main__"}  # so that functions travel to the ranks by value
    for block in blocks:
        assert ("print(" in block) == bool(comments_of(block)), block
        assert run(block, names) == comments_of(block)


def test_that_a_wrong_comment_is_seen():
    block = 'print("two")\n# three'
    assert (run(block, {}), comments_of(block)) == ("two", "three")
