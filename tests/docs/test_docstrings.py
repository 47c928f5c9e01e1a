"""Every public name says what it takes, gives and sends, and shows it by an example."""

import importlib
import inspect
import re

import pytest

import varcomm
from varcomm.tensor_parallel import mappings

ROOMS = ["varcomm", *(f"varcomm.{room}" for room in sorted(varcomm._ROOMS))]

# What it takes to make one is nobody's business but varcomm's, which makes them.
MADE_BY_VARCOMM = {"varcomm.Handle", "varcomm.checkpoint.PendingSave"}

RECORD = "is what a call returns, whose example shows it"
WITHOUT_EXAMPLE = {
    "varcomm.graph.PartitionedGraph": RECORD,
    "varcomm.simulate.Point": RECORD,
    "varcomm.simulate.Sample": RECORD,
    "varcomm.simulate.Scaling": RECORD,
    "varcomm.simulate.Step": RECORD,
    "varcomm.simulate.Times": RECORD,
    "varcomm.simulate.measure": "would measure whatever runs the tests, for a minute",
    "varcomm.simulate.read_sea": "needs a file that is not part of varcomm",
}

# They have a group, and nothing to do with it themselves.
SILENT = {"varcomm.graph.EdgeShard", "varcomm.graph.NodeShard", "varcomm.sharding.ShardSpec"}


def public():
    """Return what is public and can be called, by the first of its names."""
    found = {}
    for room in ROOMS:
        module = importlib.import_module(room)
        for name in module.__all__:
            value = getattr(module, name)
            is_error = inspect.isclass(value) and issubclass(value, BaseException)
            if callable(value) and not is_error and value not in found.values():
                found[f"{room}.{name}"] = value
    return found


def methods_of(name, cls):
    for method, value in vars(cls).items():
        function = getattr(value, "__func__", value)
        if not method.startswith("_") and inspect.isfunction(function):
            yield f"{name}.{method}", function


PUBLIC = public()
METHODS = dict(
    method
    for name, value in PUBLIC.items()
    if inspect.isclass(value)
    for method in methods_of(name, value)
)
COMMUNICATING = [
    name
    for name, value in PUBLIC.items()
    if {"group", "graph"} & set(inspect.signature(value).parameters) and name not in SILENT
]
# differentiable operators, of one tensor
OPERATORS = [
    name
    for name, value in PUBLIC.items()
    if inspect.isfunction(value)
    and (
        value.__module__.startswith(("varcomm.ops.", "varcomm.plan."))
        or value.__name__ in mappings.__all__
    )
]


def sections(doc):
    """Return the sections of a docstring by their titles, what is above them by None."""
    parts = re.split(r"^(\w+)\n-{3,}$", inspect.cleandoc(doc), flags=re.MULTILINE)
    return {None: parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def names_in(section):
    """Return what a section describes: ``x, *args : type``, with text below it."""
    lines = re.findall(r"^(\*{0,2}\w+(?:, \*{0,2}\w+)*)(?: : .*)?$", section, re.MULTILINE)
    return [name.lstrip("*") for line in lines for name in line.split(", ")]


def arguments_of(value):
    names = [name for name in inspect.signature(value).parameters if not name.startswith("_")]
    return [name for name in names if name not in ("self", "cls")]


def check_arguments(value):
    """Raise unless all arguments are described, those of a record among its attributes."""
    of = sections(value.__doc__)
    arguments, told = arguments_of(value), names_in(of.get("Parameters", ""))
    attributes = names_in(of.get("Attributes", "")) if inspect.isclass(value) else []
    assert not set(arguments) - {*told, *attributes}, "not described"
    assert not set(told) - {*arguments}, "no argument"
    assert len(set(told)) == len(told), "described twice"


def check_lines(doc, *words):
    for word in words:
        assert re.search(rf"^{word}: \S", inspect.cleandoc(doc), re.MULTILINE), f"no {word}:"


@pytest.mark.parametrize("name", [*PUBLIC, *METHODS])
def test_summary(name):
    doc = (PUBLIC | METHODS)[name].__doc__
    assert doc
    assert re.match(r"[A-Z`].*[.:]$", doc.splitlines()[0])


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in MADE_BY_VARCOMM])
def test_arguments(name):
    check_arguments(PUBLIC[name])


@pytest.mark.parametrize("name", METHODS)
def test_arguments_of_methods(name):
    """Where the summary does not say all, the section says all."""
    if "Parameters" in sections(METHODS[name].__doc__):
        check_arguments(METHODS[name])


@pytest.mark.parametrize("name", [name for name in PUBLIC if inspect.isfunction(PUBLIC[name])])
def test_results(name):
    value = PUBLIC[name]
    gives = inspect.signature(value).return_annotation not in (None, "None", "Iterator[None]")
    assert bool({"Returns", "Yields"} & sections(value.__doc__).keys()) == gives


@pytest.mark.parametrize("name", PUBLIC)
def test_examples(name):
    assert (">>> " in sections(PUBLIC[name].__doc__).get("Examples", "")) == (
        name not in WITHOUT_EXAMPLE
    )


@pytest.mark.parametrize("name", COMMUNICATING)
def test_what_is_sent_and_what_one_process_would_do(name):
    check_lines(PUBLIC[name].__doc__, "Communication", "In one process")


@pytest.mark.parametrize("name", OPERATORS)
def test_adjoints(name):
    check_lines(PUBLIC[name].__doc__, "Adjoint")


def test_that_gaps_are_seen():
    def operator(x, sizes, group=None):
        """Do something.

        Parameters
        ----------
        x : torch.Tensor
            What.
        size : int
            How many.
        group : ProcessGroup, optional
            Who. Communication: none.
        """

    with pytest.raises(AssertionError, match="not described"):
        check_arguments(operator)
    with pytest.raises(AssertionError, match="no Communication:"):
        check_lines(operator.__doc__, "Communication")
    assert names_in(sections(operator.__doc__)["Parameters"]) == ["x", "size", "group"]
