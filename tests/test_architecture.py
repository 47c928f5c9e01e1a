"""The rules about files and imports that no single module can break alone."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

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
        ("varcomm.api", OPTIONAL | {"torch.distributed.checkpoint", "torch._dynamo"}),  # 0.5 s, 1 s
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


# Classes of torch whose private methods a subclass or a caller could use, and modules.
CLASSES = (
    torch.Tensor,
    torch.autograd.Function,
    torch.autograd.Variable,
    torch.library.Library,
    torch.nn.Module(),
    torch.optim.SGD([torch.ones(1)]),
    dist.ProcessGroup,
    torch._C._distributed_c10d.Backend,
    torch._C._distributed_c10d.Backend.Options,
)
MODULES = torch, torch._C, torch.library, torch.ops.aten, dist, distributed_c10d


def is_private(path):
    """Return whether a part of a dotted path is private; dunder names are protocols."""
    return any(part.startswith("_") and not part.endswith("__") for part in path.split("."))


def private_in(*objects):
    return {name for each in objects for name in dir(each) if is_private(name)} - {"_"}


OF_CLASSES, OF_TORCH = private_in(*CLASSES), private_in(*CLASSES, *MODULES)


def attributes_of(node):
    """Return the private names that a node gives to attributes of a class of varcomm."""
    match node:
        case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
            return {name}
        case ast.ClassDef(bases=bases, body=body):
            methods = {each.name for each in body if isinstance(each, ast.FunctionDef)}
            return methods - OF_CLASSES if bases else methods
    return set()


def private_names(path):
    """Return the private names of torch in a file: imports, attributes, methods, words in text."""
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    own, names = set().union(*map(attributes_of, nodes)), set()
    for node in nodes:
        match node:
            case ast.Import(names=imports):
                names |= {each.name for each in imports if each.name.startswith("torch.")}
            case ast.ImportFrom(module=str(module), names=imports) if module.startswith("torch"):
                names |= {f"{module}.{each.name}" for each in imports}
            case ast.Attribute(attr=name, value=ast.Attribute(attr="_C")):
                names.add(f"_C.{name}")
            case ast.Attribute(attr=name) if name != "_C" and name in OF_TORCH - own:
                names.add(name)
            case ast.Attribute(attr=name) | ast.keyword(arg=str(name)) if "_dynamo_" in name:
                names.add(name)
            case ast.ClassDef(bases=[_, *_], body=body):
                names |= {
                    each.name for each in body if isinstance(each, ast.FunctionDef)
                } & OF_CLASSES
            case ast.Constant(value=str(text)):
                names |= {word for word in text.split() if word in OF_TORCH or "_dynamo_" in word}
    return {name for name in names if is_private(name)}


def test_private_names_of_torch_are_in_one_file():
    files = [path for folder in ("varcomm", "models") for path in (ROOT / folder).rglob("*.py")]
    names = {str(path.relative_to(ROOT)): private_names(path) for path in files}
    here = names.pop("varcomm/_torch_private.py")
    assert {file: found for file, found in names.items() if found} == {}
    assert len(here) <= 16, sorted(here)  # docs/explanation/architecture.md says why not 15
