"""What layers cost: an exchange for what is read at the source, and no byte beyond."""

import sys

import torch
import torch_geometric.nn as pyg
from torch_geometric.nn import MessagePassing

import varcomm
from tests.graph.against_one import compare, graph_of
from tests.graph.graphs import wild
from tests.worlds import WORLDS, on_ranks
from varcomm.graph import distribute, partition


class AtTarget(MessagePassing):
    """Reads nothing at the source."""

    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=x, edge_attr=edge_attr)

    def message(self, x_i, edge_attr):
        return x_i * edge_attr[:, :1]


# propagations; channels that travel for each node of the halo, and those of degrees, which are not
# differentiated and have an exchange of their own
LAYERS = {
    "SAGEConv": (lambda: pyg.SAGEConv(4, 8), 1, 4, 0),
    "SAGEConv projected": (lambda: pyg.SAGEConv(4, 8, project=True), 1, 4, 0),
    "GATConv": (lambda: pyg.GATConv(4, 5, heads=2), 1, 2 * 5 + 2, 0),  # features, scores
    "GATv2Conv": (lambda: pyg.GATv2Conv(4, 5, heads=2), 1, 2 * 5, 0),
    "LEConv": (lambda: pyg.LEConv(4, 3), 1, 3, 0),  # its b is read at the target
    "FiLMConv": (lambda: pyg.FiLMConv(4, 3), 1, 3, 0),
    "TransformerConv": (lambda: pyg.TransformerConv(4, 5), 1, 5 + 5, 0),  # keys, values
    "GCNConv": (lambda: pyg.GCNConv(4, 5, add_self_loops=False), 1, 5, 0),
    "GCNConv, improved": (lambda: pyg.GCNConv(4, 5, improved=True, bias=False), 1, 5, 0),
    "SGConv": (lambda: pyg.SGConv(4, 5, K=3), 3, 3 * 4, 1),
    "3 GATConvs": (lambda: pyg.GAT(4, 6, 3, 2), 3, 7 + 7 + 3, 0),
    "3 GCNConvs": (lambda: pyg.GCN(4, 6, 3, 2), 3, 6 + 6 + 2, 0),
}


@on_ranks(*WORLDS)
def test_a_propagation_is_one_exchange_of_the_bytes_of_the_report(rank):
    graph = graph_of(wild())
    sent = graph.report().nbytes(1, itemsize=8)[rank]
    for name, (make, propagations, channels, degrees) in LAYERS.items():
        torch.manual_seed(0)
        layer = distribute(make().double(), graph)
        with varcomm.trace() as calls:
            out = layer(graph.x.requires_grad_(), graph.edge_index)
        with varcomm.trace() as back:
            out.sum().backward()
        if graph.group.size == 1:  # without a halo
            propagations = degrees = 0
        assert [call.name for call in back] == ["exchange_adjoint"] * propagations, name
        backward = sum(call.received for call in back), sum(call.sent for call in back)
        assert backward == (channels * sent, channels * graph.num_halo * 8), name
        channels += degrees
        assert [call.name for call in calls] == ["exchange"] * (propagations + degrees), name
        forward = sum(call.sent for call in calls), sum(call.received for call in calls)
        assert forward == (channels * sent, channels * graph.num_halo * 8), name


@on_ranks(3)
def test_several_rows_travel_at_once(rank):
    graph = graph_of(wild())
    with varcomm.trace() as calls:
        rows = graph.with_halo((graph.x, graph.x[:, 0]))
    assert len(calls) == 1
    assert all(map(torch.equal, rows, map(graph.with_halo, (graph.x, graph.x[:, 0]))))


@on_ranks(3)
def test_what_is_read_at_the_target_does_not_travel(rank):
    graph = partition(wild(), method="random")
    with varcomm.trace() as calls:
        distribute(AtTarget(), graph)(graph.x, graph.edge_index, graph.edge_attr)
    call = lambda m, g: m(g.x, g.edge_index, g.edge_attr)  # noqa: E731
    assert not calls
    assert not compare(AtTarget, call, wild(), graph)


MOST_FRAMES = {pyg.SAGEConv: 90, pyg.GATConv: 180}


@on_ranks(2)
def test_a_layer_runs_few_functions_of_the_library(rank):
    torch.manual_seed(0)
    graph, entered = partition(wild(), method="block"), []
    edge_index = graph.edge_index

    def enter(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(varcomm.__path__[0]):
            entered.append(frame.f_code.co_qualname)

    for kind, most in MOST_FRAMES.items():
        layer, x = distribute(kind(4, 3).double(), graph), graph.x.clone().requires_grad_()
        for _ in range(4):  # the first exchanges compare their rows
            layer(x, edge_index)
        entered.clear()
        sys.setprofile(enter)
        try:
            layer(x, edge_index)
        finally:
            sys.setprofile(None)
        assert 0 < len(entered) <= most, (kind, len(entered), entered)
