"""MeshGraphNet and EncodeProcessDecode alone, and on ranks."""

import copy

import pytest
import torch
from torch_geometric.data import HeteroData

import varcomm
from tests.graph.graphs import METHODS, WORLDS, split_by, wild
from tests.graph.typed import owners
from tests.models.comparing import compare
from tests.ops.comparing import Failures, assert_none
from varcomm.errors import ArgumentError
from varcomm.graph import distribute, partition
from varcomm.models import EncodeProcessDecode, GraphTransformer, MeshGraphNet

CLOSE = {"rtol": 1e-12, "atol": 1e-12}
ENCODER, PROCESSOR, DECODER = ("grid", "to", "mesh"), ("mesh", "to", "mesh"), ("mesh", "to", "grid")
KINDS = (ENCODER, PROCESSOR, DECODER)


def mesh_graph_net(blocks=3):
    torch.manual_seed(0)
    return MeshGraphNet(4, 3, 2, hidden_channels=8, num_blocks=blocks).double()


def encode_process_decode(blocks=2):
    torch.manual_seed(0)
    return EncodeProcessDecode(4, 3, 2, 1, hidden_channels=8, num_blocks=blocks).double()


def graph_transformer(blocks):
    return GraphTransformer(4, 3, 2, hidden_channels=8, num_blocks=blocks, num_heads=2).double()


def earth(grid=23, mesh=9):
    """A grid and a mesh with edges by chance, the same at every call; some nodes have none."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    data = HeteroData()
    data["grid"].x, data["grid"].y = draw(grid, 4), draw(grid, 1)
    data["mesh"].x = draw(mesh, 3)
    for (source, name, target), count in zip(KINDS, (31, 40, 50), strict=True):
        ends = [
            torch.randint(data[end].num_nodes - 1, (count,), generator=generator)
            for end in (source, target)
        ]
        data[source, name, target].edge_index = torch.stack(ends)
        data[source, name, target].edge_attr = draw(count, 2)
    return data


@pytest.mark.parametrize("blocks", [0, 1, 2])
def test_a_message_goes_as_many_edges_as_there_are_blocks(blocks):
    """On a line; each point of the grid stands at a node of the mesh."""
    nodes, steps = torch.arange(5), torch.stack([torch.arange(4), torch.arange(1, 5)])
    edges = {ENCODER: nodes.expand(2, -1), PROCESSOR: steps, DECODER: nodes.expand(2, -1)}
    lengths = {kind: torch.ones(ends.shape[1], 2).double() for kind, ends in edges.items()}
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    both = {"grid": x, "mesh": torch.randn(5, 3, dtype=torch.float64)}
    for out in (
        mesh_graph_net(blocks)(x, steps, torch.ones(4, 3).double()),
        encode_process_decode(blocks)(both, edges, lengths),
        graph_transformer(blocks)(x, steps, torch.ones(4, 3).double()),
    ):
        (gradient,) = torch.autograd.grad(out[4].sum(), x)
        assert (gradient.abs().sum(1) > 0).tolist() == [node >= 4 - blocks for node in range(5)]


def test_types_that_are_missing():
    data = earth()
    edges = {kind: ends for kind, ends in data.edge_index_dict.items() if kind != DECODER}
    with pytest.raises(ArgumentError, match=r"edge_index needs .*'grid'\) is missing"):
        encode_process_decode()(data.x_dict, edges, data.edge_attr_dict)


def mesh_graph_net_on_ranks(rank, methods):
    failures, data, model = Failures(), wild(), mesh_graph_net()
    alone = copy.deepcopy(model)
    inputs = [data.x.clone().requires_grad_(), data.edge_attr.clone().requires_grad_()]
    out = alone(inputs[0], data.edge_index, inputs[1])
    (out - data.y).square().mean().backward()
    for method in methods:
        graph = partition(data, method=method)
        together, ids = distribute(copy.deepcopy(model), graph), graph.owned_ids
        own = [graph.x.requires_grad_(), graph.edge_attr.requires_grad_()]
        with varcomm.trace() as calls:
            part = together(own[0], graph.edge_index, own[1])
        graph.mean((part - graph.y).square()).backward()
        with failures.named(graph.method, "bytes"):
            # one exchange a block, of the sources' share
            assert sum(call.sent for call in calls) == 3 * graph.report().nbytes(8, 8)[rank]
        edges = torch.isin(data.edge_index[1], ids)
        pairs = {"output": (part, out[ids]), "x": (own[0].grad, inputs[0].grad[ids])}
        pairs["edge_attr"] = own[1].grad, inputs[1].grad[edges]
        compare(failures, graph.method, pairs, together, alone, CLOSE)
    return failures


def outcome(model, data, loss):
    """Output, loss, and gradients of inputs, by name and type."""
    x = {kind: value.clone().requires_grad_() for kind, value in data.x_dict.items()}
    edges = {kind: value.clone().requires_grad_() for kind, value in data.edge_attr_dict.items()}
    out = model(x, data.edge_index_dict, edges)
    value = loss(out)
    value.backward()
    found = {("x", kind): leaf.grad for kind, leaf in (x | edges).items()}
    return found | {("output", "grid"): out.detach(), ("loss", ""): value.detach()}


def encode_process_decode_on_ranks(rank, ways):
    failures, data, model = Failures(), earth(), encode_process_decode()
    alone = copy.deepcopy(model)
    expected = outcome(alone, data, lambda out: (out - data["grid"].y).square().mean())
    ranks = torch.distributed.get_world_size()
    for way in ways:
        graph = partition(data, method=way if way == "metis" else owners(data, way, ranks))
        together = distribute(copy.deepcopy(model), graph)
        own = outcome(together, graph, lambda out, g=graph["grid"]: g.mean((out - g.y).square()))
        rows = {key: graph[key[1]].owned_ids if key[1] else ... for key in own}
        pairs = {key: (own[key], want[rows[key]]) for key, want in expected.items()}
        compare(failures, way, pairs, together, alone, CLOSE)
    return failures


@pytest.mark.parametrize("ranks", WORLDS)
def test_on_ranks_as_alone(worlds, ranks):
    methods = [split_by(method, 24, ranks) for method in METHODS]
    assert_none(worlds.run(ranks, mesh_graph_net_on_ranks, methods))
    ways = ["metis", "a rank owns nothing"]
    assert_none(worlds.run(ranks, encode_process_decode_on_ranks, ways))
