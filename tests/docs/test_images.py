"""Each picture of a page exists, and has an alternative text and a twin for dark pages."""

import json
import re
import runpy
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from PIL import Image

ROOT = Path(__file__).parents[2]
PAGES = [
    *ROOT.glob("*.md"),
    *(page for page in (ROOT / "docs").rglob("*.md") if "generated" not in page.parts),
    *(ROOT / "examples").rglob("README.md"),
]
BENCHMARKS = [
    page for page in sorted((ROOT / "docs" / "benchmarks").glob("*.md")) if page.stem != "index"
]
COMMANDS = (ROOT / "docs" / "reference" / "command_line.md").read_text()
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


def test_pictures_have_a_dark_twin():
    shown = {
        (page.parent / path).resolve() for page in PAGES for path, _ in pictures(page.read_text())
    }
    for path in (each for each in shown if each.suffix == ".png"):
        light, dark = imread(path), imread(path.with_stem(f"{path.stem}-dark"))
        assert light.shape == dark.shape, path
        assert light[0, 0, 0] > 0.9 > 0.1 > dark[0, 0, 0], path


def words_of(name):
    """Return the words of a picture and of its twin, as `dark.save` wrote them into the files."""
    paths = [ROOT / "docs" / "images" / f"{name}{part}.png" for part in ("", "-dark")]
    light, dark = (Image.open(path).text["Description"] for path in paths)
    assert light == dark
    return light


def test_pictures_of_partitions_have_the_numbers_of_their_pages():
    words = words_of("command_line")
    (nodes, cut, share), *_ = re.findall(
        r"^([\d,]+ nodes) and .*? by rcb$.*?^edges between ranks: (\d+) \((\S+ %)\)",
        COMMANDS,
        re.DOTALL | re.MULTILINE,
    )
    assert nodes in words
    assert f"{cut} edges between ranks ({share})" in words
    page = (ROOT / "docs" / "meshes.md").read_text()
    ranks, share = re.search(r"on (\d+) ranks: (\S+ %) of the edges are cut", page).groups()
    words = words_of("partition")
    assert f"{ranks} ranks" in words
    assert f"({share})" in words


def test_picture_of_the_halo_has_the_nodes_of_its_page():
    page = (ROOT / "docs" / "explanation" / "halo.md").read_text()
    rows = re.findall(r"^# \[(.*?)\] \[(.*?)\] \[\[", page, re.MULTILINE)
    words, numbers = words_of("halo"), []
    for owned, halo in rows:
        numbers += [*owned.split(", "), *halo.split(", ")]
    # the graph, the parts of ranks, and their rows
    assert sorted(re.findall(r"^\d$", words, re.MULTILINE)) == sorted([*"012345", *numbers * 2])


def test_picture_of_the_library_has_each_layer():
    drawn = runpy.run_path(str(ROOT / "docs" / "draw_library.py"))
    assert sorted(chain.from_iterable(drawn["layers"]())) == sorted(drawn["ROOMS"])
    listed = re.search(r"\n  COMMAND\n(.*?)\n\n", COMMANDS, re.DOTALL)[1]
    assert ", ".join(re.findall(r"^ +(\w+)", listed, re.MULTILINE)) in words_of("library")


@pytest.mark.parametrize("page", BENCHMARKS, ids=lambda page: page.stem)
def test_charts_of_benchmarks_have_the_numbers_of_their_pages(page):
    drawn = runpy.run_path(str(ROOT / "docs" / "draw_benchmarks.py"))
    path, _ = next(pictures(page.read_text()))
    assert path == f"../images/benchmarks/{page.stem}.png"
    shown = json.loads(Image.open(drawn["IMAGES"] / f"{page.stem}.png").text["numbers"])
    assert len(shown) == 64 if page.stem == "calls" else len(shown) > 2
    assert shown == drawn["numbers"](page.stem), f"run: python docs/draw_benchmarks.py {page.stem}"


def test_pictures_of_collectives_show_a_run(worlds):
    drawn = runpy.run_path(str(ROOT / "docs" / "draw_collectives.py"))
    expected = drawn["pictures"](lambda fn, *args: worlds.run(3, fn, *args))
    found = {file.name: file.read_text() for file in drawn["FOLDER"].glob("*.svg")}
    assert found == expected, "run: python docs/draw_collectives.py"


def test_picture_of_grids_shows_a_run(worlds):
    drawn = runpy.run_path(str(ROOT / "docs" / "draw_grids.py"))
    expected = drawn["pictures"](lambda fn, *args: worlds.run(3, fn, *args))
    assert {file: file.read_text() for file in expected} == expected, (
        "run: python docs/draw_grids.py"
    )


@pytest.mark.slow
def test_picture_of_equality_shows_a_run(worlds):
    drawn = runpy.run_path(str(ROOT / "docs" / "draw_equality.py"))
    shown = json.loads(Image.open(drawn["PICTURE"]).text["numbers"])
    assert drawn["difference"](shown) < 1e-14  # one curve, as the picture says
    found = drawn["numbers"](lambda fn, size: worlds.run(size, fn))
    assert shown.keys() == found.keys()
    for world, run in shown.items():
        again = found[world]
        np.testing.assert_allclose(again["losses"], run.pop("losses"), rtol=1e-9)
        assert {name: list(again[name]) for name in run} == run, "run: python docs/draw_equality.py"
        assert sum(run["sent"]) == drawn["fewest"](sum(run["halo"]))
