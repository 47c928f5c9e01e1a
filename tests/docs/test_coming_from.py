"""Whatever of varcomm a page names exists, and takes the arguments that it is shown with."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import varcomm
from varcomm import tensor_parallel

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGES = sorted(
    str(page.relative_to(DOCS))
    for page in [
        DOCS / "sharp_bits.md",
        *DOCS.glob("how_it_works/*.md"),
        *(page for page in DOCS.glob("coming_from/*") if page.stem != "index"),
    ]
)
MODULES = {"vc": varcomm, "varcomm": varcomm, "tp": tensor_parallel}
INSTANCES = {
    "graph": varcomm.graph.PartitionedGraph,
    "plan": varcomm.ExchangePlan,
    "optimizer": varcomm.data_parallel.ShardedGradients,
}
OURS = re.compile(rf"(?<![.\w])({'|'.join([*MODULES, *INSTANCES])})\.\w")
OF_DATA = {"x", "y", "pos", "edge_attr"}  # attributes that a graph has from the user's data


def names_in(page):
    """Yield what stands in backticks and has one of our names, outside of code blocks."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    yield from filter(OURS.search, re.findall(r"`([^`\n]+)`", text))


def check(span):
    """Raise if a name in a line of code is unknown, or a call in it does not fit."""
    line = f"{span} pass" if span.endswith(":") else span
    for node in ast.walk(ast.parse(line)):
        resolve(node)


def resolve(node):
    """Return an object, and whether an expression means an instance of it, or a method of one.

    None where it means something that only running it could tell.
    """
    match node:
        case ast.Name(id=name) if name in MODULES:
            return MODULES[name], False
        case ast.Name(id=name) if name in INSTANCES:
            return INSTANCES[name], True
        case ast.Attribute(value=value, attr=attr):
            of, instance = resolve(value)
            if of is None:
                return None, False
            if instance and attr in OF_DATA | set(inspect.get_annotations(of)):
                return None, False
            assert hasattr(of, attr), f"{of.__name__} has no {attr}"
            found = getattr(of, attr)
            return found, instance and inspect.isfunction(found)
        case ast.Call(func=func, args=args, keywords=keywords):
            of, bound = resolve(func)
            if of is None:
                return None, False
            fits(of, args, keywords, bound)
            return (of, True) if inspect.isclass(of) else (None, False)
        case _:
            return None, False


def fits(of, args, keywords, bound):
    signature = inspect.signature(of)
    signature.bind(*[None] * (len(args) + bound), **{word.arg: None for word in keywords})
    names = list(signature.parameters)[bound:]
    for place, arg in enumerate(args):
        if isinstance(arg, ast.Name) and arg.id in names:
            assert names[place] == arg.id, f"{arg.id} is not argument {place} of {of.__name__}"


@pytest.mark.parametrize("page", PAGES)
def test_names_and_arguments(page):
    spans = list(names_in(DOCS / page))
    assert spans
    for span in spans:
        try:
            check(span)
        except Exception as error:
            raise AssertionError(f"{page}: `{span}`: {error}") from error


@pytest.mark.parametrize(
    "span",
    [
        "vc.all_gather(x)",
        "vc.graph.split(data)",
        "vc.all_gather_v(x, sizes, 0, True, None, None)",
        "vc.all_gather_v(x, dim, sizes)",
        "vc.all_gather_v(x, sizes, dims=0)",
        "tp.RandomStreams(seed).spoon('sharded')",
        "graph.halos(x)",
        "graph.gather(x, to=0)",
        "plan.nbyte",
        "reduce=vc.data_parallel.GlobalCounts()",
        "with optimizer.no_sink():",
    ],
)
def test_that_wrong_ones_are_seen(span):
    with pytest.raises((AssertionError, TypeError)):
        check(span)
