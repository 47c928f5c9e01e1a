"""Layers, models and functions of PyG on ranks: as in one process, or refused on all ranks."""

import copy
import re
import runpy
from pathlib import Path

import pytest
import torch
import torch_geometric.nn as pyg
from torch_geometric.nn import aggr, conv
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import segment

from tests.graph import functions, models, typed_layers
from tests.graph.against_one import (
    CLOSE,
    IDLE,
    assert_verdicts,
    data_of,
    graph_of,
    two_types,
    verdict,
)
from tests.graph.layers import BETWEEN, CALLS, LAYERS, example
from tests.worlds import WORLDS, on_ranks
from varcomm import ArgumentError
from varcomm.graph import distribute, partition
from varcomm.graph.layers.refused import EXACT_AGGREGATIONS, REFUSED

DOCS = Path(__file__).parents[2] / "docs"
CLASSES = {}
for name in LAYERS | CALLS:
    CLASSES.setdefault(name.split(" ")[0], []).append(name)


def layers():
    """Return the cases of all layers, whose outputs must be finite in one process too."""

    def finite(call):
        def checked(model, g):
            out = call(model, g)
            assert out.isfinite().all()
            return out

        return checked

    cases = LAYERS | CALLS
    return {
        name: (lambda make=make: make().eval(), finite(call), *by)
        for name, (make, call, *by) in cases.items()
    }


@pytest.mark.parametrize("name", CLASSES)
def test_layers_equal_one_process(worlds, name):
    # torch has no second derivative of the attention that it computes on the CPU
    second = name != "GPSConv"
    expected = dict.fromkeys(CLASSES[name], "exact")
    assert_verdicts(worlds, layers, expected, example, second=second)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "method"), [(1, "random"), (2, "metis"), (3, "random"), (5, "metis")]
)
def test_layers_on_other_partitions(worlds, ranks, method):
    for second in (True, False):
        few = [names[-1] for name, names in CLASSES.items() if second == (name != "GPSConv")]
        expected = dict.fromkeys(few, "exact")
        assert_verdicts(worlds, layers, expected, example, ranks, method, second)


# with overlap, these compute their messages in two parts
OVERLAPPED = ["CGConv", "EdgeConv", "GINEConv", "NNConv", "PNAConv", "GraphConv"]


@pytest.mark.parametrize(
    ("ranks", "names"),
    [(3, OVERLAPPED), *(pytest.param(ranks, CLASSES, marks=pytest.mark.slow) for ranks in (2, 3))],
)
def test_layers_that_overlap(worlds, ranks, names):
    for second in (True, False):
        few = [CLASSES[name][-1] for name in names if second == (name != "GPSConv")]
        expected = dict.fromkeys(few, "exact")
        method = IDLE if ranks == 3 else "metis"
        assert_verdicts(worlds, layers, expected, example, ranks, method, second, overlap=True)


def between():
    return BETWEEN


def test_layers_between_two_types(worlds):
    expected = {n: "refused" if n.endswith("with loops") else "exact" for n in BETWEEN}
    assert_verdicts(worlds, between, expected, two_types)


@pytest.mark.parametrize(
    ("ranks", "method"),
    [(3, IDLE), *(pytest.param(ranks, "random", marks=pytest.mark.slow) for ranks in (1, 2, 3, 5))],
)
def test_layers_on_several_types(worlds, ranks, method):
    expected, data_of = dict.fromkeys(typed_layers.LAYERS, "exact"), typed_layers.data_of
    assert_verdicts(worlds, typed_layers.cases, expected, data_of, ranks, method, second=True)


@pytest.mark.parametrize("ranks", WORLDS)
def test_models(worlds, ranks):
    assert_verdicts(worlds, models.networks, dict.fromkeys(models.networks(), "exact"), ranks=ranks)


@pytest.mark.slow
def test_models_that_overlap(worlds):
    expected = dict.fromkeys(models.networks(), "exact")
    assert_verdicts(worlds, models.networks, expected, overlap=True)
    expected = dict.fromkeys(typed_layers.LAYERS, "exact")
    cases = typed_layers.cases, expected, typed_layers.data_of
    assert_verdicts(worlds, *cases, second=True, overlap=True)


def test_models_of_pyg(worlds):
    expected = dict.fromkeys(models.EXACT, "exact") | dict.fromkeys(models.REFUSED, "refused")
    assert_verdicts(worlds, models.of_pyg, expected)


def test_each_layer_that_is_called_exact_is_tested_here():
    made = [make() for make, *_ in LAYERS.values()]
    elsewhere = {"MessagePassing", "HANConv", "HGTConv", "HeteroConv"}
    assert {type(m).__name__ for m in made} == set(pyg.conv.__all__) - REFUSED.keys() - elsewhere
    modules = [module for layer in made for module in layer.modules()]
    aggregations = {type(m).__name__ for m in modules if isinstance(m, pyg.aggr.Aggregation)}
    assert aggregations == EXACT_AGGREGATIONS


def along(layer, g):
    """Forward mode, twice; inside of it, whatever is computed is a tensor of another kind."""
    for _ in range(2):
        found = torch.func.jvp(
            lambda x: layer(x, g.edge_index).tanh(), (g.x.detach(),), (g.x.detach().cos(),)
        )
    # and what was kept is of use afterwards
    return *(one.detach() for one in found), layer(g.x, g.edge_index)


def forward_mode():
    names = ("GraphConv plain", "GCNConv", "GATConv heads", "DirGNNConv of SAGEConv")
    return {name: (LAYERS[name][0], along) for name in names}


def test_forward_mode(worlds):
    assert_verdicts(worlds, forward_mode, dict.fromkeys(forward_mode(), "exact"))


@on_ranks(3)
def test_super_gat_in_training(rank):
    """In training the result is the same as otherwise, but there is no loss of attention."""
    data = example()
    graph = partition(data, method="random")
    torch.manual_seed(0)
    layer = pyg.SuperGATConv(4, 3, heads=2).double()
    expected = copy.deepcopy(layer)(data.x, data.edge_index)
    distribute(layer, graph)
    for _ in range(2):
        out = layer(graph.x, graph.edge_index)
        torch.testing.assert_close(out, expected[graph.owned_ids], **CLOSE)
    with pytest.raises(ArgumentError, match="samples among them"):
        layer.get_attention_loss()
    assert layer.eval().get_attention_loss().item() == 0


@on_ranks(3)
def test_edges_and_weights_of_gcn_norm(rank):
    """Edges and weights of gcn_norm by itself are in the order of the whole graph's edges."""
    data = example()
    graph = partition(data, method="random")
    ids = torch.cat([graph.owned_ids, graph.halo_ids])
    for settings in ({}, {"improved": True}, {"add_self_loops": False}):
        settings["dtype"] = torch.float64
        edges, weight = gcn_norm(data.edge_index, data.weight, 24, **settings)
        part, got = gcn_norm(graph.edge_index, graph.weight, graph.num_owned, **settings)
        mine = torch.isin(edges[1], graph.owned_ids)
        assert torch.equal(ids[part[0].plain], edges[0, mine])
        assert torch.equal(graph.owned_ids[part[0]], edges[0, mine])
        assert torch.equal(graph.owned_ids[part[1]], edges[1, mine])
        torch.testing.assert_close(got, weight[mine], **CLOSE)


def maker():
    return runpy.run_path(str(DOCS / "make_graph_layers.py"))


def test_the_page_lists_every_layer_of_pyg_once():
    page = (DOCS / "reference" / "graph_layers.md").read_text()
    assert page == maker()["page"](), "run: python docs/make_graph_layers.py"
    rows = re.findall(r"^\| `(\w+)` \| (exact|refused) \| (.*) \|$", page, re.MULTILINE)
    states = [row for row in rows if row[0] in conv.__all__]
    assert sorted(name for name, _, _ in states) == sorted(conv.__all__)
    assert all(state == "exact" or note for _, state, note in rows)
    assert all(hasattr(aggr, name) or name == "FusedAggregation" for name in EXACT_AGGREGATIONS)


def test_functions_do_what_the_page_says(worlds):
    told = {name: state for name, (state, _) in maker()["of_functions"]().items()}
    called = functions.cases()
    assert called.keys() <= told.keys()
    # the others need packages, or fail in one process
    expected = {n: state for n, state in told.items() if n in called and state != "local"}
    assert_verdicts(worlds, functions.cases, expected)


def test_transforms_that_need_no_maximum(worlds):
    assert_verdicts(worlds, functions.normalised, dict.fromkeys(functions.NORMALISED, "exact"))


def outside(rank):
    data = data_of()
    graph = graph_of(data)
    norms = functions.NORMS.items()
    return {name: verdict(make, call, data, graph, put=None) for name, (make, call) in norms}


def test_norms_outside_of_a_distributed_model(worlds):
    """With a batch vector they are as inside; rows alone do not show that they are nodes."""
    told = maker()["of_functions"]()
    for name, found in worlds.run(3, outside)[0].items():
        if name not in functions.BY_ROWS:
            assert (name, found) == (name, told[name][0])


@on_ranks(2)
def test_offsets_of_one_rank_are_refused_before_torch_reads_them(rank):
    graph = graph_of(data_of())
    values = torch.ones(len(graph.edge_index[1]), 2)
    with pytest.raises(ArgumentError, match=r"segment_reduce .* ids of this rank only"):
        segment(values, graph.edge_index[1])


def test_the_page_of_compiled_layers_has_those_of_the_tests():
    page = (DOCS / "reference" / "compiled_layers.md").read_text()
    whole, broken = page.split("## Layers that break the graph")
    whole = re.findall(r"`([^`]+)`", " ".join(whole.split("to 1e-12.")[1].split()))
    told = dict.fromkeys(whole, "one graph")
    told |= dict(re.findall(r"^\| (.*?) \| (.+) \|$", broken, re.MULTILINE)[2:])
    assert told.keys() == LAYERS.keys(), "run: python docs/make_compiled_layers.py"
    # what the tests of compiled models rely on
    assert {told[name] for name in ("SAGEConv mean", "GATConv heads", "GCNConv")} == {"one graph"}
