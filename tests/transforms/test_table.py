"""The page on transforms says what running them gives."""

import importlib.util
import re
from functools import partial
from pathlib import Path

import pytest

import varcomm
from tests.transforms.operations import OPERATIONS
from tests.transforms.table import NOTHING, WORKS, found
from tests.transforms.transforms import TRANSFORMS

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def merged(worlds):
    with varcomm.Ranks(1, timeout=100) as one:  # exporting leaves the compiler in a process
        pools = {1: one.run, 2: partial(worlds.run, 2), 3: partial(worlds.run, 3)}
        return found(lambda ranks, *job: pools[ranks](*job))


def made(merged):
    spec = importlib.util.spec_from_file_location("make_transforms", DOCS / "make_transforms.py")
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    return maker.page(merged)


def test_the_page_is_up_to_date(merged):
    page = (DOCS / "transforms.md").read_text()
    assert page == made(merged), "run: PYTHONPATH=. python docs/make_transforms.py"


def test_transforms_of_functions_work_for_whatever_moves(merged):
    """All of torch.func but linearize, for every operation: none is refused."""
    titles = [title for title in TRANSFORMS if re.search("vmap|jac|hessian|jvp|vjp|grad", title)]
    for column, names in OPERATIONS.items():
        for name in names:
            verdicts = {merged[column, title, name] for title in titles}
            assert verdicts == {WORKS}, (column, name)


def test_every_refusal_says_what_to_do(merged):
    reasons = {text for text in merged.values() if text not in (WORKS, NOTHING)}
    for text in reasons:
        says = re.search(r"Take |Change |takes it with|in one process as well", text)
        assert says, text
