"""Refusals of message passing: before any communication, or after a wrong message."""

import re

import pytest
import torch
import torch_geometric.nn as pyg

import varcomm
from tests.graph.graphs import wild
from varcomm import ArgumentError, DisagreementError
from varcomm.graph import PartitionedGraph, edge_update, message_passing, partition


def difference(x_i, x_j, *edge_values):
    return x_i - x_j


class OwnSum(pyg.aggr.Aggregation):
    def forward(self, x, index=None, ptr=None, dim_size=None, dim=-2):
        return self.reduce(x, index, ptr, dim_size, dim, reduce="sum")


class OwnLSTM(pyg.aggr.LSTMAggregation):
    """A class of one's own does not make an aggregation of PyG another one."""


# a call, and a part of the message
REFUSED = {
    "no graph": (lambda g: message_passing(wild(), difference, g.x), "graph must be a Partitioned"),
    "no function": (lambda g: message_passing(g, g.x, difference), "message must be a function"),
    "three sides": (
        lambda g: message_passing(g, difference, (g.x, g.x, g.x)),
        "x must be a tensor",
    ),
    "no tensor": (lambda g: message_passing(g, difference, None), "x must be a torch.Tensor"),
    "with halo": (
        lambda g: message_passing(g, difference, torch.zeros(g.num_owned + g.num_halo, 4)),
        r"x has shape \(\d+, 4\), but this rank owns 8 nodes",
    ),
    "sources": (lambda g: message_passing(g, difference, (g.x[1:], g.x)), "x of sources has shape"),
    "targets": (lambda g: message_passing(g, difference, [g.x, g.x[1:]]), "x of targets has shape"),
    "scalar": (lambda g: message_passing(g, difference, torch.tensor(1.0)), "x has shape"),
    "edge values": (
        lambda g: message_passing(g, difference, g.x, g.edge_attr, wild().edge_weight),
        "edge value 1 has shape",
    ),
    "edge value": (lambda g: message_passing(g, difference, g.x, "edge_attr"), "edge value 0 must"),
    "device": (lambda g: message_passing(g, difference, g.x.to("meta")), "x is on meta"),
    "unknown": (lambda g: message_passing(g, difference, g.x, aggr="nonsense"), "aggr must be"),
    "with parameters": (lambda g: message_passing(g, difference, g.x, aggr="lstm"), "aggr must be"),
    "one of several": (
        lambda g: message_passing(g, difference, g.x, aggr=["sum", "nonsense"]),
        "aggr must be",
    ),
    "no aggregation": (lambda g: message_passing(g, difference, g.x, aggr=torch.sum), "aggr must"),
    "not exact": (
        lambda g: message_passing(g, difference, g.x, aggr="median"),
        "MedianAggregation is not known to be exact",
    ),
    "an own LSTM": (
        lambda g: message_passing(g, difference, g.x, aggr=OwnLSTM(4, 4)),
        "LSTMAggregation is not known to be exact",
    ),
    "the base class": (
        lambda g: message_passing(g, difference, g.x, aggr="aggregation"),
        "Aggregation is not known to be exact",
    ),
    "update of no function": (lambda g: edge_update(g, None, g.x), "message must be a function"),
    "update of edge values": (
        lambda g: edge_update(g, difference, g.x, g.edge_attr[1:]),
        "edge value 0 has shape",
    ),
}


def refused(rank):
    """Rank 1 alone makes the mistake, which moves nothing; then all communicate."""
    graph = partition(wild(), method="block")
    for name, (call, message) in REFUSED.items():
        where = "graph.edge_update" if "update" in name else "graph.message_passing"
        where += ": " if name == "no graph" else " on rank 1 of 3: "
        if rank == 1:
            with pytest.raises(ArgumentError, match=f"^{where}.*{message}"):
                call(graph)
        assert message_passing(graph, difference, graph.x).shape == (8, 4)


def test_refused_before_any_communication(worlds):
    assert worlds.run(3, refused) == [None] * 3


def own_aggregation(rank):
    graph = partition(wild(), method="block")
    own, pygs = (message_passing(graph, difference, graph.x, aggr=a) for a in (OwnSum(), "sum"))
    return torch.equal(own, pygs)


def test_aggregations_of_ones_own(worlds):
    assert worlds.run(3, own_aggregation) == [True] * 3


def several_hops(rank):
    graph = partition(wild(), method="block", hops=2)
    with pytest.raises(ArgumentError, match=re.escape("halos of 2 hops, which are exchanged once")):
        message_passing(graph, difference, graph.x)
    return isinstance(graph, PartitionedGraph)


def test_halos_of_several_hops(worlds):
    assert worlds.run(3, several_hops) == [True] * 3


def wrong(kind):
    """Return a message that is wrong in its first call, or in its second one."""
    calls = []

    def message(x_i, x_j):
        calls.append(len(x_i))
        return {
            "too few": x_i[1:] if len(calls) == 1 else x_i,
            "too few of the boundary": x_i if len(calls) == 1 else x_i[1:],
            "a number": x_i.sum(),
            "no tensor": [x_i],
            "another width": x_i[:, : len(calls)],
            "another dtype": x_i if len(calls) == 1 else x_i.float(),
        }[kind]

    return message


MESSAGES = {
    "too few": "one row for each of the",
    "too few of the boundary": "one row for each of the",
    "a number": "one row for each of the",
    "no tensor": "one row for each of the",
    "another width": "rows of one shape and dtype",
    "another dtype": "rows of one shape and dtype",
}


def wrong_message(rank):
    """Rank 1 leaves an exchange that is in flight, and the others go on."""
    graph = partition(wild(), method="block")
    for kind, message in MESSAGES.items():
        if rank == 1:
            where = "graph.message_passing on rank 1 of 3: the message must return"
            with pytest.raises(ArgumentError, match=f"^{where} .*{message}"):
                message_passing(graph, wrong(kind), graph.x)
        else:
            message_passing(graph, difference, graph.x)
        assert message_passing(graph, difference, graph.x).shape == (8, 4)


def test_messages_must_be_rows(worlds):
    assert worlds.run(3, wrong_message) == [None] * 3


def wrong_in_debug(rank, kind):
    graph = partition(wild(), method="block")
    x = graph.x[rank % 2 :] if kind == "rows" else graph.x
    message = wrong("too few") if kind == "too few" and rank == 1 else difference
    with varcomm.debug(), pytest.raises(DisagreementError) as caught:
        message_passing(graph, message, x)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["rows", "too few"])
def test_in_debug_all_ranks_raise_where_one_has_to(worlds, kind):
    for told in worlds.run(3, wrong_in_debug, kind):
        assert "on rank 1: graph.message_passing on rank 1 of 3: " in told
