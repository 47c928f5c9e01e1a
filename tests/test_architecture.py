"""The rules about files and imports that no single module can break alone."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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


OPTIONAL = {"ase", "cloudpickle", "matplotlib", "meshio", "pymetis", "scipy", "torch_geometric"}


@pytest.mark.parametrize(
    ("module", "not_imported"),
    [
        ("varcomm.api", OPTIONAL | {"torch.distributed.checkpoint"}),  # half a second
        ("varcomm.cli.main", {"torch", "numpy"}),  # so that help is quick
    ],
)
def test_imports_are_late(module, not_imported):
    code = f"import sys, {module}; sys.exit(str(sorted({not_imported} & sys.modules.keys())))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.strip() == "[]"


def modules():
    """Return the files of all modules and packages by their names in an installation."""
    paths = [*(ROOT / "varcomm").rglob("*.py"), *(ROOT / "models").rglob("*.py")]
    names = (".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths)
    names = (re.sub(r"^models\b", "varcomm.models", name) for name in names)
    return {name.removesuffix(".__init__"): path for name, path in zip(names, paths, strict=True)}


def imports_of(name, files):
    """Return the modules that a module imports anywhere: in functions and for types, too."""
    path, imported = files[name], set()
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                member = f"{module}.{alias.name}"
                imported.add(member if member in files else module)
    return imported & files.keys() - {name}


def test_no_modules_import_each_other_in_a_circle():
    files = modules()
    left = {name: imports_of(name, files) for name in files}
    assert sum(map(len, left.values())) > len(files)
    while free := [name for name, needed in left.items() if not needed & left.keys()]:
        for name in free:
            del left[name]
    assert not left, "in a circle, or importing one: " + ", ".join(sorted(left))


MARK = re.compile(r"_(torch)?dynamo_\w+")  # in the vars of an object, for the compiler


def is_private(path):
    return any(part.startswith("_") and not part.endswith("__") for part in path.split("."))


def private_names():
    """Return the private names of torch that the code uses: dotted imports, names of attributes."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "varcomm").rglob("*.py")]
    own, found, marks = {"_exit", "_getframe"}, set(), set()  # own: also those of os and sys
    for node in (node for tree in trees for node in ast.walk(tree)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                own.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                own.add(name)
            case ast.keyword(arg=str(name)) | ast.Constant(value=str(name)) if MARK.fullmatch(name):
                marks.add(name)
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("torch"):
                found |= {f"{module}.{alias.name}" for alias in names}
            case ast.Import(names=names):
                found |= {alias.name for alias in names if alias.name.startswith("torch.")}
            case ast.Attribute(attr=name):
                found.add(name)
            case ast.arg(arg=name) | ast.keyword(arg=name):
                own.add(name)
    return {name for name in found - own if is_private(name)} | marks


def test_private_names_of_torch_are_those_of_the_architecture_page():
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    section = page.partition("## Private APIs of torch")[2].partition("\n## ")[0]
    _, _, *rows = [line for line in section.splitlines() if line.startswith("|")]
    listed = {name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])}
    assert private_names() == listed
