"""Parts of large graphs: the data, what needs no network, and three models on ranks."""

from functools import cache

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

import varcomm as vc
from tests.examples.loading import example
from tests.graph.graphs import WORLDS, split_by

graphs = example("nodes", "graphs")


@cache
def small():
    """A grid of 40 x 40 nodes, with inputs and parts as the large graphs have them."""
    node = torch.arange(1600).view(40, 40)
    pairs = [torch.stack([node[:, :-1].ravel(), node[:, 1:].ravel()])]
    pairs.append(torch.stack([node[:-1].ravel(), node[1:].ravel()]))
    edges = torch.cat(pairs, dim=1)
    edges = torch.cat([edges, edges.flip(0)], dim=1)
    return graphs.with_question(Data(edge_index=edges, num_nodes=1600), labels=10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "nodes", "edges"), [("copter2", 55_476, 352_238), ("mdual", 258_569, 513_132)]
)
def test_sizes(name, nodes, edges):
    source, target = graphs.neighbours(graphs.FOLDER / f"{name}.xz")
    assert source.max() + 1 == nodes
    assert len(source) == 2 * edges
    pairs = target * nodes + source
    assert (np.diff(pairs) > 0).all(), "each once, sorted by target and then by source"
    assert np.array_equal(np.sort(source * nodes + target), pairs), "both ways"
    assert (source != target).all()


def test_the_question():
    data = small()
    assert data.x.shape == (1600, 16)
    torch.testing.assert_close(data.x.mean(dim=0), torch.zeros(16), atol=1e-5, rtol=0)
    assert data.y.unique().tolist() == list(range(8))
    assert data.y[data.train_mask].bincount().tolist() == [10] * 8
    assert torch.equal(data.test_mask, ~data.train_mask)


def compare(rank, name, owner):
    train = example("nodes", "train")
    data = train.precise(small(), torch.float64)
    graph = vc.graph.partition(data, method=owner)
    shared, alone = (train.new_model(name, 8, 2, seed=0).double() for _ in range(2))
    return train.differences(
        lambda: train.record(shared, train.fit_on_ranks(shared, graph, 5)),
        lambda: train.record(alone, train.fit_alone(alone, data, 5)),
    )


@pytest.mark.parametrize("name", ["gcn", "gat", "sage"])
@pytest.mark.parametrize("ranks", WORLDS)
def test_losses_and_gradients_are_those_of_one_process(worlds, ranks, name):
    answers = worlds.run(ranks, compare, name, split_by("a rank owns nothing", 1600, ranks))
    assert answers == answers[:1] * ranks, "ranks differ"
    losses, gradients = answers[0]
    assert losses <= 1e-10
    assert gradients <= 1e-10


@pytest.mark.slow
def test_training_learns():
    train = example("nodes", "train")
    model = train.new_model("sage", 16, 2, seed=0)
    first, *_, last = train.fit_alone(model, small(), 30)
    assert last < 0.3 * first
