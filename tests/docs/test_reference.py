"""Every public name is in the reference once; its docstring has all sections."""

import importlib
import inspect
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from varcomm.tensor_parallel import mappings

REFERENCE = Path(__file__).parent.parent.parent / "docs" / "reference"
SUBPACKAGES = (
    *("ase", "checkpoint", "data_parallel", "graph", "grid", "models"),
    *("sharding", "simulate", "tensor_parallel", "testing"),
)
MODULES = [
    importlib.import_module(name)
    for name in ("varcomm", *(f"varcomm.{name}" for name in SUBPACKAGES))
]
# Documented with their module, because they are no names of a package.
FURTHER = {"varcomm.models.generation.generate"}
# Classes that only varcomm makes: their arguments are not documented.
MADE_BY_VARCOMM = {
    *("varcomm.CapturedStep", "varcomm.Handle", "varcomm.checkpoint.PendingSave"),
    "varcomm.grid.Field",
}
# Classes with a group that they do not use for communication of their own.
SILENT = {"varcomm.graph.EdgeShard", "varcomm.graph.NodeShard", "varcomm.sharding.ShardSpec"}
# Functions that no argument makes fail, and those that fail as torch does.
CANNOT_FAIL = {
    "varcomm.grid.functions",
    "varcomm.trace",
    "varcomm.sharding.shard_spec",
    "varcomm.tensor_parallel.param_is_not_tensor_parallel_duplicate",
    "varcomm.tensor_parallel.split_tensor_along_last_dim",
}
# Results of calls, whose examples show them; and functions that need a minute, or a file.
WITHOUT_EXAMPLE = {
    "varcomm.graph.Mesh",
} | {
    f"varcomm.simulate.{name}"
    for name in (*("Counts", "Machine", "Parts", "Sample", "Step", "Times", "Work"),)
}


def documented():
    """Return the documented names, and those that a page refers to another page, with it."""
    found, again = [], {}
    for page in REFERENCE.rglob("*.rst"):
        text = page.read_text()
        module = re.search(r"^\.\. currentmodule:: (\S+)$", text, re.MULTILINE)
        for name in re.findall(r"^\.\. (?:auto\w+|py:data):: (\S+)$", text, re.MULTILINE):
            found.append(name if name.startswith("varcomm.") else f"{module[1]}.{name}")
        again |= dict(re.findall(r":py:obj:`(\S+) <(\S+)>`", text))
    return found, again


def of_path(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def test_documented_is_exported():
    exported = {f"{module.__name__}.{name}" for module in MODULES for name in module.__all__}
    found, again = documented()
    assert [name for name, times in Counter(found).items() if times > 1] == []
    assert set(found) | set(again) == exported | FURTHER
    for name, elsewhere in again.items():
        assert of_path(name) is of_path(elsewhere)
        assert elsewhere in found
    assert set(SUBPACKAGES) <= set(dir(MODULES[0]))


def public():
    """Return functions and classes, but errors, by the first of their public names."""
    found = {}
    for module in MODULES:
        for name in module.__all__:
            value = getattr(module, name)
            is_error = inspect.isclass(value) and issubclass(value, BaseException)
            if callable(value) and not is_error and value not in found.values():
                found[f"{module.__name__}.{name}"] = value
    return found


def sections(doc):
    """Return the sections of a docstring by their titles, and the text above them by None."""
    parts = re.split(r"^(\w+(?: Also)?)\n-{3,}$", inspect.cleandoc(doc), flags=re.MULTILINE)
    return {None: parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def names_in(section):
    """Return the names that a section describes: ``x, *args : type``, with text below."""
    lines = re.findall(r"^(\*{0,2}\w+(?:, \*{0,2}\w+)*)(?: : .*)?$", section, re.MULTILINE)
    return [name.lstrip("*") for line in lines for name in line.split(", ")]


def summary_problems(doc):
    if not doc or not re.match(r"[A-Z`].*[.:]$", doc.splitlines()[0]):
        yield "no summary"


def argument_problems(value, is_method=False):
    """Yield problems of the arguments; those of a dataclass may be among its attributes."""
    of, names = sections(value.__doc__), [*inspect.signature(value).parameters]
    names = names[1:] if is_method else names
    arguments = {name for name in names if not name.startswith("_")}
    described = names_in(of.get("Parameters", ""))
    attributes = names_in(of.get("Attributes", "")) if inspect.isclass(value) else []
    yield from (f"{name} not described" for name in arguments - {*described, *attributes})
    yield from (f"{name} is no argument" for name in set(described) - arguments)
    yield from (f"{name} twice" for name, times in Counter(described).items() if times > 1)


def line_problems(doc, *words):
    for word in words:
        if not re.search(rf"^{word}: \S", inspect.cleandoc(doc), re.MULTILINE):
            yield f"no {word}:"


def see_also_problems(module, of):
    """Yield the names of the section that do not exist."""
    lines = of.get("See Also", "").split("\n")
    names = [name for line in lines for name in re.split(r", ?", line.split(" : ")[0]) if name]
    names = [name for name in names if not name.startswith(" ")]
    for name in names:
        path = (
            name.split(".")
            if name.startswith("varcomm.")
            else [*module.split("."), *name.split(".")]
        )
        found = importlib.import_module(path[0])
        for part in path[1:]:
            found = getattr(found, part, None)
        if found is None:
            yield f"see also {name}, which does not exist"


def issubclass_of_tensor(value):
    return inspect.isclass(value) and issubclass(value, torch.Tensor)  # which has no signature


def problems(name, value):
    of = sections(value.__doc__)
    signature = inspect.signature(value.__init__ if issubclass_of_tensor(value) else value)
    yield from summary_problems(value.__doc__)
    yield from see_also_problems(name.rpartition(".")[0], of)
    if name not in MADE_BY_VARCOMM:
        yield from argument_problems(value)
    if (">>> " in of.get("Examples", "")) == (name in WITHOUT_EXAMPLE):
        yield "an example is missing, or not expected"
    if {"group", "graph"} & set(signature.parameters) and name not in SILENT:
        yield from line_problems(value.__doc__, "Communication", "In one process")
    if inspect.isclass(value):
        for method, member in vars(value).items():
            function = getattr(member, "__func__", member)
            if not method.startswith("_") and inspect.isfunction(function):
                found = [*summary_problems(function.__doc__)]
                if "Parameters" in sections(function.__doc__ or ""):
                    is_static = isinstance(member, staticmethod)
                    found += argument_problems(function, is_method=not is_static)
                yield from (f"{method}: {problem}" for problem in found)
        return
    if ("Raises" in of) == (name in CANNOT_FAIL):
        yield "errors are missing, or not expected"
    gives = signature.return_annotation not in (None, "None", "Iterator[None]")
    if bool({"Returns", "Yields"} & of.keys()) != gives:
        yield "a result is missing, or not expected"
    is_operator = value.__module__.startswith(("varcomm.ops.", "varcomm.plan."))
    if is_operator or value.__name__ in mappings.__all__:
        yield from line_problems(value.__doc__, "Adjoint")


PUBLIC = public()


@pytest.mark.parametrize("name", PUBLIC)
def test_docstrings(name):
    assert list(problems(name, PUBLIC[name])) == []
