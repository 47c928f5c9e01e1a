"""Names and calls of varcomm in the text of a page exist, and have the shown arguments."""

import ast
import importlib.metadata
import inspect
import re
import subprocess
import sys
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


def table_of(peer):
    """Return the table that docs/compare_grids.py prints."""
    command = [sys.executable, "-W", "ignore", str(DOCS / "compare_grids.py"), peer]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("peer", "package"), [("dtensor", "torch"), ("shardtensor", "nvidia-physicsnemo")]
)
def test_tables_of_other_libraries(peer, package):
    """Each table is that of the versions on its page; other versions are not compared."""
    page = (DOCS / "coming_from" / f"{peer}.md").read_text()
    for name in {"torch", package}:
        try:
            version = importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{name} is not installed")
        if f"{name.removeprefix('nvidia-')} {version}" not in page:
            pytest.skip(f"the page is for another {name} than {version}")
    assert table_of(peer) in page


@pytest.mark.slow
def test_table_of_varcomm():
    rows = [line.split("|")[2:-1] for line in table_of("varcomm").splitlines()[2:]]
    assert len(rows) == 32
    assert {cell.strip() for row in rows for cell in row} == {"equal"}
