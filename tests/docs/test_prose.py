"""Plain English on every page."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILT = {"generated", "_build"}  # copies of pages, which the build makes
PAGES = [
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md"),
    *(
        str(page.relative_to(ROOT))
        for pattern in (
            *("docs/**/*.md", "docs/**/*.rst"),
            *("docs/tutorials/[0-9]*.py", "examples/**/README.md"),
        )
        for page in sorted(ROOT.glob(pattern))
        if not BUILT & set(page.parts)
    ),
]
COLUMNS = 84  # of code: wider lines are cut on the built page
WORDS = 30  # per sentence
ENDS = re.compile(r"(?:(?<=[.!?:])|(?<=[.][)*])|(?<=[.]\*\*)) (?=[A-Z*])")  # of sentences

AMOUNTS = (
    "bytes|rows|messages|times|copy|file|thread|numbers?|entry|value|one|seconds?|m?s|[KMG]i?B"
)
HABITS = {
    "name the thing": r"\b(nobody|somebody|whoever|whatever)\b|^(What|Who|Where)\b[^?]*$",
    "software does not talk or know": r"(?i)\b(tells?|told|believed?|knows|hears?)\b",
    "write per": rf"\b({AMOUNTS}) an? (rank|row|step|layer|call|token|node|atom|second)\b",
    "return a noun": r"\bReturn (what|how|who|which)\b",
    "write inside or outside": r"\b(inside|outside) of\b",
    "write the plain word": r"\b(anew|mend|alike|shared out|under way|will do|nor|tell apart)\b",
    "write use": r"(?:^|[.:;] )Take (?!away)",
    "name the subject": r"^(That|Those) of\b",
    "name the object": r"\b(of|by|in|from|for|with|than|compare|says?|sees?|shows?|is|are) what\b",
    "write each": r"\b(them|these) each\b",
    "repeat the noun": r"\b(is|are|be) (that|those) of\b",
    "write is not": r"(?<![Tt]here )\b(is|are) no (?!longer\b)",
    "write return or another verb": r"\bgives?\b",
    "write the number": r"\bso (many|much)\b",
    "write also or should": r"\b(besides|shall)\b",
    "write without idiom": r"\b(off the root|turned round|narrow floats?|once more|many a)\b",
    "write continue": r"\b(go|goes|went) on\b",
    "a heading is a task or a noun": r"^#+ (What|Where|Who|When)\b",
}


def text_of(page):
    """Return the prose and the code of a page, as lists of lines."""
    text = (ROOT / page).read_text()
    if page.endswith(".py"):
        opening, text = re.fullmatch(r'"""\n(.*?)"""\n(.*)', text, re.DOTALL).groups()
        blocks = re.findall(r"# %%\n((?:#[^\n]*\n)+)", text)
        prose = "\n\n".join(
            [opening, *(re.sub(r"^# ?", "", block, flags=re.M) for block in blocks)]
        )
        shown = re.sub(r"# sphinx_gallery_start_ignore.*?_end_ignore", "", text, flags=re.DOTALL)
        return prose, [line for line in shown.splitlines() if not line.startswith("#")]
    code = re.findall(r"^```\w+\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    indented = re.findall(r"^ {4}\S.*", text, re.MULTILINE)
    prose = re.sub(r"^```.*?^```|^<!--.*?-->", "", text, flags=re.DOTALL | re.MULTILINE)
    prose = re.sub(r"^( {4}|:::|:link).*", "", prose, flags=re.MULTILINE)
    return prose, [*"\n".join(code).splitlines(), *indented]


def sentences_of(prose):
    """Return the sentences of paragraphs, list items and table cells, without inline code."""
    prose = re.sub(r"``?[^`]+``?", "Code", prose)
    prose = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", prose)
    prose = re.sub(r"\n(?=[#|]|- |\d\. )|(?<=[|])\n|\|", "\n\n", prose)
    for paragraph in re.split(r"\n\s*\n", prose):
        yield from ENDS.split(" ".join(paragraph.split()))


@pytest.mark.parametrize("page", PAGES)
def test_sentences_are_plain(page):
    prose, _ = text_of(page)
    found = []
    for sentence in sentences_of(prose):
        found += [f"{why}: {sentence}" for why, sign in HABITS.items() if re.search(sign, sentence)]
        if len(sentence.split()) > WORDS:
            found.append(f"{len(sentence.split())} words: {sentence}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", PAGES)
def test_code_fits_the_page(page):
    _, code = text_of(page)
    assert [line for line in code if len(line) > COLUMNS] == []


def test_installation_starts_from_a_clone():
    """The name varcomm is not on a package index: another project could register it."""
    files = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("docs/**/*.rst"), *ROOT.glob("varcomm/**/*.py")]
    files += [ROOT / page for page in PAGES]
    found = [file for file in files if 'install "varcomm' in file.read_text()]
    assert not [file for file in found if not BUILT & set(file.parts)]
