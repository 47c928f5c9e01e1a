"""MeshGraphNet alone, and on ranks."""

import copy

import pytest
import torch

import varcomm
from tests.graph.graphs import METHODS, WORLDS, split_by, wild
from tests.ops.comparing import Failures, assert_none
from varcomm.graph import distribute, partition
from varcomm.models import MeshGraphNet
from varcomm.models.mesh_graph_net import GraphNetBlock

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def new_model(hidden=8, blocks=3):
    torch.manual_seed(0)
    return MeshGraphNet(4, 3, 2, hidden_channels=hidden, num_blocks=blocks).double()


@pytest.mark.parametrize("blocks", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_shapes(dtype, blocks):
    data = wild(dtype=dtype)
    out = new_model(blocks=blocks).to(dtype)(data.x, data.edge_index, data.edge_attr)
    assert (out.shape, out.dtype) == ((24, 2), dtype)


@pytest.mark.parametrize("hidden", [1, 8, 16])
@pytest.mark.parametrize("blocks", [0, 1, 3])
def test_number_of_parameters(hidden, blocks):
    def linear(inputs, outputs):
        return inputs * outputs + outputs

    def mlp(inputs):
        return linear(inputs, hidden) + linear(hidden, hidden) + 2 * hidden

    encoders = mlp(4) + mlp(3)
    # the edges' MLP acts on three vectors side by side
    block = mlp(3 * hidden) + mlp(2 * hidden)
    decoder = linear(hidden, hidden) + linear(hidden, 2)
    total = sum(p.numel() for p in new_model(hidden, blocks).parameters())
    assert total == encoders + blocks * block + decoder


def test_edges_act_as_an_mlp_of_target_source_and_edge_side_by_side():
    torch.manual_seed(0)
    block, data = GraphNetBlock(3).double(), wild()
    x, (source, target) = data.x[:, :3], data.edge_index
    new_x, new_edges = block(x, data.edge_index, data.edge_attr)

    weight = torch.cat(
        [block.from_target.weight, block.from_source.weight, block.from_edge.weight], dim=1
    )
    side_by_side = torch.cat([x[target], x[source], data.edge_attr], dim=1)
    updated = block.edge_mlp(side_by_side @ weight.T + block.from_edge.bias)
    edges = data.edge_attr + updated
    received = torch.zeros_like(x).index_add(0, target, edges)
    nodes = x + block.node_mlp(torch.cat([x, received], dim=1))
    torch.testing.assert_close(new_edges, edges, **CLOSE)
    torch.testing.assert_close(new_x, nodes, **CLOSE)


def test_updates_are_residual():
    """With the last norms at zero, a block changes nothing."""
    torch.manual_seed(0)
    block, data = GraphNetBlock(3).double(), wild()
    for mlp in (block.edge_mlp, block.node_mlp):
        torch.nn.init.zeros_(mlp[-1].weight)
    new_x, new_edges = block(data.x[:, :3], data.edge_index, data.edge_attr)
    assert torch.equal(new_x, data.x[:, :3])
    assert torch.equal(new_edges, data.edge_attr)


def test_numbers_of_nodes_and_edges_mean_nothing():
    model, data = new_model(), wild()
    out = model(data.x, data.edge_index, data.edge_attr)
    nodes, edges = torch.randperm(data.num_nodes), torch.randperm(data.num_edges)
    # node nodes[i] of the graph is node i of the permuted one
    edge_index = nodes.argsort()[data.edge_index[:, edges]]
    permuted = model(data.x[nodes], edge_index, data.edge_attr[edges])
    torch.testing.assert_close(permuted, out[nodes], **CLOSE)


@pytest.mark.parametrize("blocks", [1, 2])
def test_a_node_sees_as_many_edges_away_as_there_are_blocks(blocks):
    line = torch.stack([torch.arange(4), torch.arange(1, 5)])
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    out = new_model(blocks=blocks)(x, line, torch.ones(4, 3, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(out[4].sum(), x)
    seen = gradient.abs().sum(1) > 0
    assert seen.tolist() == [node >= 4 - blocks for node in range(5)]


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_gradients_reach_every_parameter():
    model, data = new_model(), wild()
    model(data.x, data.edge_index, data.edge_attr).square().sum().backward()
    for name, gradient in gradients(model).items():
        assert gradient is not None, name
        assert gradient.abs().max() > 0, name


def check_on_ranks(rank, methods):
    failures, data, model = Failures(), wild(), new_model()
    alone = copy.deepcopy(model)
    inputs = [data.x.clone().requires_grad_(), data.edge_attr.clone().requires_grad_()]
    out = alone(inputs[0], data.edge_index, inputs[1])
    (out - data.y).square().mean().backward()
    for method in methods:
        graph = partition(data, method=method)
        together, ids = distribute(copy.deepcopy(model), graph), graph.owned_ids
        edges = torch.isin(data.edge_index[1], ids)
        own = [graph.x.requires_grad_(), graph.edge_attr.requires_grad_()]
        with varcomm.trace() as calls:
            part = together(own[0], graph.edge_index, own[1])
        graph.mean((part - graph.y).square()).backward()
        varcomm.data_parallel.sum_gradients(together)
        with failures.named(graph.method, "bytes"):
            # one exchange a block, of the sources' share
            assert sum(call.sent for call in calls) == 3 * graph.report().nbytes(8, 8)[rank]
        pairs = [("output", part, out[ids]), ("x", own[0].grad, inputs[0].grad[ids])]
        pairs.append(("edge_attr", own[1].grad, inputs[1].grad[edges]))
        expected = gradients(alone)
        pairs += [(name, got, expected[name]) for name, got in gradients(together).items()]
        for name, got, want in pairs:
            with failures.named(graph.method, name):
                torch.testing.assert_close(got, want, **CLOSE)
    return failures


@pytest.mark.parametrize("ranks", WORLDS)
def test_on_ranks_as_alone(worlds, ranks):
    assert_none(worlds.run(ranks, check_on_ranks, [split_by(m, 24, ranks) for m in METHODS]))
