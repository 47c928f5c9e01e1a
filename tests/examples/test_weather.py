"""The weather example: its mesh, its months, how it is split, and a short training."""

from functools import cache

import numpy as np
import pytest
import torch

from tests.examples.loading import example

climate, mesh, split = (example("weather", name) for name in ("climate", "mesh", "split"))
KINDS = [("grid", "to", "mesh"), ("mesh", "to", "mesh"), ("mesh", "to", "grid")]


@cache
def load(level=2):
    return climate.load(level)


@pytest.mark.parametrize("level", [0, 3])
def test_sizes_of_the_multi_mesh(level):
    pos, levels = mesh.icosphere(level)
    edges = [mesh.edges_of(faces) for faces in levels]
    assert len(pos) == 10 * 4**level + 2
    assert sum(each.shape[1] for each in edges) == 20 * (4 ** (level + 1) - 1)
    for number, (faces, each) in enumerate(zip(levels, edges, strict=True)):
        vertices = faces.max() + 1
        assert vertices == 10 * 4**number + 2
        assert vertices - each.shape[1] // 2 + len(faces) == 2, "Euler's formula"
    np.testing.assert_allclose(np.linalg.norm(pos, axis=1), 1, rtol=1e-14)


def somewhere(count):
    points = np.random.default_rng(0).standard_normal((count, 3))
    return points / np.linalg.norm(points, axis=1, keepdims=True)


@pytest.mark.parametrize("level", [2])
def test_no_point_of_the_sphere_is_out_of_reach(level):
    pos, levels = mesh.icosphere(level)
    points = np.concatenate([somewhere(500), pos[levels[-1]].mean(axis=1)])
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    reach = mesh.REACH * mesh.longest(pos, mesh.edges_of(levels[-1]))
    edges = mesh.within_reach(points, pos, reach)
    assert len(np.unique(edges[0])) == len(points)
    far = np.linalg.norm(points[:, None] - pos, axis=-1)
    found = set(map(tuple, edges.T.tolist()))
    assert found == set(zip(*(ids.tolist() for ids in np.nonzero(far <= reach)), strict=True))


def test_training_never_sees_the_months_held_out():
    assert climate.HELD_OUT == (1, 5, 9)
    assert climate.TEST == [0, 4, 8]
    assert climate.TRAIN == [2, 3, 6, 7, 10, 11]
    for start in climate.TRAIN:
        assert not {start, (start + 1) % 12} & set(climate.HELD_OUT)


@pytest.mark.parametrize("ranks", [1, 4])
def test_grid_and_mesh_together_fetch_less(ranks):
    data = load(3)
    owner = split.together(data, ranks, 4)
    rows = split.fetched(data, owner, ranks)
    alone = split.fetched(data, split.each_by_itself(data, ranks), ranks)
    if ranks == 1:
        assert rows == alone == [0, 0, 0]
        return
    assert rows[0] < alone[0] / 5
    assert rows[2] < alone[2] / 3
    work = sum(
        torch.bincount(owner[kind[2]][data[kind].edge_index[1]], minlength=ranks) * times
        for kind, times in split.passes(4).items()
    )
    assert work.max() < 1.1 * work.double().mean()


def halo_rows(rank, ranks):
    from varcomm.graph import partition

    data = load()
    graph = partition(data, method=split.together(data, ranks, 3))
    return [graph[kind].num_halo for kind in KINDS]


def test_rows_that_are_counted_are_those_of_the_halos(worlds):
    data = load()
    counted = split.fetched(data, split.together(data, 3, 3), 3)
    assert np.sum(worlds.run(3, halo_rows, 3), axis=0).tolist() == counted
