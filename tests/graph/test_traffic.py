"""What layers cost: an exchange for what is read at the source, and no byte beyond."""

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


# channels that travel for each node of the halo, and those that are not differentiated: degrees
LAYERS = {
    "SAGEConv": (lambda: pyg.SAGEConv(4, 8), 4, 0),
    "SAGEConv projected": (lambda: pyg.SAGEConv(4, 8, project=True), 4, 0),
    "GATConv": (lambda: pyg.GATConv(4, 5, heads=2), 2 * 5 + 2, 0),  # features, scores
    "LEConv": (lambda: pyg.LEConv(4, 3), 3, 0),  # its b is read at the target
    "FiLMConv": (lambda: pyg.FiLMConv(4, 3), 3, 0),
    "TransformerConv": (lambda: pyg.TransformerConv(4, 5), 5 + 5, 0),  # keys, values
    "GCNConv": (lambda: pyg.GCNConv(4, 5, add_self_loops=False), 5, 0),
    "SGConv": (lambda: pyg.SGConv(4, 5, K=3), 3 * 4, 1),
}


@on_ranks(*WORLDS)
def test_bytes_of_a_layer_are_those_of_the_report(rank):
    graph = graph_of(wild())
    sent = graph.report().nbytes(1, itemsize=8)[rank]
    for name, (make, channels, degrees) in LAYERS.items():
        torch.manual_seed(0)
        layer = distribute(make().double(), graph)
        with varcomm.trace() as calls:
            out = layer(graph.x.requires_grad_(), graph.edge_index)
        with varcomm.trace() as back:
            out.sum().backward()
        backward = sum(call.received for call in back), sum(call.sent for call in back)
        assert backward == (channels * sent, channels * graph.num_halo * 8), name
        channels += degrees
        forward = sum(call.sent for call in calls), sum(call.received for call in calls)
        assert forward == (channels * sent, channels * graph.num_halo * 8), name


# propagations of a layer or network
PROPAGATE = {
    "GCNConv": (lambda: pyg.GCNConv(4, 5), 1),
    "GCNConv, improved": (lambda: pyg.GCNConv(4, 5, improved=True, bias=False), 1),
    "SAGEConv": (lambda: pyg.SAGEConv(4, 5), 1),
    "GATConv": (lambda: pyg.GATConv(4, 5, heads=2), 1),
    "GATv2Conv": (lambda: pyg.GATv2Conv(4, 5, heads=2), 1),
    "TransformerConv": (lambda: pyg.TransformerConv(4, 5, heads=2), 1),
    "3 GATConvs": (lambda: pyg.GAT(4, 6, 3, 2), 3),
    "3 GCNConvs": (lambda: pyg.GCN(4, 6, 3, 2), 3),
}


@on_ranks(*WORLDS)
def test_a_propagation_is_one_exchange(rank):
    graph = graph_of(wild())
    for name, (make, propagations) in PROPAGATE.items():
        torch.manual_seed(0)
        layer, x = distribute(make().double(), graph), graph.x.clone().requires_grad_()
        with varcomm.trace() as forward:
            out = layer(x, graph.edge_index)
        with varcomm.trace() as backward:
            out.sum().backward()
        assert [call.name for call in forward] == ["exchange"] * propagations, name
        assert [call.name for call in backward] == ["exchange_adjoint"] * propagations, name
    with varcomm.trace() as calls:
        rows = graph.with_halo((graph.x, graph.x[:, 0]))
    want = graph.with_halo(graph.x), graph.with_halo(graph.x[:, 0])
    assert len(calls) == 1
    assert all(map(torch.equal, rows, want))
    attention = distribute(pyg.GATConv(4, 5, heads=2).double(), graph)
    _, (edges, alpha) = attention(graph.x, graph.edge_index, return_attention_weights=True)
    assert alpha.shape == (edges.shape[1], 2)


@on_ranks(3)
def test_what_is_read_at_the_target_does_not_travel(rank):
    graph = partition(wild(), method="random")
    with varcomm.trace() as calls:
        distribute(AtTarget(), graph)(graph.x, graph.edge_index, graph.edge_attr)
    call = lambda m, g: m(g.x, g.edge_index, g.edge_attr)  # noqa: E731
    assert not calls
    assert not compare(AtTarget, call, wild(), graph)
