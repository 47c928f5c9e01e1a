"""Message passing with what does not fit: told before any communication, or where it is seen."""

import re

import pytest
import torch
import torch_geometric.nn as pyg

import varcomm
from tests.graph.graphs import wild
from varcomm import ArgumentError, DisagreementError
from varcomm.graph import PartitionedGraph, edge_update, message_passing, partition
from varcomm.graph.adapt.layers import EXACT_AGGREGATIONS


def difference(x_i, x_j, *edge_values):
    return x_i - x_j


class OwnSum(pyg.aggr.Aggregation):
    def forward(self, x, index=None, ptr=None, dim_size=None, dim=-2):
        return self.reduce(x, index, ptr, dim_size, dim, reduce="sum")


class OwnLSTM(pyg.aggr.LSTMAggregation):
    """A class of one's own does not make an aggregation of PyG another one."""


# what is called with a graph, and what it says; rank 1 owns 12 nodes, and the graph is on the CPU
REFUSED = {
    "no graph": (
        lambda g: message_passing(wild(), difference, g.x),
        "graph must be a PartitionedGraph, as graph.partition gives, or its edges of one type; "
        "got Data.",
    ),
    "no function": (
        lambda g: message_passing(g, g.x, difference),
        "the message must be a function of x_i, x_j and the edge values; got Tensor. The order is",
    ),
    "three sides": (
        lambda g: message_passing(g, difference, (g.x, g.x, g.x)),
        "x must be a tensor or a pair of them, for sources and for targets; got 3. Put several",
    ),
    "no tensor": (
        lambda g: message_passing(g, difference, None),
        "x must be a torch.Tensor; got NoneType.",
    ),
    "with halo": (
        lambda g: message_passing(g, difference, torch.zeros(g.num_owned + g.num_halo, 4)),
        "{rows}, but this rank owns 12 nodes: it must have one row for each. Pass the local part",
    ),
    "sources": (
        lambda g: message_passing(g, difference, (g.x[1:], g.x)),
        "x of sources has shape (11, 4), but this rank owns 12 nodes",
    ),
    "targets": (
        lambda g: message_passing(g, difference, [g.x, g.x[1:]]),
        "x of targets has shape (11, 4), but this rank owns 12 nodes",
    ),
    "scalar": (
        lambda g: message_passing(g, difference, torch.tensor(1.0)),
        "x has shape (), but this rank owns 12 nodes",
    ),
    "edge values": (
        lambda g: message_passing(g, difference, g.x, g.edge_attr, wild().edge_weight),
        "edge value 1 has shape (106,), but this rank owns {edges} edges",
    ),
    "edge value": (
        lambda g: message_passing(g, difference, g.x, "edge_attr"),
        "edge value 0 must be a torch.Tensor; got str.",
    ),
    "device": (
        lambda g: message_passing(g, difference, g.x.to("meta")),
        "x is on meta, the graph on cpu. Move one of them: graph.to('meta').",
    ),
    "unknown": (
        lambda g: message_passing(g, difference, g.x, aggr="nonsense"),
        "aggr must be the name of an aggregation of PyG, several of them, or a module; got "
        "'nonsense': Could not resolve 'nonsense'",
    ),
    "with parameters": (
        lambda g: message_passing(g, difference, g.x, aggr="lstm"),
        "got 'lstm': LSTMAggregation.__init__() missing 2 required",
    ),
    "one of several unknown": (
        lambda g: message_passing(g, difference, g.x, aggr=["sum", "nonsense"]),
        "got ['sum', 'nonsense']: Could not resolve 'nonsense'",
    ),
    "no aggregation": (
        lambda g: message_passing(g, difference, g.x, aggr=torch.sum),
        "builtin_function_or_method is none of these.",
    ),
    "not exact": (
        lambda g: message_passing(g, difference, g.x, aggr="median"),
        "MedianAggregation is not known to be exact on a part of the graph. Known are "
        + ", ".join(sorted(EXACT_AGGREGATIONS)),
    ),
    "an own LSTM": (
        lambda g: message_passing(g, difference, g.x, aggr=OwnLSTM(4, 4)),
        "LSTMAggregation is not known to be exact",
    ),
    "the base class": (
        lambda g: message_passing(g, difference, g.x, aggr="aggregation"),
        "Aggregation is not known to be exact",
    ),
    "update of no function": (
        lambda g: edge_update(g, None, g.x),
        "the message must be a function of x_i, x_j and the edge values; got NoneType.",
    ),
    "update of edge values": (
        lambda g: edge_update(g, difference, g.x, g.edge_attr[1:]),
        "edge value 0 has shape ({fewer}, 3), but this rank owns {edges} edges",
    ),
}


def refused(rank, name):
    """Rank 1 alone makes the mistake, which moves nothing; then both communicate."""
    graph, message = partition(wild(), method="block"), None
    if rank == 1:
        with pytest.raises(ArgumentError) as caught:
            REFUSED[name][0](graph)
        message = str(caught.value)
    edges = graph.num_edges
    words = {
        "rows": f"x has shape ({graph.num_owned + graph.num_halo}, 4)",
        "edges": edges,
        "fewer": edges - 1,
    }
    return message, words, message_passing(graph, difference, graph.x).shape == (12, 4)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_any_communication(worlds, name):
    (_, _, first), (message, words, second) = worlds.run(2, refused, name)
    operation = "graph.edge_update" if "update" in name else "graph.message_passing"
    where = f"{operation}: " if name == "no graph" else f"{operation} on rank 1 of 2: "
    assert message.startswith(where)
    said = REFUSED[name][1]
    for word, value in words.items():
        said = said.replace(f"{{{word}}}", str(value))
    assert said in message
    assert first
    assert second


def own_aggregation(rank):
    graph = partition(wild(), method="block")
    own, pygs = (message_passing(graph, difference, graph.x, aggr=a) for a in (OwnSum(), "sum"))
    return torch.equal(own, pygs)


def test_aggregations_of_ones_own(worlds):
    assert worlds.run(2, own_aggregation) == [True] * 2


def several_hops(rank):
    graph = partition(wild(), method="block", hops=2)
    with pytest.raises(ArgumentError, match=re.escape("halos of 2 hops, which are exchanged once")):
        message_passing(graph, difference, graph.x)
    return isinstance(graph, PartitionedGraph)


def test_halos_of_several_hops(worlds):
    assert worlds.run(2, several_hops) == [True] * 2


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
    "too few": "must return a tensor with one row for each of the {0} edges that it was called "
    "with; got shape ({0-1}, 4).",
    "too few of the boundary": "one row for each of the {1} edges that it was called with; got "
    "shape ({1-1}, 4).",
    "a number": "one row for each of the {0} edges that it was called with; got shape ().",
    "no tensor": "one row for each of the {0} edges that it was called with; got list.",
    "another width": "must return rows of one shape and dtype whatever the edges; got [1] of "
    "torch.float64 for {0} of them, and [2] of torch.float64 for {1}.",
    "another dtype": "got [4] of torch.float64 for {0} of them, and [4] of torch.float32 for {1}.",
}


def wrong_message(rank, kind):
    """The exchange is under way: who is wrong leaves it, and the others go on."""
    graph = partition(wild(), method="block")
    told = None
    if rank == 1:
        with pytest.raises(ArgumentError) as caught:
            message_passing(graph, wrong(kind), graph.x)
        told = str(caught.value)
    else:
        message_passing(graph, difference, graph.x)
    again = message_passing(graph, difference, graph.x)
    return told, len(graph.interior), len(graph.boundary), again.shape == (12, 4)


@pytest.mark.parametrize("kind", MESSAGES)
def test_messages_must_be_rows(worlds, kind):
    (_, _, _, first), (told, inner, outer, second) = worlds.run(2, wrong_message, kind)
    counts = {"{0}": inner, "{1}": outer, "{0-1}": inner - 1, "{1-1}": outer - 1}
    said = MESSAGES[kind]
    for word, count in counts.items():
        said = said.replace(word, str(count))
    assert told.startswith("graph.message_passing on rank 1 of 2: the message must return ")
    assert told.endswith(said)
    assert first
    assert second


def wrong_in_debug(rank, kind):
    graph = partition(wild(), method="block")
    x = graph.x[rank:] if kind == "rows" else graph.x
    message = wrong("too few") if kind == "too few" and rank == 1 else difference
    with varcomm.debug(), pytest.raises(DisagreementError) as caught:
        message_passing(graph, message, x)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["rows", "too few"])
def test_in_debug_all_ranks_raise_where_one_has_to(worlds, kind):
    for told in worlds.run(2, wrong_in_debug, kind):
        assert "not called, since on rank 1: graph.message_passing on rank 1 of 2: " in told
