"""A wheel, installed elsewhere, has everything: `models` lies outside `varcomm` in the sources."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = ("varcomm", "models", "pyproject.toml", "setup.py", "README.md", "LICENSE")

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


def test_wheel_has_all_modules_and_the_marker_of_types(tmp_path):
    clean, target = tmp_path / "clean", tmp_path / "installed"
    clean.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, clean / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, clean)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
    run(*pip, "wheel", "--no-deps", "-w", str(tmp_path), str(clean))
    (wheel,) = tmp_path.glob("*.whl")
    run(*pip, "install", "--no-deps", "--target", str(target), str(wheel))
    environ = os.environ | {"PYTHONPATH": str(target)}
    said = run(sys.executable, "-c", IMPORT_ALL, cwd=tmp_path, env=environ)
    assert said.split() == ["varcomm.models.mesh_graph_net", str(target / "varcomm/__init__.py")]
    assert (target / "varcomm" / "py.typed").exists()
    installed = {p.relative_to(target / "varcomm") for p in target.glob("varcomm/**/*.py")}
    expected = {p.relative_to(ROOT / "varcomm") for p in ROOT.glob("varcomm/**/*.py")}
    expected |= {p.relative_to(ROOT) for p in ROOT.glob("models/*.py")}
    assert installed == expected
