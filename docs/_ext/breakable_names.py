"""Allow line breaks in long names of tables, after an underscore or a dot."""

import re

_CELL = re.compile(r"<td\b.*?</td>", re.DOTALL)
_NAME = re.compile(r'(?<=<span class="pre">)[^<]+')
_PLACE = re.compile(r"(?<=[a-z0-9_]{4})([_.(=/])(?=[a-z0-9*])")


def allow_breaks(app, page, template, context, document):
    """Insert invisible places for breaks into the code of table cells."""

    def in_name(found):
        return _PLACE.sub(r"\1<wbr>", found[0])

    if body := context.get("body"):
        context["body"] = _CELL.sub(lambda cell: _NAME.sub(in_name, cell[0]), body)


def setup(app):
    app.connect("html-page-context", allow_breaks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
