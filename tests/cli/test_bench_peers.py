"""Libraries that may be missing, or be there without what they import."""

import sys
from pathlib import Path

import pytest
import torch

from varcomm.cli.bench.case import Case
from varcomm.cli.bench.layout import Layout
from varcomm.cli.bench.peers import anemoi, physicsnemo
from varcomm.cli.bench.peers.cannot import CannotError
from varcomm.cli.bench.peers.offer import versions
from varcomm.cli.bench.plot import checked_figure
from varcomm.errors import ArgumentError, MissingPackageError

CPU = torch.device("cpu")
CASE = Case("ops", "indexed_all_to_all_v", False, 2, "gloo", "float32", 768, "1:2")

# A library of that name whose packages need what is not installed, but whose functions do not.
FILES = {
    "physicsnemo/__init__.py": "import a_package_that_nobody_has",
    "physicsnemo/core/__init__.py": "raise ImportError",
    "physicsnemo/core/check.py": "",
    "physicsnemo/distributed/__init__.py": "raise ImportError",
    "physicsnemo/distributed/utils.py": (
        "import treelib, physicsnemo.core.check\nimport torch.distributed as dist\n"
    ),
    "physicsnemo/distributed/autograd.py": """
import torch
from . import utils
def indexed_all_to_all_v(x, indices, sizes):
    got = [x.new_empty(row[utils.dist.get_rank()], x.shape[1]) for row in sizes]
    utils.dist.all_to_all(got, [x[index] for index in indices])
    return torch.cat(got)
""",
    "anemoi/models/distributed/graph.py": "import a_package_that_nobody_has",
}


@pytest.fixture
def library(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def exchanged(rank, folder):
    sys.path.insert(0, folder)
    try:
        layout = Layout.of(CASE, rank, CPU)
        way = physicsnemo.way(CASE, layout)
        x = layout.values(rank, layout.mine, "x")
        others = layout.values(1 - rank, layout.sizes[1 - rank], "x")
        return way(x), others[layout.indices(1 - rank)[rank]], Path(physicsnemo.__file__).name
    finally:
        sys.path.remove(folder)
        for name in [name for name in sys.modules if name.split(".")[0] == "physicsnemo"]:
            del sys.modules[name]
        physicsnemo._library.cache_clear()


def test_a_library_runs_without_what_its_packages_import(library, worlds):
    for got, expected, _ in worlds.run(2, exchanged, str(library)):
        assert torch.equal(got, expected)


def test_what_a_library_lacks_is_told(library):
    layout = Layout.of(CASE, 0, CPU)
    with pytest.raises(CannotError, match="cannot be imported: No module named 'a_package_that"):
        anemoi.way(CASE, layout)


@pytest.mark.parametrize("peer", [anemoi, physicsnemo])
def test_a_library_that_is_not_there_is_told(peer, monkeypatch):
    for name in ("anemoi", "anemoi.models", "anemoi.models.distributed"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    physicsnemo._library.cache_clear()
    with pytest.raises(CannotError, match=f"^{peer.PACKAGE} is not installed$"):
        peer.way(CASE, Layout.of(CASE, 0, CPU))


def test_versions_are_told_of_packages_alone():
    assert set(versions()) == {"anemoi-models", "nvidia-physicsnemo"}


def test_a_picture_needs_matplotlib_and_a_format(monkeypatch):
    with pytest.raises(ArgumentError, match=r"name a file that ends in png, svg, pdf"):
        checked_figure(Path("run.gif"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackageError, match=r'pip install "varcomm\[plot\]"'):
        checked_figure(Path("run.png"))
