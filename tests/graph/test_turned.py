"""Edges turned round: each at the owner of its source, and turned again only when need be."""

from functools import cache

import pytest
import torch
import torch_geometric.nn as pyg

import varcomm
from tests.graph.graphs import WORLDS, split_by
from tests.graph.layers import example
from varcomm.graph import distribute, partition
from varcomm.graph.adapt.reversed_edges import Turned, turned

HEADER = 3 * 8  # bytes for each other rank

data_of = cache(example)


def graph_for(method):
    data = data_of()
    ranks = torch.distributed.get_world_size()
    return partition(data, method=split_by(method, data.num_nodes, ranks))


def ends_of(graph, there):
    """Return the ends of turned edges in the numbers of the whole graph, sources first."""
    known = torch.cat([graph.owned_ids, there.edges.plan(graph.owned_ids)])
    return torch.stack(
        [graph.owned_ids[there.edges.edge_index[1]], known[there.edges.edge_index[0]]]
    )


def some_edges(graph, which):
    """All, some of them in another order, with self loops, or none."""
    loops = torch.arange(graph.num_owned).expand(2, -1)
    return {
        "all": graph.edge_index,
        "some": graph.edge_index[:, 1::3].flip(1),
        "loops": torch.cat([graph.edge_index[:, ::2], loops, loops], dim=1),
        "none": graph.edge_index[:, :0],
    }[which]


def turn(rank, method):
    graph, whole = graph_for(method), data_of().edge_index
    ids = torch.cat([graph.owned_ids, graph.halo_ids])
    for which in ("all", "some", "loops", "none"):
        edges = some_edges(graph, which)
        there = turned(graph.edges)(edges)
        # each edge knows its ends, there as here
        carried = there.plan(torch.stack([ids[edges[0]], ids[edges[1]]], dim=1))
        assert torch.equal(carried.T, ends_of(graph, there))
        assert torch.equal(
            there.plan.adjoint(carried), torch.stack([ids[edges[0]], ids[edges[1]]]).T
        )
        assert there.edges.num_targets == there.edges.num_sources == graph.num_owned
        if which == "all":
            mine = torch.isin(whole[0], graph.owned_ids)
            expected = (whole[0] * 24 + whole[1])[mine].sort().values
            assert torch.equal((carried[:, 0] * 24 + carried[:, 1]).sort().values, expected)
            # no node is in the halo twice, nor without an edge
            used = there.edges.edge_index[0].unique()
            assert (used >= graph.num_owned).sum() == there.edges.num_halo
    return turned(graph.edges) is turned(graph.edges)


@pytest.mark.parametrize("method", ["metis", "random", "a rank owns nothing"])
@pytest.mark.parametrize("ranks", WORLDS)
def test_edges_are_at_the_owners_of_their_sources(worlds, ranks, method):
    assert worlds.run(ranks, turn, method) == [True] * ranks


def bytes_of(turn, edges):
    with varcomm.trace() as calls:
        there = turn(edges)
    return sum(call.sent for call in calls), there


def kept(rank):
    graph, others = graph_for("random"), 2
    turn = Turned.of(graph.edges)
    sent, first = bytes_of(turn, graph.edge_index)
    away = sum(first.plan.send_counts) - first.plan.send_counts[rank]
    assert sent == others * HEADER + away * 16
    for same in (graph.edge_index, graph.edge_index.clone()):
        assert bytes_of(turn, same) == (others * HEADER, first)
    # another on one rank is another on all
    some = graph.edge_index[:, ::2] if rank == 1 else graph.edge_index
    sent, second = bytes_of(turn, some)
    assert sent > others * HEADER or second.plan.send_counts[rank] == some.shape[1]
    assert second.number == first.number + 1
    assert torch.equal(second.plan.adjoint(second.plan(some[1])), some[1])
    # and so it is where some ranks have kept what others have not
    sent, third = bytes_of(turn, graph.edge_index)
    assert third.number == 3
    # four are kept: all of them, and three without the first edges
    for _ in range(2):
        numbers = [turn(graph.edge_index[:, count:]).number for count in range(4)]
        assert numbers == [3, 4, 5, 6]
    assert turn(some).number == 7
    written = graph.edge_index.clone()
    assert turn(written).number == 8
    written[:, 0] = written[:, 1]
    assert turn(written).number == 9
    with torch.inference_mode():
        inferred = graph.edge_index[:, 5:].clone()
        assert turn(inferred).number == 10
        assert turn(inferred).number == 11


def test_what_was_turned_is_kept(worlds):
    assert worlds.run(3, kept) == [None] * 3


def cost(rank):
    """Features of targets, and weights of edges: nothing else travels."""
    graph = graph_for("random")
    torch.manual_seed(0)
    layer = distribute(pyg.GraphConv(4, 5, flow="target_to_source").double(), graph)
    there = turned(graph.edges)(graph.edge_index)
    edges_away = sum(there.plan.send_counts) - there.plan.send_counts[rank]
    rows = sum(there.edges.plan.send_counts) * 4
    with varcomm.trace() as calls:
        layer(graph.x, graph.edge_index, graph.weight)
    return sum(call.sent for call in calls) == 8 * (rows + edges_away) + 2 * HEADER


def test_bytes_of_a_layer_against_the_direction_of_edges(worlds):
    assert worlds.run(3, cost) == [True] * 3
