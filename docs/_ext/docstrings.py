"""What docstrings, which are read in a terminal as well, need to be read as reStructuredText.

Shapes have stars, as ``(n, *F)``: they are no emphasis. References are numbered from one in each
docstring, and a page has many.
"""

import re

_STAR = re.compile(r"(``.*?``|`[^`]*`)|\*(?=[A-Z]\b)")
_REFERENCE = re.compile(r"(?<=\[)(\d+)(?=\]_)|(?<=^\.\. \[)(\d+)(?=\])")


def prepare(app, what, name, obj, options, lines):
    label = re.sub(r"\W", "_", name)
    for place, line in enumerate(lines):
        if line.lstrip().startswith((">>>", "...")):
            continue
        starred = _STAR.sub(lambda found: found[1] or r"\*", line)
        lines[place] = _REFERENCE.sub(lambda found: f"#{label}_{found[0]}", starred)


def setup(app):
    app.setup_extension("sphinx.ext.autodoc")
    # before napoleon, which makes sections of them
    app.connect("autodoc-process-docstring", prepare, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
