"""The code on pages that explain runs from top to bottom, and prints what its comments say."""

import contextlib
import io
import re
from pathlib import Path

import pytest

import varcomm

DOCS = Path(__file__).parent.parent.parent / "docs"
FOLDERS = ("how_it_works", "coming_from")
PAGES = sorted(
    str(page.relative_to(DOCS)) for name in FOLDERS for page in (DOCS / name).glob("*.md")
)
PAGES.remove("coming_from/index.md")
PAGES += ["sharp_bits.md", "start.md"]


def blocks_of(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def said(block):
    """Return what the lines of comments below a call of `print` say that it prints."""
    lines, printing = [], False
    for line in block.splitlines():
        if line.startswith("#"):
            assert printing, f"nothing is printed above {line!r}"
            lines.append(line.removeprefix("#").removeprefix(" "))
        else:
            printing = line.startswith(("print(", "    print(")) or (printing and not line)
    return "\n".join(lines)


def run(block, names):
    """Run one block, and return what it prints in this process."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block, "page", "exec"), names)
    return printed.getvalue().strip()


@pytest.mark.parametrize("page", PAGES)
def test_pages(page, worlds, monkeypatch):
    monkeypatch.setattr(varcomm, "launch", lambda fn, size, *args: worlds.run(size, fn, *args))
    blocks = blocks_of(DOCS / page)
    assert blocks, "a page that explains has an example"
    names = {"__name__": "__main__"}  # so that functions travel to the ranks by value
    for block in blocks:
        assert run(block, names) == said(block)


def test_every_example_says_what_it_prints():
    """A block that prints and says nothing would not be compared with anything."""
    for page in PAGES:
        for block in blocks_of(DOCS / page):
            assert ("print(" in block) == bool(said(block)), f"{page}:\n{block}"


def test_that_a_wrong_comment_is_seen():
    block = 'print("two")\n# three'
    assert (run(block, {}), said(block)) == ("two", "three")
