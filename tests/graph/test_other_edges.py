"""Edges that are made of a graph's, those of another graph, and models that move to it."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from torch_geometric.data import Data
from torch_geometric.utils import add_self_loops, degree, remove_self_loops, segregate_self_loops

from tests.graph.graphs import grid, wild
from tests.ops.comparing import Failures
from tests.worlds import on_ranks
from varcomm import ArgumentError
from varcomm.graph import distribute, partition


@on_ranks(3)
def test_edges_of_another_graph_are_refused(rank):
    first, second = partition(wild(), method="block"), partition(grid(4, 6), method="block")
    x = torch.zeros(second.num_owned, 4, dtype=torch.float64)
    for conv in (pyg.SAGEConv, pyg.GATConv, pyg.GCNConv):  # two of them make new edges
        torch.manual_seed(0)
        model = distribute(conv(4, 2).double(), first)
        for edges in (second.edge_index, second.edge_index.clone()):
            with pytest.raises(
                ArgumentError, match=r"another graph .* distribute\(model, graph\) ag"
            ):
                model(x, edges)
        assert distribute(model, second)(x, second.edge_index).shape == (second.num_owned, 2)


EDGES = torch.tensor([[0, 3, 2, 1, 3, 4], [1, 1, 2, 0, 1, 2]])
LOOPS = torch.arange(3).expand(2, -1)

# edges made of those of the graph; None where they are refused
MADE = {
    "a copy": lambda e: e.clone(),
    "two of them": lambda e: e[:, [4, 0]],
    "none": lambda e: e[:, :0],
    "some": lambda e: e[:, torch.arange(e.shape[1]) % 2 == 0],
    "loops behind": lambda e: torch.cat([e, LOOPS], dim=1),
    "loops in front": lambda e: torch.cat([LOOPS, e], dim=-1),
    "twice": lambda e: torch.cat([e, e], dim=1),
    "against their direction": lambda e: e.flip(0),
    "by their ends": lambda e: torch.stack([*e]),
}
REFUSED = {
    "int32": lambda e: e.int(),
    "another": lambda e: torch.tensor([[0], [2]]),
    "beyond": lambda e: torch.cat([e, torch.tensor([[9], [9]])], dim=1),
    "of one end": lambda e: torch.stack([e[0], e[0]]),
}


@on_ranks(1)
def test_edges_made_of_a_graphs(rank):
    failures = Failures()
    graph = partition(Data(x=torch.randn(5, 4), edge_index=EDGES), method="block")
    torch.manual_seed(0)
    layer = pyg.SAGEConv(4, 4)
    expected = {name: layer(graph.x, make(EDGES)) for name, make in MADE.items()}
    distribute(layer, graph)
    for name, make in MADE.items():
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with mode(), failures.named(name, mode.__name__):
                torch.testing.assert_close(layer(graph.x, make(graph.edge_index)), expected[name])
    for name, make in REFUSED.items():
        with failures.named(name), pytest.raises(ArgumentError):
            layer(graph.x, make(graph.edge_index))
    return failures


# edges by their positions, which are other edges on each rank
PLACES = {
    "first": lambda g: g.edge_index[:, :3],
    "all but one": lambda g: g.edge_index[..., 1:],
    "every second": lambda g: g.edge_index[0, ::2],
    "first targets": lambda g: g.edge_index[1][:3],
    "of the other direction": lambda g: g.edge_index.flip(0)[:, :3],
    "listed": lambda g: g.edge_index[:, [2, 0]],
}
ONE_EDGE = {
    "one after the other": lambda g: [g.x[i] for i in g.edge_index[0]],
    "a row of one edge": lambda g: g.x[g.edge_index[0, 0]],
    "columns of one edge": lambda g: g.x[g.edge_index[0][-1], :2],
}


@on_ranks(2)
def test_edges_by_position_are_refused(rank):
    graph, failures = partition(wild(), method="block"), Failures()
    for name, take in (PLACES | ONE_EDGE).items():
        with failures.named(name), pytest.raises(ArgumentError):
            take(graph)
    idle = partition(wild(), method=torch.zeros(24, dtype=torch.int64))
    for name, take in PLACES.items():
        with failures.named(name, "a rank owns nothing"), pytest.raises(ArgumentError):
            take(idle)
    for last in (lambda g: g.batch[-1], lambda g: g.batch[0].item()):
        with failures.named("a group"), pytest.raises(ArgumentError, match=r"max\(\)"):
            last(idle)
    x, (row, col) = graph.x, graph.edge_index
    assert graph.edge_index[:, :].kind == "edges"
    assert graph.edge_index[:, :0].shape == (2, 0)
    torch.testing.assert_close(x[col[0]], x[graph.edges.local_ids[1, 0]])  # on this rank
    assert torch.equal(x[row[graph.interior]], x[graph.edges.local_ids[0, graph.interior]])
    return failures


@on_ranks(2)
def test_edges_without_loops_are_copies(rank):
    """Values of edges that remain are copies, also if there are no loops to be removed."""
    ends = wild().edge_index
    ends = ends[:, ends[0] != ends[1]]
    weight = torch.arange(2.0 * ends.shape[1]).view(-1, 2)
    graph = partition(Data(edge_index=ends, weight=weight, num_nodes=24), method="block")
    given = graph.weight.clone().requires_grad_()
    edges, kept = remove_self_loops(graph.edge_index, given)
    assert torch.equal(edges.plain, graph.edges.local_ids)
    assert torch.equal(torch.autograd.grad(kept.square().sum(), given)[0], 2 * given)
    kept.detach().zero_()
    assert torch.equal(given, graph.weight)
    columns = graph.edge_index[0] != graph.edge_index[1]
    turned = given.detach().T
    turned[..., columns].zero_()
    assert torch.equal(turned[:, columns], graph.weight.T)
    _, values, loops, none = segregate_self_loops(graph.edge_index, given)
    assert torch.equal(values, given)
    assert (loops.shape, none.shape) == ((2, 0), (0, 2))
    for wrong in (given[1:], torch.cat([given, given])):
        with pytest.raises(IndexError, match="mask"):
            remove_self_loops(graph.edge_index, wrong)


@on_ranks(3)
def test_loops_up_to_the_last_node(rank):
    """Loops up to the last node that has an edge, which ranks find once."""
    ends = wild().edge_index
    data = Data(edge_index=ends[:, (ends < 20).all(0)], num_nodes=24)
    graph = partition(data, method="block")
    owned = graph.owned_ids
    for make in (lambda e: e, lambda e: remove_self_loops(e)[0]) * 2:
        want = degree(add_self_loops(make(data.edge_index))[0][1], 24)[owned]
        edges = add_self_loops(make(graph.edge_index))[0]
        out = torch.zeros(len(owned)).index_add(0, edges[1], torch.ones(edges.shape[1]))
        assert torch.equal(out, want)


@on_ranks(3)
def test_copies_and_other_parts_stay(rank):
    data, other = wild(), wild(31)
    torch.manual_seed(0)
    model = pyg.Sequential(
        "x, e", [(pyg.GCNConv(4, 4), "x, e -> x"), (pyg.GCNConv(4, 4), "x, e -> x")]
    ).double()
    alone = copy.deepcopy(model)
    here, there = partition(data, method="random"), partition(other, method="block")

    def is_right(model, alone, graph, whole):
        want = alone(whole.x, whole.edge_index)[graph.owned_ids]
        torch.testing.assert_close(model(graph.x, graph.edge_index), want, rtol=1e-12, atol=1e-12)

    distribute(model, here)
    kind = type(model[0])
    distribute(model, there)
    assert type(model[0]) is kind  # so that compiled code stays valid
    is_right(model, alone, there, other)
    # a copy stays where it is, with parameters of its own
    twin = copy.deepcopy(model)
    distribute(model, here)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    is_right(twin, alone, there, other)
    model.load_state_dict(twin.state_dict())
    is_right(model, alone, here, data)
    # and so do other parts of a model
    distribute(model[0], there)
    is_right(model[0], alone[0], there, other)
    is_right(model[1], alone[1], here, data)
    distribute(model, there)
    is_right(model, alone, there, other)


@on_ranks(3)
def test_extremes_at_sources(rank):
    """The least and the greatest number of a dtype are values like others; bf16 counts ties."""
    data = wild()
    graph = partition(data, method="random")
    for dtype, how, value in ((torch.uint8, "amin", 255), (torch.int8, "amax", -128)):
        found = []
        for g in (data, graph):
            values = torch.full((g.edge_index.shape[1],), value, dtype=dtype)
            start = torch.zeros(g.x.shape[0], dtype=dtype)
            found.append(start.scatter_reduce(0, g.edge_index[0], values, how, include_self=False))
        assert torch.equal(found[1], found[0][graph.owned_ids])


@on_ranks(3)
def test_parts_that_are_put_in(rank):
    """Into a part, while an inner model runs, or a container that came after distribute."""
    graph = partition(wild(), method="random")
    for case in ("inside", "a container", "late"):
        torch.manual_seed(0)
        inner = pyg.Sequential("x, e", [(pyg.GCNConv(4, 4), "x, e -> x")])
        model = pyg.Sequential("x, e", [(inner, "x, e -> x"), (torch.nn.Identity(), "x -> x")])
        distribute(inner.double(), graph)
        late = torch.nn.Sequential(torch.nn.Identity())
        if case == "a container":
            model.extra = late
        distribute(model.double(), graph)
        if case == "late":
            model.extra = late
        model(graph.x, graph.edge_index)
        if case == "inside":
            model[1].norm = pyg.BatchNorm(4)
        else:
            model.extra.insert(0, torch.nn.BatchNorm1d(4))
        inner(graph.x, graph.edge_index)
        with pytest.raises(ArgumentError, match="put into the model after distribute"):
            model(graph.x, graph.edge_index)
