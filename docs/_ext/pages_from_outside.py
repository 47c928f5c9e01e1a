"""Copy pages from other folders of the repository, such as READMEs of examples, into the docs.

The copies are in ``generated/``, with adapted links. Links of other pages to these files, and to
tutorials, which are Python files, lead to their pages.
"""

import os
import re
from pathlib import Path

_LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)")


def _pages(docs):
    """Return the page of each file."""
    root, generated = docs.parent, docs / "generated"
    examples = sorted((root / "examples").glob("*/README.md"))
    return {
        root / "CHANGELOG.md": generated / "changelog.md",
        root / "CONTRIBUTING.md": generated / "contributing.md",
        root / "examples" / "README.md": generated / "examples" / "index.md",
        **{file: generated / "examples" / f"{file.parent.name}.md" for file in examples},
    }


def _linked(text, folder, there, pages):
    """Return a text with its links adapted to another folder."""

    def link(found):
        words, path, anchor = found.groups(default="")
        target = (folder / path).resolve()
        if target.is_dir():
            return words
        return f"[{words}]({os.path.relpath(pages.get(target, target), there)}{anchor})"

    return _LINK.sub(link, text)


def _contents(pages, index):
    names = [page.stem for page in pages.values() if page.parent == index.parent and page != index]
    return "\n".join(["", "```{toctree}", ":hidden:", "", *names, "```", ""])


def write(app, config):
    """Write the pages that have changed; Sphinx reads only these again."""
    pages = _pages(Path(app.srcdir))
    for file, page in pages.items():
        text = _linked(file.read_text(), file.parent, page.parent, pages)
        if page.stem == "index":
            text += _contents(pages, page)
        page.parent.mkdir(parents=True, exist_ok=True)
        if not page.exists() or page.read_text() != text:
            page.write_text(text)


def lead_to_pages(app, name, source):
    """Replace links to files that become pages by links to the pages."""
    docs, file = Path(app.srcdir), Path(app.env.doc2path(name))
    if file.suffix == ".md" and not name.startswith("generated/"):
        scripts = (docs / "tutorials").glob("[0-9]*.py")
        tutorials = {one: docs / "generated" / "tutorials" / f"{one.stem}.rst" for one in scripts}
        source[0] = _linked(source[0], file.parent, file.parent, _pages(docs) | tutorials)


def setup(app):
    app.connect("config-inited", write)
    app.connect("source-read", lead_to_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
