"""The ocean as a graph: nodes, edges, masks and baselines."""

from functools import cache

import numpy as np
import pytest
import torch

from tests.examples.loading import example

ocean = example("ocean", "ocean")
SPACINGS = (pytest.param(1, marks=pytest.mark.slow), 5)


@cache
def load(spacing):
    return ocean.load(spacing)


def test_sizes():
    assert load(1).num_nodes == 42_164
    assert load(5).num_nodes == 1_654


@pytest.mark.parametrize("spacing", SPACINGS)
def test_nodes_are_sea_from_south_to_north_and_then_eastwards(spacing):
    data = load(spacing)
    with np.load(ocean.FILE) as file:
        sea = {
            (float(lat), float(lon))
            for lat, lon in zip(file["lat"], file["lon"], strict=True)
            if (lat + 89.5 + 1e-6) % spacing < 0.1 and (lon - 20.5 + 1e-6) % spacing < 0.1
        }
    places = [tuple(place) for place in data.pos.tolist()]
    assert set(places) == sea
    assert places == sorted(places)


@pytest.mark.parametrize("spacing", SPACINGS)
def test_edges_join_neighbours_both_ways_once(spacing):
    data = load(spacing)
    source, target = data.edge_index
    pairs = source * data.num_nodes + target
    assert len(pairs.unique()) == data.num_edges
    assert torch.equal(pairs.sort().values, (target * data.num_nodes + source).sort().values)
    assert (source != target).all()
    assert torch.bincount(target).max() == 8
    steps = (data.pos[target] - data.pos[source]).abs().round() / spacing
    east = torch.minimum(steps[:, 1], 360 / spacing - steps[:, 1])
    assert steps[:, 0].max() == east.max() == 1


@pytest.mark.parametrize("spacing", SPACINGS)
def test_masks(spacing):
    data = load(spacing)
    known = data.y[:, 0].isfinite()
    assert not (data.train_mask & data.test_mask).any()
    assert torch.equal(data.train_mask | data.test_mask, known)
    assert 0.15 < data.test_mask.sum() / known.sum() < 0.25

    row, column = (data.pos / 10).floor().long().T
    tile = (row + 9) * 40 + column
    in_test = tile[data.test_mask].unique()
    assert not torch.isin(tile[data.train_mask], in_test).any(), "a tile is in both"
    assert 0.15 < len(in_test) / len(tile[known].unique()) < 0.25


def test_baselines():
    data = load(5)
    celsius = (data.y[:, 0] * data.y_std + data.y_mean).double().numpy()
    train, test = data.train_mask.numpy(), data.test_mask.numpy()
    columns = [*data.x[:, :5].double().numpy().T, np.ones(data.num_nodes)]
    known = np.stack(columns, axis=1)
    weights = np.linalg.lstsq(known[train], celsius[train])[0]

    def rmse(prediction):
        return np.sqrt(np.mean((prediction - celsius[test]) ** 2))

    mean, linear = ocean.baselines(data).values()
    assert mean == pytest.approx(rmse(celsius[train].mean()), rel=1e-4)
    assert linear == pytest.approx(rmse(known[test] @ weights), rel=1e-4)
    assert 0 < linear < mean
