"""Models that index rows by ordinary tensors: exchanges before named submodules."""

from itertools import product

import pytest
import torch
from torch import nn
from torch_geometric.data import Data

from tests.graph.against_one import compare, graph_of
from tests.graph.graphs import WORLDS, wild
from tests.graph.parts import refusing
from tests.worlds import on_ranks
from varcomm import ArgumentError, DisagreementError
from varcomm.graph import exchange_before, partition

PART = {"blocks.*": ["x", "scale"]}


class Block(nn.Module):
    """Rows of nodes and of edges, from ids that torch knows nothing of."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 3), nn.Linear(3, 4)

    def forward(self, x, edge_index, scale=None, *, e):
        row, col = edge_index
        scaled = x if scale is None else x * scale
        e = e + self.inner(torch.cat([scaled[row], x[col]], dim=1)).tanh()
        return {"x": x + torch.zeros_like(x).index_add(0, col, self.outer(e)), "e": (e,)}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x, edge_index, e, scale):
        for block, factor in zip(self.blocks, (scale, None), strict=True):
            out = block(x, edge_index, scale=factor, e=e)
            x, (e,) = out["x"], out["e"]
        return x, e


def make():
    torch.manual_seed(2)
    return Model().double()


@on_ranks(*WORLDS)
def test_equal_to_one_process(rank):
    data = wild()
    data.scale = torch.cos(data.y[:, :1])
    wrong, exchanges = [], []

    def put(model, graph):
        exchanges.append((model, exchange_before(model, graph, PART)))
        return model

    for way, known in product(("random", "a rank owns nothing"), (True, False)):
        graph = graph_of(data, way)

        def call(model, g, known=known):
            edges = g.edge_index if known or g.graph is None else g.graph.edges.local_ids
            return model(g.x, edges, g.edge_attr, g.scale)

        wrong += compare(make, call, data, graph, put=put, second=True)
        model, handle = exchanges[-1]
        handle.remove()
        handle.remove()
        assert not any(block._forward_pre_hooks for block in model.blocks)
    return wrong


# what rank 1 gives in place of the model or of PART, and a word of the message
WRONG = (
    ({"block": ["x"]}, "'block'"),
    ({"blocks.*.inner.*": ["x"]}, "'blocks.*.inner.*'"),
    ({"blocks.*": ["node_feats"]}, "'node_feats'"),
    ({"blocks.*": "x"}, "'x'"),
    ({"*": ["x"]}, "ModuleList"),
    ({"blocks.*": None}, "None"),
    ({0: ["x"]}, "0"),
    (["blocks.0"], "list"),
)


@on_ranks(3)
def test_refusals(rank):
    graph = partition(wild(), method="block")
    refused = refusing(exchange_before)
    for wrong, word in WRONG:
        words = "refused on rank 1 of 3", word
        refused(ArgumentError, words, make(), graph, wrong if rank == 1 else PART)
    other = {"blocks.0": ["x"]} if rank == 1 else PART
    refused(DisagreementError, ("rank 1",), make(), graph, other)
    nested, of_both = nn.Sequential(nn.Sequential(make())), {"0": ["input"], "0.0.blocks.0": ["x"]}
    refused(ArgumentError, ("its part",), nested, graph, of_both)
    refused(ArgumentError, ("PartitionedGraph",), make(), wild(), PART)
    refused(ArgumentError, ("hops",), make(), partition(wild(), method="block", hops=2), PART)
    model = make()
    exchange_before(model, graph.edges, PART)
    with pytest.raises(ArgumentError, match=r"scale of Block must have .* owned nodes"):
        model(graph.x, graph.edges.local_ids, graph.edge_attr, graph.x[:0])
    with pytest.raises(ArgumentError, match="no vector of the graph"):
        model(graph.x, graph.edges.local_ids, graph.edge_attr, graph.batch)
    # without exchanges, ordinary ids are out of range of owned rows
    assert graph.num_halo
    with pytest.raises(IndexError):
        make()(graph.x, graph.edges.local_ids, graph.edge_attr, None)
    row = graph.edges.local_ids[0]
    assert torch.equal(graph.with_halo(graph.x)[row], graph.x[graph.edge_index[0]])
    # as many edges as rows with the halo, on every rank
    ends = torch.tensor([[0, 1, 2, 3, 3, 4, 5, 0], [1, 2, 0, 0, 4, 5, 3, 3]])
    owner = torch.tensor([0, 0, 0, 2, 2, 2])
    alike = partition(Data(x=torch.ones(6, 4), edge_index=ends), method=owner)
    refused(ArgumentError, ("cannot be distinguished",), make(), alike, PART)
