"""Pages that lie elsewhere in the repository, READMEs of examples for one, come into the docs.

They are copied into ``generated/``, with links that lead to the same places from there.
"""

import os
import re
from pathlib import Path

_LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")


def _pages(root):
    """Return the page that each file becomes."""
    generated = root / "docs" / "generated"
    examples = (root / "examples").glob("*/README.md")
    return {
        root / "CHANGELOG.md": generated / "changelog.md",
        root / "CONTRIBUTING.md": generated / "contributing.md",
        root / "examples" / "README.md": generated / "examples" / "index.md",
        **{file: generated / "examples" / f"{file.parent.name}.md" for file in sorted(examples)},
    }


def _moved(file, pages):
    """Return the text of a file with links as they are from its page; folders are no links."""

    def link(found):
        words, path, anchor = found.groups(default="")
        target = (file.parent / path).resolve()
        if target.is_dir():
            return words
        there = os.path.relpath(pages.get(target, target), pages[file].parent)
        return f"[{words}]({there}{anchor})"

    return _LINK.sub(link, file.read_text())


def _contents(pages, index):
    names = [page.stem for page in pages.values() if page.parent == index.parent and page != index]
    return "\n".join(["", "```{toctree}", ":hidden:", "", *names, "```", ""])


def write(app, config):
    """Write the pages that have changed; Sphinx reads no others again."""
    pages = _pages(Path(app.srcdir).parent)
    for file, page in pages.items():
        text = _moved(file, pages)
        if page.stem == "index":
            text += _contents(pages, page)
        page.parent.mkdir(parents=True, exist_ok=True)
        if not page.exists() or page.read_text() != text:
            page.write_text(text)


def setup(app):
    app.connect("config-inited", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
