"""Names and calls of varcomm in the text of a page exist, and have the shown arguments."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import varcomm
from varcomm import tensor_parallel

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGES = [DOCS / "sharp_bits.md", *DOCS.glob("explanation/*.md"), *DOCS.glob("coming_from/*.md")]
PAGES.remove(DOCS / "explanation" / "architecture.md")  # its names are modules of varcomm
MODULES = {"vc": varcomm, "varcomm": varcomm, "tp": tensor_parallel}
INSTANCES = {
    "graph": varcomm.graph.PartitionedGraph,
    "plan": varcomm.ExchangePlan,
    "optimizer": varcomm.data_parallel.ShardedGradients,
}
OURS = re.compile(rf"(?<![.\w])({'|'.join([*MODULES, *INSTANCES])})\.\w")
# attributes that a graph has from the user's data
OF_DATA = {"x", "y", "h", "f", "forces", "pos", "batch", "cell", "edge_attr", "edge_weight"}
OF_DATA |= {"mask", "train_mask"}


def check(span):
    """Raise if a name in a line of code is unknown, or the arguments of a call do not match."""
    line = f"{span} pass" if span.endswith(":") else span
    for node in ast.walk(ast.parse(line)):
        resolve(node)


def resolve(node):
    """Return the object of an expression, or None, and whether it is an instance or its method."""
    match node:
        case ast.Name(id=name) if name in MODULES:
            return MODULES[name], False
        case ast.Name(id=name) if name in INSTANCES:
            return INSTANCES[name], True
        case ast.Attribute(value=value, attr=attr):
            of, instance = resolve(value)
            if of is None or (instance and attr in OF_DATA | set(inspect.get_annotations(of))):
                return None, False
            assert hasattr(of, attr), f"{of.__name__} has no {attr}"
            found = getattr(of, attr)
            return found, instance and inspect.isfunction(found)
        case ast.Call(func=func, args=args, keywords=keywords):
            of, bound = resolve(func)
            if of is None:
                return None, False
            signature = inspect.signature(of)
            named = {word.arg: None for word in keywords}
            signature.bind(*[None] * (len(args) + bound), **named)
            names = list(signature.parameters)[bound:]
            for place, arg in enumerate(args):
                if isinstance(arg, ast.Name) and arg.id in names:
                    assert names[place] == arg.id, f"{arg.id} is not argument {place}"
            return (of, True) if inspect.isclass(of) else (None, False)
        case _:
            return None, False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_names_and_arguments(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    spans = [span for span in re.findall(r"`([^`\n]+)`", text) if OURS.search(span)]
    assert spans or page.parent.name == "explanation" or page.name == "index.md"
    for span in spans:
        try:
            check(span)
        except Exception as error:
            raise AssertionError(f"`{span}`: {error}") from error
