"""The example trains on any number of ranks as it does on one."""

import pytest
import torch

from tests.examples.loading import example
from tests.graph.graphs import WORLDS, split_by

METHODS = ("metis", "a rank owns nothing")


def compare(rank, dtype, method, steps):
    ocean, train = example("ocean", "ocean"), example("ocean", "train")
    data = train.in_precision(ocean.load(5), dtype)
    assert data.num_nodes == 1654
    model = train.new_model(data, hidden=16, blocks=2, seed=0).to(dtype)
    owner = split_by(method, data.num_nodes, torch.distributed.get_world_size())
    return train.compare(model, data, owner, steps)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ranks", WORLDS)
def test_losses_and_gradients_are_those_of_one_process(worlds, ranks, method):
    answers = worlds.run(ranks, compare, torch.float64, method, 5)
    assert answers == answers[:1] * ranks, "ranks differ"
    losses, gradients = answers[0]
    assert losses <= 1e-10
    assert gradients <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("ranks", WORLDS)
def test_losses_in_single_precision(worlds, ranks):
    losses, _ = worlds.run(ranks, compare, torch.float32, "metis", 20)[0]
    assert losses <= 1e-4


def losses_of_training(rank):
    ocean, train = example("ocean", "ocean"), example("ocean", "train")
    data = ocean.load(5)
    model = train.new_model(data, hidden=16, blocks=2, seed=0)
    return list(train.fit_alone(model, data, 40))


@pytest.mark.slow
def test_training_learns(worlds):
    first, *_, last = worlds.run(1, losses_of_training)[0]
    assert last < 0.5 * first
