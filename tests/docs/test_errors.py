"""Headings of the errors page quote messages of the library."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting" / "errors.md"


def strings_of(file):
    """Yield the strings of a module; values in f-strings are left out."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "{}".join(str(v.value) for v in node.values if isinstance(v, ast.Constant))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_quoted_messages_exist():
    quoted = re.findall(r"^### .*", PAGE.read_text(), re.MULTILINE)
    quoted = [words for heading in quoted for words in re.findall("`(.*?)`", heading)]
    known = "\n".join(text for file in ROOT.glob("varcomm/**/*.py") for text in strings_of(file))
    assert len(quoted) > 25
    assert [words for words in quoted if words not in known] == []
