"""Tables of names and the first lines of their docstrings, on the pages of the reference.

Each page begins with a table of its names. ``.. names: graph/meshes`` stands for the table of
another page.
"""

import re
from pathlib import Path

_REFERENCE = Path(__file__).parents[1] / "reference"
_MODULE = re.compile(r"^\.\. currentmodule:: (\S+)\n", re.MULTILINE)
_NAMES = re.compile(r"^\.\. auto(?:function|class|exception):: (\S+)$", re.MULTILINE)
_OTHERS = re.compile(r"^\.\. names: (\S+)$", re.MULTILINE)


def _table(text):
    """Return a table of the names of a page, or "" if it has none."""
    module, names = _MODULE.search(text), _NAMES.findall(text)
    full = [name if name.startswith("varcomm.") else f"{module[1]}.{name}" for name in names]
    lines = [".. autosummary::", "   :nosignatures:", "", *(f"   ~{name}" for name in full)]
    return "\n".join(lines) + "\n" if names else ""


def _of_other(found):
    """Return the table of another page below its title."""
    text = (_REFERENCE / f"{found[1]}.rst").read_text()
    title = re.search(r"^(.+)\n=+\n", text, re.MULTILINE)[1]
    return f".. rubric:: :doc:`{title} </reference/{found[1]}>`\n\n{_table(text)}"


def add_tables(app, name, source):
    """Insert the table below the line that names the page's module."""
    if name.startswith("reference/"):
        module = _MODULE.search(source[0])
        if len(_NAMES.findall(source[0])) > 1:
            source[0] = source[0].replace(module[0], f"{module[0]}\n{_table(source[0])}\n", 1)
        source[0] = _OTHERS.sub(_of_other, source[0])


def setup(app):
    app.setup_extension("sphinx.ext.autosummary")
    app.connect("source-read", add_tables)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
