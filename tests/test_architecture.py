"""The rules about files and imports that no single module can break alone."""

import ast
import re
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


def is_private(name):
    return name.startswith("_") and not name.endswith("__")


def private_names():
    """Return the private names of torch that the code uses: dotted imports, names of attributes."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "varcomm").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    own, found = {"_exit", "_getframe"}, set()  # of os and sys
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            own.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            own.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.arg | ast.keyword) and node.arg:
            own.add(node.arg)
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name for name in names if any(map(is_private, name.split(".")))}
        elif isinstance(node, ast.Import):
            names = {alias.name for alias in node.names if alias.name.startswith("torch.")}
            found |= {name for name in names if any(map(is_private, name.split(".")))}
        elif isinstance(node, ast.Attribute) and node.attr not in own and is_private(node.attr):
            found.add(node.attr)
        elif isinstance(node, ast.keyword | ast.Constant):  # marks in the vars of an object
            name = node.arg if isinstance(node, ast.keyword) else node.value
            if isinstance(name, str) and re.fullmatch(r"_(torch)?dynamo_\w+", name):
                found.add(name)
    return found


def test_private_names_of_torch_are_those_of_the_architecture_page():
    page = (ROOT / "docs" / "architecture" / "index.md").read_text()
    section = page.partition("## Private APIs of torch")[2].partition("\n## ")[0]
    _, _, *rows = [line for line in section.splitlines() if line.startswith("|")]
    listed = {name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])}
    assert private_names() == listed
