"""MeshGraphNet alone, and on ranks."""

import copy

import pytest
import torch

import varcomm
from tests.graph.graphs import METHODS, WORLDS, split_by, wild
from tests.ops.comparing import Failures, assert_none
from varcomm.graph import distribute, partition
from varcomm.models import MeshGraphNet

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
