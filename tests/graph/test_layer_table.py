"""The table in the docs is of all of PyG's layers, and is up to date."""

import runpy
from pathlib import Path

from torch_geometric.nn import conv

from varcomm.graph.running.layers import EXACT, REFUSED

MAKER = Path(__file__).parents[2] / "docs" / "make_graph_layers.py"


def test_every_layer_is_exact_or_refused():
    assert not EXACT.keys() & REFUSED.keys()
    assert EXACT.keys() | REFUSED.keys() == set(conv.__all__)


def test_at_least_fifty_are_exact():
    assert len(EXACT.keys() - {"MessagePassing"}) >= 50


def test_the_page_is_up_to_date():
    made = runpy.run_path(str(MAKER))
    page = made["PAGE"].read_text()
    assert page == made["page"](), "run python docs/make_graph_layers.py"
    for name in conv.__all__:
        assert page.count(f"| `{name}` |") == 1
