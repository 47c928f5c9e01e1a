"""A release has everything, also `models`, which lies elsewhere; PyG itself may be missing."""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOT_SOURCES = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "out")

IMPORT_ALL = """
import importlib, pkgutil, varcomm, varcomm.models
for module in pkgutil.walk_packages(varcomm.__path__, "varcomm."):
    importlib.import_module(module.name)
print(varcomm.models.MeshGraphNet.__module__, varcomm.__file__)
"""


def run(*command, **more):
    done = subprocess.run(command, capture_output=True, text=True, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


WITHOUT_PYG = """
import pydoc, sys
sys.modules["torch_geometric"] = None
import varcomm
assert not hasattr(varcomm, "graph")
assert "all_gather_v" in pydoc.render_doc(varcomm)
assert "class GPT" in pydoc.plain(pydoc.render_doc(varcomm.models))
for code, builtin in (
    ("varcomm.graph.partition", AttributeError),
    ("import varcomm.ase", ImportError),
    ("import varcomm.graph", ImportError),
    ("from varcomm import graph", ImportError),
    ("from varcomm.graph import partition", ImportError),
    ("from varcomm.models import MeshGraphNet", ImportError),
    ("varcomm.models.MeshGraphNet", ImportError),
):
    try:
        exec(code)
    except varcomm.MissingPackageError as error:
        assert isinstance(error, builtin), code
        assert 'needs PyTorch Geometric: pip install torch_geometric' in str(error), code
    else:
        raise AssertionError(code)
"""


@pytest.mark.slow
def test_release_builds_and_its_wheel_has_all_modules(tmp_path):
    """The wheel is built from the source release, as `python -m build` does."""
    clean, dist, target = tmp_path / "clean", tmp_path / "dist", tmp_path / "installed"
    shutil.copytree(ROOT, clean, ignore=NOT_SOURCES)
    for built in ("build", "dist"):  # not varcomm/graph/build
        shutil.rmtree(clean / built, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", str(dist), str(clean))

    (release,) = dist.glob("*.tar.gz")
    with tarfile.open(release) as archive:
        files = {member.name.partition("/")[2] for member in archive if member.isfile()}
    sources = {str(p.relative_to(clean)) for p in clean.rglob("*") if p.is_file()}
    assert {p for p in sources - files if not p.startswith(".")} == set()

    (wheel,) = dist.glob("*.whl")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
    run(*pip, "install", "--no-deps", "--target", str(target), str(wheel))
    environ = os.environ | {"PYTHONPATH": str(target)}
    said = run(sys.executable, "-c", IMPORT_ALL, cwd=tmp_path, env=environ)
    assert said.split() == ["varcomm.models.mesh_graph_net", str(target / "varcomm/__init__.py")]
    assert (target / "varcomm" / "py.typed").exists()
    installed = {p.relative_to(target / "varcomm") for p in target.glob("varcomm/**/*.py")}
    expected = {p.relative_to(ROOT / "varcomm") for p in ROOT.glob("varcomm/**/*.py")}
    expected |= {p.relative_to(ROOT) for p in ROOT.glob("models/*.py")}
    assert installed == expected


def test_without_pyg_its_rooms_say_what_to_install():
    run(sys.executable, "-c", WITHOUT_PYG, cwd=ROOT)
