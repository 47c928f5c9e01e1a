"""The ocean in three dimensions: a graph made in parts, and training that continues on others."""

import shutil

import numpy as np
import pytest
import torch
from scipy.io import netcdf_file
from torch_geometric.data import Data

import varcomm as vc
from tests.examples.loading import example
from tests.worlds import WORLDS, on_ranks

SMALL = ["--resolution", "12", "--levels", "5", "--hidden", "8", "--blocks", "2"]
SHOWN = "surface_salinity", "floor_depth"
ocean = example("ocean_3d", "ocean")


def in_one_process(sea):
    """Return temperature and linear fit (C, L), and features of the surface (C, 6)."""
    with netcdf_file(ocean.FILE, mmap=False) as file:
        raw = {name: file.variables[name].data for name in file.variables}
    table = raw["millidegrees"][sea.chosen][:, sea.row].T / 1000
    table[table < -32] = np.nan
    phi, theta = np.deg2rad(sea.pos).T
    place = [np.cos(phi) * np.cos(theta), np.cos(phi) * np.sin(theta), np.sin(phi)]
    salinity, floor = (raw[name][0, sea.row].astype(float) for name in SHOWN)
    shown = [table[:, 0], salinity, np.log1p(floor / 100)]
    surface = np.stack([*place, *((x - x.mean()) / x.std() for x in shown)], axis=1)
    known, fit = np.column_stack([surface, np.ones(len(surface))]), np.empty_like(table)
    for level, truth in enumerate(table.T):
        used = np.isfinite(truth) & ~sea.test
        fit[:, level] = known @ np.linalg.lstsq(known[used], truth[used])[0]
    return table, fit, surface


@on_ranks(*WORLDS)
def test_a_rank_reads_and_makes_its_own_columns_and_no_others(rank, ranks):
    """The fields of a rank's columns are those of one process."""
    train, sea = example("ocean_3d", "train"), ocean.Ocean(6, 20)
    graph, fields = train.on_ranks(sea, torch.float64)
    own, (table, fit, surface) = fields.ids, in_one_process(sea)
    assert fields.bytes_read == len(own) * (20 * 2 + 2 * 4)
    np.testing.assert_array_equal(fields.temperature, table[own])
    np.testing.assert_allclose(fields.surface, surface[own], rtol=0, atol=1e-13)
    np.testing.assert_allclose(fields.fit, fit[own], rtol=0, atol=1e-11)
    std = np.nanstd((table - fit)[~sea.test], axis=0)
    np.testing.assert_allclose(fields.std[1:], std[1:], rtol=1e-12)
    y = graph.gather(graph.y)[:, 0]
    expected = ((table - fit) / [1, *std[1:]])[np.isfinite(table)]
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-10)
    np.testing.assert_allclose(fields.celsius(graph.y[:, 0].numpy()), table[own], atol=1e-12)
    errors, below = fields.rmse(fields.fit)
    squares = (fit - table)[sea.test] ** 2
    np.testing.assert_allclose(errors, np.sqrt(np.nanmean(squares, axis=0)), atol=1e-11)
    np.testing.assert_allclose(below, np.sqrt(np.nanmean(squares[:, 1:])))
    source, target = graph.edge_index.plain
    across = graph.edge_attr[:, 3] != 0
    assert (source[across] < graph.num_owned).all(), "columns are whole"
    assert (target < graph.num_owned).all()
    assert graph.num_owned < 1.1 * sea.num_nodes / ranks
    assert graph.num_nodes == sea.num_nodes == np.isfinite(table).sum()
    assert vc.all_reduce(torch.tensor(len(own))) == len(sea.pos), "each column once"


def options(*more):
    return example("ocean_3d", "train").parsed([*SMALL, *more])


def alone(rank, steps):
    """Return losses and first gradients in one process, without varcomm."""
    train = example("ocean_3d", "train")
    _, fields = train.on_ranks(ocean.Ocean(12, 5), torch.float64)
    _, attributes, edge_index, edge_attr = fields.part(torch.float64)
    data = Data(**attributes, edge_index=edge_index, edge_attr=edge_attr)
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
    graph, _ = train.on_ranks(ocean.Ocean(12, 5), torch.float64)
    run = train.Training(graph, chosen)
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


def resumed(rank, folder, steps, begins):
    """Return the losses of a training that ends at a step, from its beginning or a checkpoint."""
    train, chosen = example("ocean_3d", "train"), options("--steps", steps, "--checkpoint", folder)
    graph, _ = train.on_ranks(ocean.Ocean(12, 5), torch.float64)
    run = train.Training(graph, chosen)
    if not begins:
        run.resume(chosen.checkpoint)
    for _ in run.run(chosen):
        pass
    return run.losses


@pytest.mark.slow
def test_training_continues_on_other_ranks(worlds, tmp_path):
    losses, _ = worlds.run(1, alone, 8)[0]
    worlds.run(3, resumed, str(tmp_path / "saved"), "4", True)
    for ranks in (2, 5, 1):
        folder = shutil.copytree(tmp_path / "saved", tmp_path / str(ranks))
        for found in worlds.run(ranks, resumed, str(folder), "8", False):
            np.testing.assert_allclose(found, losses, rtol=1e-9)
