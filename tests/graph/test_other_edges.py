"""Edges that are not those of the graph which a model is distributed on."""

import re

import pytest
import torch
import torch_geometric.nn as pyg
from torch_geometric.data import Data

from tests.graph.graphs import grid, wild
from tests.ops.comparing import Failures, assert_none
from varcomm import ArgumentError
from varcomm.graph import distribute, partition

AGAIN = "call distribute(model, graph) again."


def complete(nodes):
    every = torch.arange(nodes)
    return Data(
        edge_index=torch.cartesian_prod(every, every).T.contiguous(), x=torch.ones(nodes, 4)
    )


def ring(nodes):
    every = torch.arange(nodes)
    x = torch.arange(4.0 * nodes).view(nodes, 4)
    return Data(edge_index=torch.stack([every, (every + 1) % nodes]), x=x)


def on_another_graph(rank, conv):
    """All edges of the ring, in local numbers, are edges of the complete graph too."""
    graphs = [partition(data, method="block") for data in (complete(12), ring(12))]
    torch.manual_seed(0)
    model = conv(4, 2)
    for mine, other in (graphs, graphs[::-1]):
        distribute(model, mine)
        for edges in (other.edge_index, other.edge_index.clone()):
            try:
                model(other.x, edges)
            except ArgumentError as error:
                assert AGAIN in str(error)  # noqa: PT017
            else:
                # a copy has no owner, and on the complete graph each of its edges exists
                assert edges is not other.edge_index
                assert mine is graphs[0]
        assert model(mine.x, mine.edge_index).shape == (4, 2)
    with pytest.raises(ArgumentError, match="these are the edges of another graph than the one"):
        distribute(model, graphs[0])(graphs[1].x, graphs[1].edge_index)
    return True


@pytest.mark.parametrize("conv", [pyg.SAGEConv, pyg.TransformerConv])
def test_a_model_on_one_graph_is_called_with_another(worlds, conv):
    assert worlds.run(3, on_another_graph, conv) == [True] * 3


def with_loops_added(rank):
    """GAT makes new edges of those that it is given: then these have no owner."""
    first, second = partition(wild(), method="block"), partition(grid(4, 6), method="block")
    torch.manual_seed(0)
    model = distribute(pyg.GATConv(4, 2).double(), first)
    x = torch.zeros(second.num_owned, 4, dtype=torch.float64)
    with pytest.raises(ArgumentError) as caught:
        model(x, second.edge_index)
    return str(caught.value)


def test_a_layer_that_adds_self_loops_to_edges_of_another_graph(worlds):
    for told in worlds.run(3, with_loops_added):
        assert re.search(r"some edges are not in the graph|edges reach beyond", told)
        assert told.endswith(AGAIN)


EDGES = torch.tensor([[0, 3, 2, 1, 3, 4], [1, 1, 2, 0, 1, 2]])
LOOPS = torch.arange(3).expand(2, -1)

# other edges than those of the graph, and whether they are accepted
GIVEN = {
    "a copy": (EDGES.clone(), True),
    "two of them": (EDGES[:, [4, 0]], True),
    "none": (EDGES[:, :0], True),
    "int32": (EDGES.int(), True),
    "loops behind": (torch.cat([EDGES[:, [0, 1, 3, 4, 5]], LOOPS], 1), True),
    "loops in front": (torch.cat([LOOPS, EDGES], 1), True),
    "twice": (torch.cat([EDGES, EDGES], 1), True),
    "loops alone": (torch.tensor([[1, 1], [1, 1]]), True),
    "reversed": (EDGES.flip(0), False),
    "another": (torch.tensor([[0], [2]]), False),
    "another behind": (torch.cat([EDGES, torch.tensor([[4], [0]])], 1), False),
    "another for a loop": (
        torch.cat([EDGES[:, [0, 1, 3, 4, 5]], torch.tensor([[4], [0]])], 1),
        False,
    ),
}


def some_edges(rank):
    failures = Failures()
    graph = partition(Data(x=torch.ones(5, 4), edge_index=EDGES), method="block")
    layer = distribute(pyg.SAGEConv(4, 4), graph)
    for name, (edges, accepted) in GIVEN.items():
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with mode(), failures.named(name, mode.__name__):
                given = edges.clone()
                for _ in range(2):
                    try:
                        layer(graph.x, given)
                    except ArgumentError:
                        assert not accepted
                    else:
                        assert accepted
    given = EDGES[:, [4, 0]]
    layer(graph.x, given)
    given[1, 0] = 4  # a tensor is looked at again once it was written to
    with failures.named("written to"), pytest.raises(ArgumentError, match="not in the graph"):
        layer(graph.x, given)
    return failures


def test_edges_that_are_accepted(worlds):
    assert_none(worlds.run(1, some_edges))
