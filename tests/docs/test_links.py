"""Links of pages lead to files and headings of the repository. No network is used."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILT = {"generated", "_build"}
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *(page for page in sorted(ROOT.glob("docs/**/*.md")) if not BUILT & set(page.parts)),
    *sorted(ROOT.glob("examples/**/README.md")),
]
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")


def text_of(page):
    """Return a page without its code."""
    return re.sub(r"```.*?```|`[^`\n]+`", "Code", page.read_text(), flags=re.DOTALL)


def anchors_of(page):
    """Return the anchors that headings of a page have."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    broken = []
    for path, anchor in LINK.findall(text_of(page)):
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            broken.append(f"{path}: no such file")
        elif anchor and target.suffix == ".md" and anchor not in anchors_of(target):
            broken.append(f"{path}#{anchor}: no such heading")
    assert not broken, "\n".join(broken)


def test_installation_starts_from_a_clone():
    """The name varcomm is not on a package index: another project could register it."""
    files = [*PAGES, *ROOT.glob("docs/**/*.rst"), *ROOT.glob("varcomm/**/*.py")]
    found = [file for file in files if 'install "varcomm' in file.read_text()]
    assert not [file for file in found if not BUILT & set(file.parts)]


def test_broken_links_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Title\n[a](missing.md) [b](page.md#gone) [c](page.md#title)\n")
    with pytest.raises(
        AssertionError, match=r"missing\.md: no such file\n *page\.md#gone: no such"
    ):
        test_links_lead_somewhere(page)
