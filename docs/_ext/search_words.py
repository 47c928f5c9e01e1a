"""Words that readers search for: ``<!-- search: deadlock, NCCL hang -->`` below a page's title.

The words become main index entries, which the search of the built pages ranks first.
"""

import re

_COMMENT = re.compile(r"^<!-- search: (.*?) -->$", re.DOTALL | re.MULTILINE)


def _index(found):
    words = ", ".join(f"! {' '.join(word.split())}" for word in found[1].split(","))
    return f"```{{index}} {words}\n```"


def make_entries(app, name, source):
    """Replace the comment of a Markdown page by index entries."""
    source[0] = _COMMENT.sub(_index, source[0])


def setup(app):
    app.connect("source-read", make_entries)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
