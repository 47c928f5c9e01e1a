"""The weather example: its mesh, its months, how it is split, and a short training."""

import contextlib
import io
import re
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


@pytest.mark.parametrize("level", range(7))
def test_sizes_of_the_multi_mesh(level):
    pos, levels = mesh.icosphere(level)
    edges = [mesh.edges_of(faces) for faces in levels]
    assert len(pos) == 10 * 4**level + 2
    assert sum(each.shape[1] for each in edges) == 20 * (4 ** (level + 1) - 1)
    for number, (faces, each) in enumerate(zip(levels, edges, strict=True)):
        vertices = faces.max() + 1
        assert vertices == 10 * 4**number + 2
        assert vertices - each.shape[1] // 2 + len(faces) == 2, "Euler's formula"
    if level == 6:
        assert (len(pos), sum(each.shape[1] for each in edges)) == (40_962, 327_660)
    np.testing.assert_allclose(np.linalg.norm(pos, axis=1), 1, rtol=1e-14)


def test_edges_go_both_ways_once_and_those_of_all_levels_are_in_the_graph():
    _, levels = mesh.icosphere(3)
    every = {tuple(edge) for edge in load(3)["mesh", "to", "mesh"].edge_index.T.tolist()}
    assert len(every) == 20 * (4**4 - 1) == load(3)["mesh", "to", "mesh"].num_edges
    for faces in levels:
        sides = {(a, b) for face in faces.tolist() for a in face for b in face if a != b}
        assert sides <= every
    assert {(b, a) for a, b in every} == every


def test_triangles_cover_the_sphere_once():
    for level in (0, 3):
        pos, levels = mesh.icosphere(level)
        a, b, c = (pos[corner] for corner in levels[-1].T)
        volume = np.einsum("ni,ni->n", a, np.cross(b, c))
        assert (volume > 0).all(), "counterclockwise from outside"
        dots = 1 + (a * b).sum(1) + (b * c).sum(1) + (c * a).sum(1)
        np.testing.assert_allclose((2 * np.arctan2(volume, dots)).sum(), 4 * np.pi, rtol=1e-12)


def somewhere(count):
    points = np.random.default_rng(0).standard_normal((count, 3))
    return points / np.linalg.norm(points, axis=1, keepdims=True)


@pytest.mark.parametrize("level", [1, 2, 4])
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


@pytest.mark.parametrize("level", [0, 1, 3])
def test_the_triangle_around_a_point(level):
    pos, levels = mesh.icosphere(level)
    points = np.concatenate([somewhere(300), pos[:12]])
    source, target = mesh.around(pos, levels[-1], points).reshape(2, -1, 3)
    assert (target == np.arange(len(points))[:, None]).all()
    faces = {tuple(sorted(face)) for face in levels[-1].tolist()}
    assert all(tuple(sorted(corners)) in faces for corners in source.tolist())
    shares = np.linalg.solve(pos[source].swapaxes(1, 2), points[:, :, None])
    assert shares.min() > -1e-12, "inside"


def test_where_a_source_lies_as_seen_from_its_target():
    place = mesh.on_sphere(np.array([0, 0, 10, 0, 90.0]), np.array([0, 10, 0, 180, 0.0]))
    edges = np.array([[1, 2, 3, 0, 0], [0, 0, 0, 0, 4]])
    east, north, up, far = mesh.seen_from_target(place, place, edges).T
    step, rise = np.sin(np.deg2rad(10)) / 2, (1 - np.cos(np.deg2rad(10))) / 2
    np.testing.assert_allclose(east, [step, 0, 0, 0, 0], atol=1e-15)
    np.testing.assert_allclose(north, [0, step, 0, 0, -0.5], atol=1e-15)
    np.testing.assert_allclose(up, [-rise, -rise, -1, 0, -0.5], atol=1e-15)
    np.testing.assert_allclose(far[2:], [1, 0, 0.5**0.5], atol=1e-15)


def test_training_never_sees_the_months_held_out():
    assert climate.HELD_OUT == (1, 5, 9)
    assert climate.TEST == [0, 4, 8]
    assert climate.TRAIN == [2, 3, 6, 7, 10, 11]
    for start in climate.TRAIN:
        assert not {start, (start + 1) % 12} & set(climate.HELD_OUT)


def test_fields():
    data, file = load(), climate.read()
    assert climate.FILE.stat().st_size < 2_000_000
    assert (climate.FILE.parent / "README.md").exists(), "the data must say where they are from"
    assert data["grid"].x.shape == (7049, 12, 12)
    assert data["grid"].x.isfinite().all()
    change = (data["grid"].y * data.y_std).double().numpy()
    np.testing.assert_allclose(change[:, 11], file["sst"][0] - file["sst"][11], atol=1e-5)
    np.testing.assert_allclose(change[:, 4], file["sst"][5] - file["sst"][4], atol=1e-5)
    seen = data["grid"].x[:, climate.SEEN, :8].double()
    torch.testing.assert_close(seen.mean((0, 1)), torch.zeros(8).double(), atol=1e-5, rtol=0)
    torch.testing.assert_close(data["grid"].x[:, 11, 8], data["grid"].x[:, 0, 7])
    assert data["grid"].area.mean().item() == pytest.approx(1, rel=1e-5)


def test_insolation():
    sun = climate.insolation(np.array([-90.0, 0.0, 90.0]))
    assert sun[5, 0] == sun[11, 2] == pytest.approx(0, abs=1e-12)  # the polar nights
    assert sun[5, 2] == pytest.approx(np.sin(np.deg2rad(23.4)), rel=0.01)  # at the pole in June
    assert sun[2, 1] == pytest.approx(1 / np.pi, rel=0.01)  # at the equator in March


def test_errors_of_baselines():
    found = climate.baselines() | {"linear": climate.linear(load())}
    each = {name.split()[0]: climate.rmse(change, climate.TEST) for name, change in found.items()}
    file = climate.read()
    late = (file["sst"][1] - file["sst"][0]) ** 2 * np.cos(np.deg2rad(file["lat"]))
    expected = np.sqrt(late.sum() / np.cos(np.deg2rad(file["lat"])).sum())
    assert each["persistence:"][0] == pytest.approx(expected)
    assert (each["linear"] < each["persistence:"]).all()
    assert each["a"][1] < each["mean"][1]


@pytest.mark.parametrize("ranks", [1, 2, 4])
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


def run_main(rank, arguments):
    train = example("weather", "train")
    with (
        contextlib.redirect_stdout(io.StringIO()) as printed,
        contextlib.redirect_stderr(io.StringIO()),  # the bar
    ):
        train.main(arguments)
    return printed.getvalue()


@pytest.mark.parametrize("ranks", [1, 2])
def test_main(worlds, ranks, tmp_path):
    path = tmp_path / "weather.png"
    printed, *others = worlds.run(ranks, run_main, ["--smoke", "--picture", str(path)])
    assert others == [""] * (ranks - 1), "only the first rank prints"
    assert "7,049 cells and 162 nodes of the mesh" in printed
    along = r"(?=[ \d,x]{9}  ) *2 x [\d,]+"  # in a column of 9
    assert re.search(rf"in blocks of numbers +[\d,]+  {along} +[\d,]+ +\d+\.\d\d", printed)
    assert re.search(r"( +\d\.\d\d){4}  network", printed)
    assert path.read_bytes()[:4] == b"\x89PNG"
