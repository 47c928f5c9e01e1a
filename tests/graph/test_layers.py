"""Every layer that is called exact gives on ranks what it gives in one process."""

from functools import cache

import pytest
import torch
import torch_geometric.nn as pyg

from tests.graph.against_one import compare
from tests.graph.graphs import split_by
from tests.graph.layers import example
from tests.graph.layers_beyond import LAYERS
from tests.ops.comparing import assert_none
from varcomm.graph import partition
from varcomm.graph.layers.refused import EXACT_AGGREGATIONS, REFUSED


@cache
def graph_of(method):
    ranks = torch.distributed.get_world_size()
    return partition(example(), method=split_by(method, 24, ranks))


def check_layers(rank, names, method):
    wrong, data, graph = [], example(), graph_of(method)
    for name in names:
        layer = LAYERS[name]

        def call(model, g, layer=layer):
            out = layer.call(model, g, g.edge_index)
            assert out.isfinite().all()
            return out

        # torch has no second derivative of the attention that it computes on the CPU
        second = not name.startswith("GPSConv")
        make = lambda layer=layer: layer.make().eval()  # noqa: E731
        found = compare(make, call, data, graph, layer.by, second=second)
        wrong += [f"{name} by {method}: {one}" for one in found]
    return wrong


def classes():
    names = {}
    for name in LAYERS:
        names.setdefault(name.split(" ")[0], []).append(name)
    return names


IDLE = "a rank owns nothing"
slow = pytest.mark.slow


@pytest.mark.parametrize("kind", classes())
def test_layer_equals_its_single_process_twin(worlds, kind):
    assert_none(worlds.run(3, check_layers, classes()[kind], IDLE))


@pytest.mark.parametrize(
    ("ranks", "method"),
    [
        pytest.param(1, "random", marks=slow),
        pytest.param(2, "metis", marks=slow),
        pytest.param(3, "random", marks=slow),
        pytest.param(5, "metis", marks=slow),
    ],
)
def test_layers_on_other_partitions(worlds, ranks, method):
    few = [names[-1] for names in classes().values()]
    assert_none(worlds.run(ranks, check_layers, few, method))


def test_each_layer_that_is_called_exact_is_tested_here():
    layers = [layer.make() for layer in LAYERS.values()]
    tested = {type(layer).__name__ for layer in layers}
    elsewhere = {"MessagePassing", "HANConv", "HGTConv", "HeteroConv"}
    assert tested == set(pyg.conv.__all__) - REFUSED.keys() - elsewhere
    modules = [module for layer in layers for module in layer.modules()]
    aggregations = {type(m).__name__ for m in modules if isinstance(m, pyg.aggr.Aggregation)}
    assert aggregations == EXACT_AGGREGATIONS
