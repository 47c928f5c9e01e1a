"""A table at the top of each reference page: names, and the first lines of docstrings."""

import re

_MODULE = re.compile(r"^\.\. currentmodule:: (\S+)\n", re.MULTILINE)
_NAMES = re.compile(r"^\.\. auto(?:function|class|exception):: (\S+)$", re.MULTILINE)


def add_table(app, name, source):
    """Insert the table below the line that names the page's module."""
    names = _NAMES.findall(source[0])
    if name.startswith("reference/") and len(names) > 1:
        module = _MODULE.search(source[0])
        names = [one.removeprefix(f"{module[1]}.") for one in names]
        table = "\n".join(
            [".. autosummary::", "   :nosignatures:", "", *(f"   {n}" for n in names)]
        )
        source[0] = source[0].replace(module[0], f"{module[0]}\n{table}\n", 1)


def setup(app):
    app.setup_extension("sphinx.ext.autosummary")
    app.connect("source-read", add_table)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
