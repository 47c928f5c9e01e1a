"""EncodeProcessDecode alone, and on ranks."""

import copy

import pytest
import torch
from torch_geometric.data import HeteroData

import varcomm
from tests.graph.graphs import WORLDS
from tests.graph.typed import owners
from tests.ops.comparing import Failures, assert_none
from varcomm.errors import ArgumentError
from varcomm.graph import distribute, partition
from varcomm.models import EncodeProcessDecode

CLOSE = {"rtol": 1e-12, "atol": 1e-12}
ENCODER, PROCESSOR, DECODER = ("grid", "to", "mesh"), ("mesh", "to", "mesh"), ("mesh", "to", "grid")
KINDS = (ENCODER, PROCESSOR, DECODER)


def new_model(blocks=2):
    torch.manual_seed(0)
    return EncodeProcessDecode(4, 3, 2, 1, hidden_channels=8, num_blocks=blocks).double()


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


def run(model, data):
    return model(data.x_dict, data.edge_index_dict, data.edge_attr_dict)


@pytest.mark.parametrize("blocks", [0, 1, 3])
def test_shapes_and_gradients(blocks):
    model, data = new_model(blocks), earth()
    out = run(model, data)
    assert (out.shape, out.dtype) == ((23, 1), torch.float64)
    out.square().sum().backward()
    for name, parameter in model.named_parameters():
        # without a block, nothing looks at the edges of the mesh
        unused = blocks == 0 and name.startswith("embed_edges.1.")
        assert (parameter.grad is None or not parameter.grad.any()) == unused, name


@pytest.mark.parametrize("blocks", [0, 1, 2])
def test_a_message_goes_as_many_edges_on_the_mesh_as_there_are_blocks(blocks):
    """Each point of the grid stands at a node of the mesh, and the mesh is a line."""
    nodes, steps = torch.arange(5), torch.stack([torch.arange(4), torch.arange(1, 5)])
    edges = {ENCODER: nodes.expand(2, -1), PROCESSOR: steps, DECODER: nodes.expand(2, -1)}
    lengths = {kind: torch.ones(ends.shape[1], 2).double() for kind, ends in edges.items()}
    grid = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    x = {"grid": grid, "mesh": torch.randn(5, 3, dtype=torch.float64)}
    (gradient,) = torch.autograd.grad(new_model(blocks)(x, edges, lengths)[4].sum(), grid)
    seen = gradient.abs().sum(1) > 0
    assert seen.tolist() == [node >= 4 - blocks for node in range(5)]


@pytest.mark.parametrize(
    ("place", "missing", "message"),
    [
        (0, "mesh", r"x needs grid, mesh; mesh is missing among \['grid'\]"),
        (1, DECODER, r"edge_index needs .*; \('mesh', 'to', 'grid'\) is missing"),
        (2, ENCODER, r"edge_attr needs .*; \('grid', 'to', 'mesh'\) is missing"),
    ],
)
def test_types_that_are_missing(place, missing, message):
    data = earth()
    given = [dict(data.x_dict), dict(data.edge_index_dict), dict(data.edge_attr_dict)]
    del given[place][missing]
    with pytest.raises(ArgumentError, match=message):
        new_model()(*given)


def outcome(model, data, loss):
    """Output, loss, and gradients of inputs and parameters, by what and of which type."""
    x = {kind: value.clone().requires_grad_() for kind, value in data.x_dict.items()}
    edges = {kind: value.clone().requires_grad_() for kind, value in data.edge_attr_dict.items()}
    out = model(x, data.edge_index_dict, edges)
    value = loss(out)
    value.backward()
    found = {("x", kind): leaf.grad for kind, leaf in (x | edges).items()}
    return found | {("output", "grid"): out.detach(), ("loss", ""): value.detach()}


def check_on_ranks(rank, ways):
    failures, data, model = Failures(), earth(), new_model()
    alone = copy.deepcopy(model)
    expected = outcome(alone, data, lambda out: (out - data["grid"].y).square().mean())
    ranks = torch.distributed.get_world_size()
    for way in ways:
        owner = way if way in ("metis", "block") else owners(data, way, ranks)
        graph = partition(data, method=owner)
        together = distribute(copy.deepcopy(model), graph)
        own = outcome(together, graph, lambda out, g=graph["grid"]: g.mean((out - g.y).square()))
        varcomm.data_parallel.sum_gradients(together)
        for (what, kind), want in expected.items():
            ids = graph[kind].owned_ids if kind else ...
            with failures.named(way, what, kind):
                torch.testing.assert_close(own[what, kind], want[ids], **CLOSE)
        pairs = zip(together.named_parameters(), alone.parameters(), strict=True)
        for (name, got), want in pairs:
            with failures.named(way, name):
                torch.testing.assert_close(got.grad, want.grad, **CLOSE)
    return failures


@pytest.mark.parametrize("ranks", WORLDS)
def test_on_ranks_as_alone(worlds, ranks):
    assert_none(worlds.run(ranks, check_on_ranks, ["metis", "a rank owns nothing"]))
