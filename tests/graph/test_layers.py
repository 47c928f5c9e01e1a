"""Every layer that is called exact gives on ranks what it gives in one process."""

import copy
from functools import cache
from types import SimpleNamespace

import pytest
import torch
import torch_geometric.nn as pyg

import varcomm
from tests.graph.graphs import split_by
from tests.graph.layers import example
from tests.graph.layers_beyond import LAYERS
from tests.ops.comparing import Failures, assert_none
from varcomm.graph import distribute, partition
from varcomm.graph.adapt.checks import EXACT_AGGREGATIONS, REFUSED

# torch has no second derivative of the attention that it computes on the CPU
NO_SECOND_DERIVATIVE = (pyg.GPSConv,)

CLOSE = {"rtol": 1e-12, "atol": 1e-12}

data_of = cache(example)
graph_of = cache(lambda method: partition(data_of(), method=split(method)))


def split(method):
    ranks = torch.distributed.get_world_size()
    return split_by(method, data_of().num_nodes, ranks)


def outcome(layer, model, graph, edge_index, weight):
    """Output, gradients of the inputs and of each parameter, and of these gradients' lengths."""
    given = SimpleNamespace(**dict(graph))
    inputs = {}
    for name in layer.by:
        inputs[f"input {name}"] = getattr(given, name).clone().requires_grad_()
        setattr(given, name, inputs[f"input {name}"])
    out = layer.call(model, given, edge_index)
    by = inputs | dict(model.named_parameters())
    loss = (out * weight[:, : out.shape[1]]).sum()
    settings = {"allow_unused": True, "materialize_grads": True}
    first = torch.autograd.grad(loss, [*by.values()], create_graph=True, **settings)
    found = {"output": out} | dict(zip(by, first, strict=True))
    # of the rows' gradients alone: those of parameters are parts of a sum still
    length = sum((found[name] ** 2).sum() for name in inputs)
    if inputs and length.requires_grad and not isinstance(model, NO_SECOND_DERIVATIVE):
        second = torch.autograd.grad(length, [*by.values()], **settings)
        found |= {f"second by {name}": value for name, value in zip(by, second, strict=True)}
    return {name: value.detach() for name, value in found.items()}


@cache
def alone(name):
    """What a layer gives in one process, and with it the layer."""
    layer, data = LAYERS[name], data_of()
    torch.manual_seed(0)
    model = layer.make().double().eval()
    weight = torch.randn(data.num_nodes, 64, dtype=torch.float64)
    found = outcome(layer, copy.deepcopy(model), data, data.edge_index, weight)
    assert found["output"].isfinite().all(), name
    return model, weight, found


def check_layers(rank, names, methods):
    failures, data = Failures(), data_of()
    for method in methods:
        graph = graph_of(method)
        edges = torch.isin(data.edge_index[1], graph.owned_ids)
        rows = {data.num_nodes: graph.owned_ids, data.num_edges: edges}
        for name in names:
            layer = LAYERS[name]
            model, weight, expected = alone(name)
            model = distribute(copy.deepcopy(model), graph)
            weight = weight[graph.owned_ids]
            parts = outcome(layer, model, graph.data, graph.edge_index, weight)
            parameters = dict(model.named_parameters())
            for what, value in expected.items():
                got = parts[what]
                if what.removeprefix("second by ") in parameters:
                    got = varcomm.all_reduce(got)
                else:
                    value = value[rows[len(value)]]
                with failures.named(name, method, what):
                    torch.testing.assert_close(got, value, equal_nan=True, **CLOSE)
    return failures


def classes():
    names = {}
    for name in LAYERS:
        names.setdefault(name.split(" ")[0], []).append(name)
    return names


IDLE = "a rank owns nothing"
slow = pytest.mark.slow


@pytest.mark.parametrize("kind", classes())
def test_layer_equals_its_single_process_twin(worlds, kind):
    assert_none(worlds.run(3, check_layers, classes()[kind], [IDLE]))


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
    assert_none(worlds.run(ranks, check_layers, few, [method]))


def test_each_layer_that_is_called_exact_is_tested_here():
    layers = [layer.make() for layer in LAYERS.values()]
    tested = {type(layer).__name__ for layer in layers}
    elsewhere = {"MessagePassing", "HANConv", "HGTConv", "HeteroConv"}
    assert tested == set(pyg.conv.__all__) - REFUSED.keys() - elsewhere
    modules = [module for layer in layers for module in layer.modules()]
    aggregations = {type(m).__name__ for m in modules if isinstance(m, pyg.aggr.Aggregation)}
    assert aggregations == EXACT_AGGREGATIONS
