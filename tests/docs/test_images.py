"""Each picture of a page exists, has words for those who do not see it, and room for its labels."""

import re
import runpy
from pathlib import Path

import pytest
from matplotlib import rc_context
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.image import imread

from varcomm import _figures as figures

ROOT = Path(__file__).parents[2]
PAGES = [
    *ROOT.glob("*.md"),
    *(page for page in (ROOT / "docs").rglob("*.md") if "generated" not in page.parts),
    *(ROOT / "examples").rglob("README.md"),
]
MARKDOWN = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)[^)]*\)")
DIRECTIVE = re.compile(r"```+\{(?:image|figure)\} (\S+)\n((?::.*\n)*)")
HTML = re.compile(r"<img\b[^>]*>")


def pictures(text):
    """Return (path, alternative text) of each picture."""
    text = re.sub(r"^```(?!\{).*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    yield from ((path, words) for words, path in MARKDOWN.findall(text))
    for path, options in DIRECTIVE.findall(text):
        words = re.search(r":alt: (.*)", options)
        yield path, words[1] if words else ""
    for tag in HTML.findall(text):
        found = dict(re.findall(r'(\w+)="([^"]*)"', tag))
        yield found.get("src", ""), found.get("alt", "")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pictures_exist_and_have_words(page):
    for path, words in pictures(page.read_text()):
        assert len(words.split()) >= 4, f"{path} needs an alternative text"
        if not path.startswith("http"):
            assert (page.parent / path).exists(), path


def test_pictures_are_wide_enough_and_have_twins():
    """Twice the 720 pixels of a page, light and dark."""
    shown = {
        (page.parent / path).resolve() for page in PAGES for path, _ in pictures(page.read_text())
    }
    for path in (each for each in shown if each.suffix == ".png"):
        light, dark = imread(path), imread(figures.twin(path))
        assert light.shape[1] == 1440, path
        assert light.shape == dark.shape, path
        assert light[0, 0, 0] > 0.9 > 0.1 > dark[0, 0, 0], path


def test_a_twin_has_the_colours_of_a_dark_page(tmp_path):
    colours = {figures.INK: 3.5, figures.RANKS[0]: 2.5, figures.CURVES[1]: 1.5, "#000000": 0.5}
    with rc_context(figures.style()):
        figure = Figure((2, 2), dpi=100, layout="constrained")
        panel = figure.subplots()
        for colour, y in colours.items():
            panel.barh(y, 1, color=colour)
        panel.set(xlim=(0, 1), ylim=(0, 4))
        figures.save(figure, tmp_path / "a.png")
    light, dark = (imread(tmp_path / f"{name}.png")[..., :3] for name in ("a", "a-dark"))
    assert light.shape == dark.shape
    pairs = [("#ffffff", figures.ON_DARK["#ffffff"])]
    pairs += [(colour, figures.ON_DARK.get(colour, colour)) for colour in colours]
    for one, other in pairs:
        places = [
            (abs(picture - to_rgb(colour)) < 0.01).all(axis=-1)
            for picture, colour in ((light, one), (dark, other))
        ]
        assert places[0].sum() > 1000
        assert (places[0] == places[1]).mean() > 0.99


def test_text_is_readable():
    """A contrast of 4.5:1 or more on light and dark pages, and of black on ranks."""
    for name in (figures.INK, figures.PALE, figures.WRONG):
        assert contrast(name, "#ffffff") > 4.5
        assert contrast(figures.ON_DARK[name], figures.ON_DARK["#ffffff"]) > 4.5
    assert all(contrast("#000000", colour) > 4.5 for colour in figures.RANKS)


def contrast(*colours):
    """As the accessibility guidelines of the W3C define it."""
    levels = [
        [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
        for colour in colours
    ]
    low, high = sorted(0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in levels)
    return (high + 0.05) / (low + 0.05)


def test_pictures_of_collectives_show_a_run(worlds):
    drawn = runpy.run_path(str(ROOT / "docs" / "draw_collectives.py"))
    expected = drawn["pictures"](lambda fn, *args: worlds.run(3, fn, *args))
    found = {file.name: file.read_text() for file in drawn["FOLDER"].glob("*.svg")}
    assert found == expected, "run: python docs/draw_collectives.py"
