"""Every layer that is called exact gives on ranks what it gives in one process."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg

import varcomm
from tests.graph.graphs import WORLDS, split_by, wild
from tests.graph.layers import LAYERS
from tests.ops.comparing import Failures, assert_none
from varcomm.graph import distribute, partition
from varcomm.graph.layers import EXACT, EXACT_AGGREGATIONS


def outcome(layer, model, x, graph, edge_index, weight, complete):
    """Output, gradient of the input and of each parameter."""
    x = x.clone().requires_grad_()
    out = layer.call(model, x, graph, edge_index)
    (out * weight(out)).sum().backward()
    complete(model)
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
    }
    return {"output": out.detach(), "input": x.grad} | gradients


def check_layer(rank, name, methods):
    failures, layer, data = Failures(), LAYERS[name], wild()
    torch.manual_seed(0)
    model = layer.make().double()
    torch.manual_seed(0)
    weights = torch.randn(data.num_nodes, 64, dtype=torch.float64)

    alone = outcome(
        layer,
        copy.deepcopy(model),
        data.x,
        data,
        data.edge_index,
        lambda out: weights[:, : out.shape[1]],
        lambda model: None,
    )
    assert alone["output"].isfinite().all()
    assert all(value.isfinite().all() for value in alone.values())
    for method in methods:
        graph = partition(data, method=method)
        ids = graph.owned_ids
        parts = outcome(
            layer,
            distribute(copy.deepcopy(model), graph),
            graph.x,
            graph,
            graph.edge_index,
            lambda out, ids=ids: weights[ids, : out.shape[1]],
            varcomm.data_parallel.sum_gradients,
        )
        for what, value in alone.items():
            expected = value[ids] if what in ("output", "input") else value
            with failures.named(graph.method, what):
                torch.testing.assert_close(parts[what], expected, rtol=1e-12, atol=1e-12)
    return failures


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("ranks", WORLDS)
def test_layer_equals_its_single_process_twin(worlds, ranks, name):
    owns_nothing = split_by("a rank owns nothing", wild().num_nodes, ranks)
    methods = ["metis", "block", "random", owns_nothing]
    assert_none(worlds.run(ranks, check_layer, name, methods))


def test_each_layer_that_is_called_exact_is_tested_here():
    layers = [layer.make() for layer in LAYERS.values()]
    tested = {type(layer).__name__ for layer in layers}
    assert tested == EXACT
    modules = [module for layer in layers for module in layer.modules()]
    aggregations = {type(m).__name__ for m in modules if isinstance(m, pyg.aggr.Aggregation)}
    assert aggregations == EXACT_AGGREGATIONS
