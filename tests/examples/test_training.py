"""The training of each example learns."""

import pytest
from torch_geometric.data import Data
from torch_geometric.utils import grid

from tests.examples.loading import example


def atoms_learn():
    module = example("atoms", "potential")
    crystals = module.small_crystals(2, 3)
    losses = list(module.fit(module.new_model(crystals, 4, 1, 0).double(), crystals, 40))
    return sum(losses[-4:]), 0.3 * sum(losses[:4])


def nodes_learn():
    train, (edge_index, _) = example("nodes", "train"), grid(40, 40)
    data = Data(edge_index=edge_index, num_nodes=1600)
    data = example("nodes", "graphs").with_question(data, labels=10)
    first, *_, last = train.fit_alone(train.new_model("sage", 16, 2, seed=0), data, 30)
    return last, 0.3 * first


def ocean_learns():
    train, data = example("ocean", "train"), example("ocean", "ocean").load(5)
    model = train.new_model(data, hidden=16, blocks=2, seed=0)
    first, *_, last = train.fit_alone(model, data, 40)
    return last, 0.5 * first


def poisson_learns():
    train, data = example("poisson", "train"), example("poisson", "mesh").load(0.1)
    losses = list(train.fit_alone(train.new_solver(8, 3, seed=0).double(), data, 60))
    assert losses[0] == pytest.approx(1)
    return sum(losses[-10:]) / 10, 0.6


LEARNED = {fn.__name__: fn for fn in (atoms_learn, nodes_learn, ocean_learns, poisson_learns)}


def learn(rank, name):
    return LEARNED[name]()


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNED)
def test_training_learns(worlds, name):
    ((reached, bound),) = worlds.run(1, learn, name)
    assert reached < bound
