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


@pytest.mark.slow
def test_sizes():
    whole = load(1, 20)
    assert (whole.num_nodes, len(whole.pos)) == (718_725, 42_164)
    along = np.minimum(*whole.levels[whole.edges]).sum()
    assert along + 2 * (whole.num_nodes - len(whole.pos)) == 4_143_916
    assert load(3, 20).num_nodes == 79_143


def test_edges_join_neighbours_and_what_is_above_and_below():
    sea = load()
    cells = [
        (lat, lon, level)
        for (lat, lon), count in zip(sea.pos.tolist(), sea.levels.tolist(), strict=True)
        for level in range(count)
    ]
    number = {cell: at for at, cell in enumerate(cells)}
    found = {}
    scale = np.log(1 + sea.depth / 100)
    for (lat, lon, level), target in number.items():
        for north, east in ((0, 1), (1, 0), (0, -1), (-1, 0)):
            # the grid begins at 20.5 degrees east
            west = (lon - east * 12 - 20.5) % 360 + 20.5
            source = number.get((lat - north * 12, west, level))
            if source is not None:
                near = east * np.cos(np.deg2rad(lat))
                found[source, target] = (near, north, abs(near) + abs(north), 0)
        for other in (level - 1, level + 1):
            source = number.get((lat, lon, other))
            if source is not None:
                found[source, target] = (0, 0, 0, scale[level] - scale[other])
    data = sea.whole(torch.float64)
    edges = [tuple(edge) for edge in data.edge_index.T.tolist()]
    assert len(edges) == len(found)
    assert set(edges) == set(found)
    wanted = torch.tensor([found[edge] for edge in edges], dtype=torch.float64)
    torch.testing.assert_close(data.edge_attr, wanted, rtol=1e-9, atol=1e-9)


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
    """Return first step, losses and gradients on ranks, from the checkpoint if there is one."""
    train, chosen = example("ocean_3d", "train"), options("--steps", str(steps), *more)
    run = train.Training(train.on_ranks(load(), torch.float64), chosen)
    if chosen.checkpoint and train.is_there(chosen.checkpoint):
        run.resume(chosen.checkpoint)
    start, gradients = len(run.losses), []
    for _ in run.run(chosen):
        gradients = gradients or [p.grad.clone() for p in run.model.parameters()]
    return start, run.losses, gradients


@pytest.mark.parametrize("more", [[], ["--recompute"]], ids=["", "recomputed"])
@pytest.mark.parametrize("ranks", WORLDS)
def test_losses_and_gradients_are_those_of_one_process(worlds, ranks, more):
    losses, gradients = worlds.run(1, alone, 10)[0]
    for _, found, first in worlds.run(ranks, together, 10, *more):
        np.testing.assert_allclose(found, losses, rtol=1e-10)
        for x, y in zip(first, gradients, strict=True):
            assert (x - y).abs().max() <= 1e-12 * y.abs().max()


@pytest.mark.slow
def test_other_ranks_continue_as_one_process_would_and_learn(worlds, tmp_path):
    saving = ["--every", "4", "--checkpoint", str(tmp_path / "saved")]
    starts = []
    for ranks, steps in ((3, 6), (2, 12), (5, 15), (1, 20)):
        found = worlds.run(ranks, together, steps, *saving)
        assert all(losses == found[0][1] for _, losses, _ in found), "ranks differ"
        starts.append(found[0][0])
    assert starts == [0, 6, 12, 15]
    losses, _ = worlds.run(1, alone, 200)[0]
    np.testing.assert_allclose(found[0][1], losses[:20], rtol=1e-9)
    assert losses[-1] < 0.3 * losses[0], "beyond a linear fit, which the losses are relative to"
