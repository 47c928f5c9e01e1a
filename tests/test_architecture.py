"""The rules about files and imports that no single module can break alone."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_rooms_import_only_what_stands_to_their_right(tmp_path):
    """On a copy that has `models` where an installation has it: the linter reads folders."""
    without_caches = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "varcomm", tmp_path / "varcomm", ignore=without_caches)
    shutil.copytree(ROOT / "models", tmp_path / "varcomm" / "models", ignore=without_caches)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    linter = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = subprocess.run(
        [sys.executable, "-c", linter, "--no-cache"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_import_leaves_optional_packages_alone():
    optional = {
        "torch_geometric",
        "pymetis",
        "matplotlib",
        "cloudpickle",
        "kahip",
        "meshio",
        "scipy",
        "torch.distributed.checkpoint",  # half a second
    }
    code = f"import sys, varcomm; sys.exit(str(sorted({optional} & sys.modules.keys())))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.strip() == "[]"


def imports_of(path):
    """Return the modules that a file imports as it loads: not in functions, not for types alone."""
    found, todo = set(), [*ast.parse(path.read_text()).body]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            todo += node.orelse
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            todo += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
    return found


def test_no_modules_import_each_other_in_a_circle():
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in (ROOT / "varcomm").rglob("*.py")
        if path.name != "__init__.py"
    }
    left = {name: imports_of(path) & modules.keys() for name, path in modules.items()}
    while free := [name for name, needed in left.items() if not needed & left.keys()]:
        for name in free:
            del left[name]
    assert not left, "in a circle, or importing one: " + ", ".join(sorted(left))
