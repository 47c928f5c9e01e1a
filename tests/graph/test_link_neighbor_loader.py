"""``LinkNeighborLoader``: edges, negative edges and triplets, with the neighbours of their ends."""

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE
from torch_geometric.sampler import NegativeSampling

from tests.graph.against_one import CLOSE, graph_of
from tests.graph.graphs import rich
from tests.graph.test_neighbor_loader import ALL, assert_all, several_types
from tests.worlds import on_ranks, refused_alike
from varcomm import ArgumentError
from varcomm.graph import LinkNeighborLoader, partition


@on_ranks(3, 1)
def test_owned_edges_are_the_seeds(rank, ranks):
    data = rich()
    graph = graph_of(data)
    loader = LinkNeighborLoader(graph, ALL, batch_size=7)
    inputs = []
    for batch in loader:
        ends = batch.n_id[batch.edge_label_index]
        edges = graph.edges.owned_ids[batch.input_id]
        assert torch.equal(ends, data.edge_index[:, edges])
        assert_all(batch, data, {None: ends.unique()})
        assert "edge_label" not in batch
        inputs += batch.input_id.tolist()
    assert sorted(inputs) == [*range(graph.edges.num_owned)]


@pytest.mark.parametrize("amount", [1, 0.5, 3])
@on_ranks(3)
def test_binary_negative_sampling(rank, amount):
    data = rich()
    graph = partition(data, method="random")
    ends = torch.tensor([[[3, 9, 2, 2, 7], [1, 0, 23, 1, 5]], [[4], [4]], [[], []]][rank]).long()
    loader = LinkNeighborLoader(graph, ALL, 2, ends, None, ("binary", amount), shuffle=False)
    assert len(loader) == 3
    for step, batch in enumerate(loader):
        some = ends[:, 2 * step : 2 * step + 2]
        count = some.shape[1]
        drawn = batch.n_id[batch.edge_label_index]
        assert torch.equal(drawn[:, :count], some)
        assert batch.edge_label.tolist() == [1.0] * count + [0.0] * -int(-count * amount // 1)
        assert drawn.shape[1] == len(batch.edge_label)
        assert_all(batch, data, {None: drawn.unique()})


@on_ranks(2)
def test_labels(rank):
    data = rich()
    graph = partition(data, method="block")
    ends = torch.tensor([[3, 9, 2], [1, 0, 23]])
    label = torch.tensor([[2, 1, 2], [0, 3, 1]][rank])
    for neg_sampling, shift in ((None, 0), ("binary", 1)):
        options = {"edge_label": label, "neg_sampling": neg_sampling, "shuffle": False}
        (batch,) = LinkNeighborLoader(graph, [2], 3, ends, **options)
        assert batch.edge_label.tolist() == [*(label + shift).tolist(), *[0] * 3 * shift]
    larger = LinkNeighborLoader(graph, [2], 3, ends, label + 1, "binary", shuffle=False)
    assert next(iter(larger)).edge_label[:3].tolist() == (label + 1).tolist()


@pytest.mark.parametrize("amount", [1, 3])
@on_ranks(3)
def test_triplets(rank, amount):
    data = rich()
    graph = partition(data, method="random")
    loader = LinkNeighborLoader(graph, ALL, 5, neg_sampling=NegativeSampling("triplet", amount))
    for batch in loader:
        edges = data.edge_index[:, graph.edges.owned_ids[batch.input_id]]
        assert torch.equal(batch.n_id[batch.src_index], edges[0])
        assert torch.equal(batch.n_id[batch.dst_pos_index], edges[1])
        shape = (len(edges[0]),) if amount == 1 else (len(edges[0]), amount)
        assert batch.dst_neg_index.shape == shape
        drawn = batch.n_id[torch.cat([batch.src_index, batch.dst_pos_index])]
        assert_all(
            batch,
            data,
            {None: torch.cat([drawn, batch.n_id[batch.dst_neg_index.view(-1)]]).unique()},
        )


@on_ranks(3)
def test_several_types(rank):
    data = several_types()
    graph = graph_of(data)
    edge = ("a", "to", "b")
    for batch in LinkNeighborLoader(graph, ALL, 4, edge, neg_sampling="binary"):
        count = len(batch[edge].input_id)
        ends = batch[edge].edge_label_index
        first, last = batch["a"].n_id[ends[0]], batch["b"].n_id[ends[1]]
        edges = graph[edge].owned_ids[batch[edge].input_id]
        assert torch.equal(torch.stack([first, last])[:, :count], data[edge].edge_index[:, edges])
        assert_all(batch, data, {"a": first.unique(), "b": last.unique()})
    near = ("a", "near", "a")
    for batch in LinkNeighborLoader(graph, ALL, 4, (near, None), neg_sampling="triplet"):
        assert len(batch["a"].dst_neg_index) == len(batch["a"].src_index)


def negatives(rank, seeds):
    data = Data(edge_index=torch.tensor([[0], [1]]), num_nodes=500)
    graph = partition(data, method="random")
    ends = torch.tensor(seeds if rank == 0 else [[], []]).long()
    loader = LinkNeighborLoader(graph, [1], 100, ends, None, "binary", seed=2)
    return [batch.n_id[batch.edge_label_index].tolist() for _ in range(2) for batch in loader]


def test_negative_edges_are_equal_on_any_number_of_ranks_and_uniform(worlds):
    seeds = torch.stack([torch.arange(400), torch.arange(400) * 7 % 500]).tolist()
    alone = worlds.run(1, negatives, seeds)[0]
    assert worlds.run(3, negatives, seeds)[0] == alone
    drawn = torch.cat([torch.tensor(ends)[:, 100:] for ends in alone], dim=1)
    assert not torch.equal(drawn[:, :400], drawn[:, 400:])
    for end in drawn:
        counts = end.bincount(minlength=500).view(10, 50).sum(dim=1)
        # chi-square: 23.6 is exceeded once in 200 with 9 degrees of freedom
        assert ((counts - 80).square() / 80).sum() < 23.6


@on_ranks(3)
def test_a_model_of_links(rank):
    data = rich()
    graph = partition(data, method="random")
    torch.manual_seed(0)
    model = GraphSAGE(4, 8, 2, 2).double()
    whole = model(data.x, data.edge_index)
    for batch in LinkNeighborLoader(graph, ALL, 6, neg_sampling="binary"):
        out = model(batch.x, batch.edge_index)[batch.edge_label_index]
        torch.testing.assert_close(out, whole[batch.n_id[batch.edge_label_index]], **CLOSE)


REFUSED = {
    "edge_label_index": {"edge_label_index": torch.arange(4)},
    "out of range for 24 nodes": {"edge_label_index": torch.tensor([[24], [0]])},
    "edge_label ": {"edge_label": torch.zeros(3)},
    "neg_sampling": {"neg_sampling": "some"},
    "its weights": {"neg_sampling": NegativeSampling("binary", 1, torch.ones(24))},
    "temporal": {"edge_label_time": torch.zeros(3)},
    "set neg_sampling": {"neg_sampling_ratio": 1.0},
}


@pytest.mark.parametrize("word", REFUSED)
@on_ranks(2)
def test_refusals(rank, word):
    graph = partition(rich(), method="block")
    options = REFUSED[word] if rank else {}
    refused_alike(ArgumentError, lambda: LinkNeighborLoader(graph, [2], **options), word)
