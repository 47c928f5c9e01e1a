"""MeshGraphNet and EncodeProcessDecode alone, and on ranks."""

import pytest
import torch

import varcomm
from tests.graph.against_one import compare, graph_of
from tests.graph.graphs import METHODS, wild
from tests.graph.typed import drawn
from tests.worlds import WORLDS, on_ranks
from varcomm.errors import ArgumentError
from varcomm.graph import distribute
from varcomm.models import EncodeProcessDecode, GraphTransformer, MeshGraphNet

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
    data = drawn({"grid": (4, 4), "mesh": (3, 3)}, {ENCODER: 5, PROCESSOR: 5})
    with pytest.raises(ArgumentError, match=r"edge_index needs .*'grid'\) is missing"):
        encode_process_decode()(data.x_dict, data.edge_index_dict, data.edge_attr_dict)


@on_ranks(*WORLDS)
def test_mesh_graph_net_on_ranks(rank):
    wrong, data = [], wild()
    for method in METHODS:
        graph = graph_of(data, method)

        def call(model, g):
            return model(g.x, g.edge_index, g.edge_attr)

        wrong += compare(mesh_graph_net, call, data, graph, ("x", "edge_attr"))
        with varcomm.trace() as calls:
            call(distribute(mesh_graph_net(), graph), graph)
        # one exchange a block, of the sources' share
        assert sum(call.sent for call in calls) == 3 * graph.report().nbytes(8, 8)[rank]
    return wrong


def on_types(model, g):
    x = {"grid": g.x_grid, "mesh": g.x_mesh}
    of_edges = [
        {kind: getattr(g, f"{name}_{'_'.join(kind)}") for kind in KINDS}
        for name in ("edge_index", "edge_attr")
    ]
    return model(x, *of_edges)


@on_ranks(*WORLDS)
def test_encode_process_decode_on_ranks(rank):
    wrong, edges = [], dict(zip(KINDS, (31, 40, 50), strict=True))
    data = drawn({"grid": (23, 4), "mesh": (9, 3)}, edges)
    by = ["x_grid", "x_mesh", *(f"edge_attr_{'_'.join(kind)}" for kind in KINDS)]
    for method in ("metis", "a rank owns nothing"):
        wrong += compare(encode_process_decode, on_types, data, graph_of(data, method), by)
    return wrong
