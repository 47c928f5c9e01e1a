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


def _table(names):
    lines = [".. autosummary::", "   :nosignatures:", "", *(f"   {name}" for name in names)]
    return "\n".join(lines) + "\n"


def _of_other(found):
    """Return the table of another page below its title."""
    text = (_REFERENCE / f"{found[1]}.rst").read_text()
    title = re.search(r"^(.+)\n=+\n", text, re.MULTILINE)[1]
    module = _MODULE.search(text)[1]
    names = [f"~{module}.{name.removeprefix(f'{module}.')}" for name in _NAMES.findall(text)]
    return f".. rubric:: :doc:`{title} </reference/{found[1]}>`\n\n{_table(names)}"


def add_tables(app, name, source):
    """Insert the table below the line that names the page's module."""
    if name.startswith("reference/"):
        module, names = _MODULE.search(source[0]), _NAMES.findall(source[0])
        if len(names) > 1:
            table = _table(name.removeprefix(f"{module[1]}.") for name in names)
            source[0] = source[0].replace(module[0], f"{module[0]}\n{table}\n", 1)
        source[0] = _OTHERS.sub(_of_other, source[0])


def setup(app):
    app.setup_extension("sphinx.ext.autosummary")
    app.connect("source-read", add_tables)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
