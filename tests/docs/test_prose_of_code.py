"""Plain English in docstrings, comments and error messages."""

import ast
import re
from pathlib import Path

import pytest

from tests.docs.test_prose import BUILT, HABITS, WORDS, sentences_of

ROOT = Path(__file__).parents[2]
FILES = sorted(
    str(path.relative_to(ROOT))
    for of in ("varcomm", "models", "examples", "benchmarks", "docs")
    for path in (ROOT / of).rglob("*.py")
    if not BUILT & set(path.parts)
)
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def plain(docstring):
    """Return a docstring without examples, literal blocks, and the heads and terms of sections."""
    text = re.sub(r"^\s*>>> (.*\n)(.+\n?)*", "\n", docstring, flags=re.MULTILINE)
    text = re.sub(r"::\n\n( {4}.*\n?|\n)+", "\n\n", text)
    text = re.sub(r"^(\w[\w ]*)\n-{3,}$", "\n\n", text, flags=re.MULTILINE)
    text = re.sub(
        r"^(\S.* : .*|\w*(Error|Graph)\w*(, \w+Error)*|dict of .*)$", "\n\n", text, flags=re.M
    )
    text = re.sub(r"^ *[-*] ", "\n\n", text, flags=re.MULTILINE)
    return re.sub(r":(?:py:)?\w+:(?=`)|\[\d\]_", "", text)


def texts_of(file):
    """Yield docstrings, comments, and the words of messages; of commands, every string."""
    source = (ROOT / file).read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and (docstring := ast.get_docstring(node)):
            yield plain(docstring)
        if isinstance(node, ast.Raise) or (isinstance(node, ast.Module) and "/cli/" in str(file)):
            words = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
            strings = (text for text in words if isinstance(text, str) and " " in text)
            # a help text has lists, whose entries are indented and have columns
            yield from (part for text in strings for part in re.split(r"\n\s*\n|\n? {2,}", text))
    yield from re.findall(r"(?:^|\s)# (.*)", source)


@pytest.mark.parametrize("file", FILES)
def test_sentences_are_plain(file):
    found = []
    for sentence in (each for text in texts_of(file) for each in sentences_of(text)):
        found += [f"{why}: {sentence}" for why, sign in HABITS.items() if re.search(sign, sentence)]
        if len(sentence.split()) > WORDS:
            found.append(f"{len(sentence.split())} words: {sentence}")
    assert not found, "\n".join(found)
