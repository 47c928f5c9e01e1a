"""Models that index rows by ordinary tensors: exchanges before named submodules."""

import pytest
import torch
from torch import nn
from torch_geometric.data import Data

import varcomm
from tests.graph.graphs import WORLDS, split_by, wild
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


def results(model, x, edge_index, e, scale, total, gradient_of):
    """Values, a loss of first derivatives, and the gradients of parameters."""
    x = x.clone().requires_grad_()
    out, edges = model(x, edge_index, e, scale)
    (first,) = torch.autograd.grad(total(out), x, create_graph=True)
    loss = total(out) + total(first**2)
    loss.backward()
    gradient_of(model)
    return [out, first, x.grad], edges, [p.grad for p in model.parameters()], loss


def compared(rank, ranks):
    data = wild()
    data.scale = torch.cos(data.y[:, :1])
    expected = results(
        make(), data.x, data.edge_index, data.edge_attr, data.scale, torch.sum, lambda _: None
    )
    found = []
    for way in ("random", "a rank owns nothing"):
        graph = partition(data, method=split_by(way, data.num_nodes, ranks))
        for edges in (graph.edge_index, graph.edges.local_ids):  # known and ordinary ids
            model = make()
            exchanges = exchange_before(model, graph, PART)
            given = graph.x, edges, graph.edge_attr, graph.scale
            of_nodes, of_edges, of_parameters, loss = results(
                model, *given, graph.sum, varcomm.data_parallel.sum_gradients
            )
            pairs = [*zip(of_nodes, (x[graph.owned_ids] for x in expected[0]), strict=True)]
            pairs += [(of_edges, expected[1][graph.edges.owned_ids]), (loss, expected[3])]
            pairs += zip(of_parameters, expected[2], strict=True)
            found += [torch.allclose(p, q, rtol=1e-11, atol=1e-12) for p, q in pairs]
            exchanges.remove()
            exchanges.remove()
            assert not any(block._forward_pre_hooks for block in model.blocks)
    return len(found), all(found)


@pytest.mark.parametrize("ranks", WORLDS)
def test_equal_to_one_process(worlds, ranks):
    assert worlds.run(ranks, compared, ranks) == [(52, True)] * ranks


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


def refusals(rank):
    graph = partition(wild(), method="block")
    for wrong, word in WRONG:
        with pytest.raises(ArgumentError) as caught:
            exchange_before(make(), graph, wrong if rank == 1 else PART)
        assert "refused on rank 1 of 3" in str(caught.value)
        assert word in str(caught.value)
    with pytest.raises(DisagreementError, match="rank 1"):
        exchange_before(make(), graph, {"blocks.0": ["x"]} if rank == 1 else PART)
    nested = torch.nn.Sequential(torch.nn.Sequential(make()))
    with pytest.raises(ArgumentError, match="its part"):
        exchange_before(nested, graph, {"0": ["input"], "0.0.blocks.0": ["x"]})
    with pytest.raises(ArgumentError, match="PartitionedGraph"):
        exchange_before(make(), wild(), PART)
    with pytest.raises(ArgumentError, match="hops"):
        exchange_before(make(), partition(wild(), method="block", hops=2), PART)
    model = make()
    exchange_before(model, graph.edges, PART)
    with pytest.raises(ArgumentError, match=r"scale of Block must have .* owned nodes"):
        model(graph.x, graph.edges.local_ids, graph.edge_attr, graph.x[:0])
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
    with pytest.raises(ArgumentError, match="cannot be distinguished"):
        exchange_before(make(), alike, PART)
    return True


def test_refusals(worlds):
    assert worlds.run(3, refusals) == [True] * 3
