"""The training of each example learns."""

import pytest
import torch

from tests.examples.loading import example
from tests.examples.test_data import small_grid

TEXT = ["--layers", "1", "--length", "16", "--batch", "8", "--head-size", "8", "--rate", "0.01"]


def options(name, folder, *more):
    return example(name, "train").parsed(["--picture", str(folder / "a.png"), *more])


def atoms_learn(folder):
    module = example("atoms", "potential")
    crystals = module.small_crystals(2, 3)
    losses = list(module.fit(module.new_model(crystals, 4, 1, 0).double(), crystals, 40))
    return sum(losses[-4:]), 0.3 * sum(losses[:4])


def nodes_learn(folder):
    train = example("nodes", "train")
    first, *_, last = train.fit_alone(train.new_model("sage", 16, 2, seed=0), small_grid(), 30)
    return last, 0.3 * first


def ocean_learns(folder):
    train, data = example("ocean", "train"), example("ocean", "ocean").load(5)
    model = train.new_model(data, hidden=16, blocks=2, seed=0)
    first, *_, last = train.fit_alone(model, data, 40)
    return last, 0.5 * first


def poisson_learns(folder):
    train, data = example("poisson", "train"), example("poisson", "mesh").load(0.1)
    losses = list(train.fit_alone(train.new_solver(8, 3, seed=0).double(), data, 60))
    assert losses[0] == pytest.approx(1)
    return sum(losses[-10:]) / 10, 0.6


def text_learns(folder):
    """Compare with a model of frequencies."""
    train, corpus = example("text", "train"), example("text", "corpus")
    text = corpus.text()
    ids = corpus.Vocabulary(text[:20_000]).encode(text[:80_000])
    chosen = options("text", folder, *TEXT)
    losses = list(train.fit(train.new_model(chosen, 131), ids, chosen, 150))
    known = train.by_frequency(ids, ids, 131)
    assert losses[0] > known
    return sum(losses[-20:]) / 20 + 0.3, known


def three_ways_learn(folder):
    """Compare with baselines."""
    train = example("three_ways", "train")
    small = ["--batch", "5", "--wide", "13", "--side", "10", "--samples", "20", "--blocks", "2"]
    chosen = options("three_ways", folder, *small)
    data = train.plate.load(chosen.side, chosen.samples, 5)
    model = train.new_model(chosen)
    list(train.fit_alone(model, data, chosen, 60))
    with torch.no_grad():
        errors = train.squared_error(model, data, data.test_x, data.test_y)
    baselines = list(train.plate.baselines(data).values())
    assert baselines == sorted(baselines, reverse=True)
    return errors.mean().item(), 0.8 * min(baselines)


LEARNED = {fn.__name__: fn for fn in (atoms_learn, nodes_learn, ocean_learns)}
LEARNED |= {fn.__name__: fn for fn in (poisson_learns, text_learns, three_ways_learn)}


def learn(rank, name, folder):
    return LEARNED[name](folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNED)
def test_training_learns(worlds, name, tmp_path):
    ((reached, bound),) = worlds.run(1, learn, name, tmp_path)
    assert reached < bound
