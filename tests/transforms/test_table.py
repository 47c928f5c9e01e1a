"""The page on transforms says what running them gives."""

import importlib.util
import re
from functools import partial
from pathlib import Path

import pytest

import varcomm
from tests.transforms.operations import OPERATIONS
from tests.transforms.table import NOTHING, WORKS, found, read
from tests.transforms.transforms import TRANSFORMS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "transforms.md").read_text()
SAID = read(PAGE)


@pytest.fixture(scope="module")
def one():
    """A rank of its own: exporting leaves the compiler in its process."""
    with varcomm.Ranks(1, timeout=100) as pool:
        yield pool


@pytest.mark.parametrize(
    ("column", "name"), [(column, name) for column, names in OPERATIONS.items() for name in names]
)
def test_what_the_page_says_of_an_operation(worlds, one, column, name):
    pools = {1: one.run, 2: partial(worlds.run, 2), 3: partial(worlds.run, 3)}
    told = found(lambda ranks, *job: pools[ranks](*job), column, name)
    said = {title: SAID[column, title, name] for title in TRANSFORMS}
    assert said == told, "run: PYTHONPATH=. python docs/make_transforms.py"


def test_the_page_is_made_of_that():
    spec = importlib.util.spec_from_file_location("make_transforms", DOCS / "make_transforms.py")
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    assert maker.page(SAID) == PAGE, "run: PYTHONPATH=. python docs/make_transforms.py"


def test_transforms_of_functions_work_for_all():
    """Those of torch.func but linearize, for every operation: none is refused."""
    titles = [title for title in TRANSFORMS if re.search("vmap|jac|hessian|jvp|vjp|grad", title)]
    assert len(titles) == 10
    for column, names in OPERATIONS.items():
        for name in names:
            assert {SAID[column, title, name] for title in titles} == {WORKS}, (column, name)


def test_every_refusal_says_what_to_do():
    reasons = {text for text in SAID.values() if text not in (WORKS, NOTHING)}
    for text in reasons:
        says = re.search(r"Take |Change |takes it with|in one process as well", text)
        assert says, text
