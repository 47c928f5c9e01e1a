"""The page on layers and functions says what the library does."""

import importlib.util
import re
from pathlib import Path

from torch_geometric.nn import aggr, conv

from tests.graph import functions
from tests.graph.against_one import assert_verdicts, data_of, graph_of, verdict
from tests.graph.layers_beyond import LAYERS
from varcomm.graph.layers.refused import EXACT_AGGREGATIONS

DOCS = Path(__file__).parents[2] / "docs"


def maker():
    spec = importlib.util.spec_from_file_location(
        "make_graph_layers", DOCS / "make_graph_layers.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date():
    page = (DOCS / "reference" / "graph_layers.md").read_text()
    assert page == maker().page(), "run: python docs/make_graph_layers.py"


def test_every_layer_of_pyg_is_on_it_once():
    page = (DOCS / "reference" / "graph_layers.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (exact|refused) \| (.*) \|$", page, re.MULTILINE)
    layers = [row for row in rows if row[0] in conv.__all__]
    assert sorted(name for name, _, _ in layers) == sorted(conv.__all__)
    assert all(state == "exact" or note for _, state, note in rows)
    assert sum(state == "exact" for _, state, _ in layers) >= 50
    assert all(hasattr(aggr, name) or name == "FusedAggregation" for name in EXACT_AGGREGATIONS)


def test_functions_do_what_the_page_says(worlds):
    told = {name: state for name, (state, _) in maker().of_functions().items()}
    called = functions.cases()
    assert called.keys() <= told.keys()
    # the others need packages, or fail in one process
    expected = {n: state for n, state in told.items() if n in called and state != "local"}
    assert_verdicts(worlds, functions.cases, expected)


def outside(rank):
    data, found = data_of(), {}
    graph = graph_of(data)
    for name, (make, call) in functions.NORMS.items():
        found[name] = verdict(make, call, data, graph, put=None)
    return found


def test_norms_outside_of_a_distributed_model(worlds):
    """With a batch vector they are as inside; rows alone do not show that they are nodes."""
    told = maker().of_functions()
    for name, found in worlds.run(3, outside)[0].items():
        if name not in functions.BY_ROWS:
            assert (name, found) == (name, told[name][0])


def test_the_page_of_compiled_layers_has_those_of_the_tests():
    page = (DOCS / "reference" / "compiled_layers.md").read_text()
    whole, broken = page.split("## Layers that break the graph")
    whole = re.findall(r"`([^`]+)`", " ".join(whole.split("to 1e-12.")[1].split()))
    told = dict.fromkeys(whole, "one graph")
    told |= dict(re.findall(r"^\| (.*?) \| (.+) \|$", broken, re.MULTILINE)[2:])
    assert told.keys() == LAYERS.keys(), "run: python docs/make_compiled_layers.py"
    # what the tests of compiled models rely on
    assert {told[name] for name in ("SAGEConv mean", "GATConv heads", "GCNConv")} == {"one graph"}
