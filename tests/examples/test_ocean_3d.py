"""The ocean in three dimensions: a graph made in parts, and training that continues on others."""

from functools import cache

import numpy as np
import pytest
import torch

from tests.examples.loading import example
from tests.graph.graphs import WORLDS

SMALL = ["--resolution", "12", "--levels", "5", "--hidden", "8", "--blocks", "2"]
ocean = example("ocean_3d", "ocean")


@cache
def load(resolution=12, levels=5):
    return ocean.Ocean(resolution, levels)


def own_part(rank):
    """Return the columns and nodes that a rank makes, and whether its rows are the graph's."""
    train, sea = example("ocean_3d", "train"), ocean.Ocean(6, 20)
    made = []
    whole, part = sea.whole(), sea.part
    sea.part = lambda columns, dtype: made.append(len(columns)) or part(columns, dtype)
    graph = train.on_ranks(sea)
    source, target = graph.edge_index.plain
    across = graph.edge_attr[:, 3] != 0
    assert (source[across] < graph.num_owned).all(), "columns are whole"
    assert (target < graph.num_owned).all()
    for name in ("x", "y"):
        assert torch.equal(graph[name], whole[name][graph.owned_ids])
    return sum(made), graph.num_owned


@pytest.mark.parametrize("ranks", WORLDS)
def test_a_rank_makes_its_own_columns_and_no_others(worlds, ranks):
    sea = load(6, 20)
    assert len(sea.part(np.flatnonzero([]))[0]) == 0
    columns, owned = zip(*worlds.run(ranks, own_part), strict=True)
    assert sum(columns) == len(sea.pos), "each column once"
    assert sum(owned) == sea.num_nodes
    assert max(owned) < 1.1 * sea.num_nodes / ranks


def options(*more):
    return example("ocean_3d", "train").parsed([*SMALL, *more])


def alone(rank, steps):
    """Return losses and first gradients in one process, without varcomm."""
    train, data = example("ocean_3d", "train"), load().whole(torch.float64)
    model = train.new_model(options()).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, train.rate)
    losses, gradients = [], []
    for _ in range(steps):
        error = model(data.x, data.edge_index, data.edge_attr) - data.y
        loss = error[data.train].square().mean()
        optimizer.zero_grad()
        loss.backward()
        gradients = gradients or [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses, gradients


def together(rank, steps, *more):
    """Return losses and first gradients on ranks."""
    train, chosen = example("ocean_3d", "train"), options("--steps", str(steps), *more)
    run = train.Training(train.on_ranks(load(), torch.float64), chosen)
    gradients = []
    for _ in run.run(chosen):
        gradients = gradients or [p.grad.clone() for p in run.model.parameters()]
    return run.losses, gradients


@pytest.mark.parametrize("more", [[], ["--recompute"]], ids=["", "recomputed"])
@pytest.mark.parametrize("ranks", WORLDS)
def test_losses_and_gradients_are_those_of_one_process(worlds, ranks, more):
    losses, gradients = worlds.run(1, alone, 10)[0]
    for found, first in worlds.run(ranks, together, 10, *more):
        np.testing.assert_allclose(found, losses, rtol=1e-10)
        for x, y in zip(first, gradients, strict=True):
            assert (x - y).abs().max() <= 1e-12 * y.abs().max()
