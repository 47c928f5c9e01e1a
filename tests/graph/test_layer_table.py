"""The page on layers says what the library does."""

import importlib.util
import re
from pathlib import Path

from torch_geometric.nn import aggr, conv

from tests.graph.layers_beyond import LAYERS
from varcomm.graph.adapt.exact import EXACT, EXACT_AGGREGATIONS, REFUSED

DOCS = Path(__file__).parents[2] / "docs"


def made():
    spec = importlib.util.spec_from_file_location(
        "make_graph_layers", DOCS / "make_graph_layers.py"
    )
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    return maker.page()


def test_the_page_is_up_to_date():
    page = (DOCS / "graph_layers.md").read_text()
    assert page == made(), "run: python docs/make_graph_layers.py"


def test_every_layer_of_pyg_is_on_it_once():
    page = (DOCS / "graph_layers.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (exact|refused) \| (.*) \|$", page, re.MULTILINE)
    assert sorted(name for name, _, _ in rows) == sorted(conv.__all__)
    for name, state, note in rows:
        assert (name in EXACT, name in REFUSED) == (state == "exact", state == "refused")
        assert state == "exact" or note, f"{name} is refused without a reason"
    assert sum(state == "exact" for _, state, _ in rows) >= 50


def test_the_lists_name_nothing_that_pyg_has_not():
    assert EXACT.keys() | REFUSED.keys() == set(conv.__all__)
    assert not EXACT.keys() & REFUSED.keys()
    assert all(hasattr(aggr, name) or name == "FusedAggregation" for name in EXACT_AGGREGATIONS)


def test_the_page_of_compiled_layers_has_those_of_the_tests():
    page = (DOCS / "compiled_layers.md").read_text()
    told = dict(re.findall(r"^\| (.*?) \| (one graph|breaks: .+) \|$", page, re.MULTILINE))
    assert told.keys() == LAYERS.keys(), "run: python docs/make_compiled_layers.py"
    # what the tests of compiled models rely on
    assert {told[name] for name in ("SAGEConv mean", "GATConv heads", "GCNConv")} == {"one graph"}
