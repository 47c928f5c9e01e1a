"""GraphTransformer alone, and on ranks that share nodes, heads, or both."""

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import varcomm
from tests.graph.graphs import WORLDS, split_by, wild
from tests.ops.comparing import Failures, assert_none
from tests.worlds import on_ranks
from varcomm import ArgumentError
from varcomm.data_parallel import sum_gradients
from varcomm.graph import distribute, partition
from varcomm.models import GraphTransformer
from varcomm.tensor_parallel import parallelize, shard_spec

CLOSE = {"rtol": 1e-10, "atol": 1e-11}
HIDDEN, HEADS, WIDE = 15, 5, 17


def new_model():
    torch.manual_seed(0)
    return GraphTransformer(
        *(4, 3, 2),
        hidden_channels=HIDDEN,
        num_blocks=2,
        num_heads=HEADS,
        mlp_channels=WIDE,
    ).double()


def samples(data, *batch):
    """Features of several samples, (N, *batch, 4)."""
    generator = torch.Generator().manual_seed(2)
    shape = (data.num_nodes, *batch, 4)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def derivatives(model, values, inputs, mean, complete):
    """Derivatives of the loss, and of a penalty: the square of the loss's gradient by the nodes."""
    parameters = list(model.parameters())
    loss = mean(model(*values).square())
    nodes, edges, *first = torch.autograd.grad(loss, [*inputs, *parameters], create_graph=True)
    second = torch.autograd.grad(mean(nodes.square()), parameters, allow_unused=True)
    yield "loss", {"": loss}
    yield "inputs", {"x": nodes, "edge_attr": edges}
    for what, gradients in (("gradient", first), ("second", second)):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.detach().clone()
        complete(model)
        yield what, {name: parameter.grad for name, parameter in model.named_parameters()}


def on_mesh(rank, sizes, head_sizes, mlp_sizes, methods):
    """Nodes shared along one dimension, heads and features along the other."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("graph", "tensor"))
    failures, data, model = Failures(), wild(), new_model()
    data.x = samples(data, 2)
    whole = [data.x.clone().requires_grad_(), data.edge_attr.clone().requires_grad_()]
    alone = copy.deepcopy(model)
    out = alone(whole[0], data.edge_index, whole[1])
    values = (whole[0], data.edge_index, whole[1])
    want = dict(derivatives(alone, values, whole, torch.mean, lambda model: None))
    for method in methods:
        graph = partition(data, method=method, group=mesh["graph"])
        together, ids = copy.deepcopy(model), graph.owned_ids
        plan = together.tensor_parallel_plan(
            mesh["tensor"], head_sizes=head_sizes, mlp_sizes=mlp_sizes
        )
        parallelize(together, plan, group=mesh["tensor"])
        distribute(together, graph)
        own = [graph.x.requires_grad_(), graph.edge_attr.requires_grad_()]
        values = (own[0], graph.edge_index, own[1])
        with varcomm.trace() as calls:
            part = together(*values)
        with failures.named(graph.method, "output"):
            torch.testing.assert_close(part, out[ids], **CLOSE)
            # in each of 2 blocks, keys and values of own heads, for 2 samples
            heads = together.blocks[0].attention.qkv.weight.shape[0] // (3 * (HIDDEN // HEADS))
            sent = sum(call.sent for call in calls if "sum" not in call.name)
            each = graph.report().nbytes(1, 8)[graph.group.rank]
            assert sent == 2 * each * 2 * 3 * heads * 2
        edges = torch.isin(data.edge_index[1], ids)
        rows = {"x": ids, "edge_attr": edges}

        def complete(model):
            sum_gradients(model, mesh["graph"])

        for what, got in derivatives(together, values, own, graph.mean, complete):
            for name, value in got.items():
                expected = want[what][name]
                parameter = dict(together.named_parameters()).get(name)
                if name in rows:
                    expected = expected[rows[name]]
                elif parameter is not None and shard_spec(parameter) is not None:
                    expected = shard_spec(parameter).shard(expected)
                with failures.named(graph.method, what, name):
                    torch.testing.assert_close(value, expected, **CLOSE)
    return failures


@pytest.mark.parametrize("ranks", WORLDS)
def test_nodes_on_ranks(worlds, ranks):
    methods = [split_by(method, 24, ranks) for method in ("random", "a rank owns nothing")]
    assert_none(worlds.run(ranks, on_mesh, (ranks, 1), None, None, methods))


UNEVEN = {
    1: ([5], [17]),
    2: ([0, 5], [17, 0]),
    3: ([4, 0, 1], [2, 15, 0]),
    5: ([0, 2, 0, 3, 0], [5, 0, 12, 0, 0]),
}


@pytest.mark.parametrize("balanced", [True, False], ids=["balanced", "uneven"])
@pytest.mark.parametrize("ranks", WORLDS)
def test_heads_on_ranks(worlds, ranks, balanced):
    sizes = (None, None) if balanced else UNEVEN[ranks]
    assert_none(worlds.run(ranks, on_mesh, (1, ranks), *sizes, ["block"]))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [UNEVEN[2], (None, None)], ids=["uneven", "balanced"])
def test_nodes_and_heads_on_a_mesh(worlds, sizes):
    methods = ["metis", split_by("a rank owns nothing", 24, 2)]
    assert_none(worlds.run(4, on_mesh, (2, 2), *sizes, methods))


@on_ranks(2)
def test_wrong_sizes(rank):
    with pytest.raises(ArgumentError, match="hidden_channels 15 must be a multiple of num_heads 4"):
        GraphTransformer(4, 3, 2, hidden_channels=15, num_blocks=1, num_heads=4)
    with pytest.raises(ArgumentError, match=r"head_sizes \[2, 2\] sum to 4, but there are 5"):
        new_model().tensor_parallel_plan(head_sizes=[2, 2] if rank else None)
