"""Data of the examples: sizes, edges, masks, baselines, tokens; and what the examples share."""

from functools import cache

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from tests.examples.loading import example
from tests.graph.graphs import WORLDS, split_by
from varcomm.graph import partition

graphs, ocean = example("nodes", "graphs"), example("ocean", "ocean")
climate, mesh, split = (example("weather", name) for name in ("climate", "mesh", "split"))


@cache
def small_grid():
    """A grid of 40 x 40 nodes, with inputs and parts as the large graphs of `nodes` have them."""
    node = torch.arange(1600).view(40, 40)
    pairs = [torch.stack([node[:, :-1].ravel(), node[:, 1:].ravel()])]
    pairs.append(torch.stack([node[:-1].ravel(), node[1:].ravel()]))
    edges = torch.cat(pairs, dim=1)
    edges = torch.cat([edges, edges.flip(0)], dim=1)
    return graphs.with_question(Data(edge_index=edges, num_nodes=1600), labels=10)


def test_nodes_to_classify():
    data = small_grid()
    assert data.x.shape == (1600, 16)
    torch.testing.assert_close(data.x.mean(dim=0), torch.zeros(16), atol=1e-5, rtol=0)
    assert data.y.unique().tolist() == list(range(8))
    assert data.y[data.train_mask].bincount().tolist() == [10] * 8
    assert torch.equal(data.test_mask, ~data.train_mask)


def compare_nodes(rank, owner):
    train = example("nodes", "train")
    data, found = train.precise(small_grid(), torch.float64), {}
    graph = partition(data, method=owner)
    for name in ("gcn", "gat", "sage"):
        shared, alone = (train.new_model(name, 8, 2, seed=0).double() for _ in range(2))
        found[name] = train.differences(
            lambda shared=shared: train.record(shared, train.fit_on_ranks(shared, graph, 5)),
            lambda alone=alone: train.record(alone, train.fit_alone(alone, data, 5)),
        )
    return found


@pytest.mark.parametrize("ranks", WORLDS)
def test_models_of_nodes_train_as_in_one_process(worlds, ranks):
    owner = split_by("a rank owns nothing", 1600, ranks)
    answers = worlds.run(ranks, compare_nodes, owner)
    assert answers == answers[:1] * ranks, "ranks differ"
    assert max(error for errors in answers[0].values() for error in errors) <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "nodes", "edges"), [("copter2", 55_476, 352_238), ("mdual", 258_569, 513_132)]
)
def test_large_graphs(name, nodes, edges):
    source, target = graphs.neighbours(graphs.FOLDER / f"{name}.xz")
    assert (source.max() + 1, len(source)) == (nodes, 2 * edges)
    pairs = target * nodes + source
    assert (np.diff(pairs) > 0).all(), "each once, sorted by target and then by source"
    assert np.array_equal(np.sort(source * nodes + target), pairs), "both ways"
    assert (source != target).all()


@pytest.mark.parametrize(
    ("spacing", "nodes"), [pytest.param(1, 42_164, marks=pytest.mark.slow), (5, 1_654)]
)
def test_ocean(spacing, nodes):
    data = ocean.load(spacing)
    assert data.num_nodes == nodes
    with np.load(ocean.FILE) as file:
        sea = {
            (float(lat), float(lon))
            for lat, lon in zip(file["lat"], file["lon"], strict=True)
            if (lat + 89.5 + 1e-6) % spacing < 0.1 and (lon - 20.5 + 1e-6) % spacing < 0.1
        }
    places = [tuple(place) for place in data.pos.tolist()]
    assert set(places) == sea
    assert places == sorted(places), "from south to north, and then eastwards"

    source, target = data.edge_index
    pairs = source * nodes + target
    assert len(pairs.unique()) == data.num_edges
    assert torch.equal(pairs.sort().values, (target * nodes + source).sort().values), "both ways"
    assert (source != target).all()
    assert torch.bincount(target).max() == 8
    steps = (data.pos[target] - data.pos[source]).abs().round() / spacing
    east = torch.minimum(steps[:, 1], 360 / spacing - steps[:, 1])
    assert steps[:, 0].max() == east.max() == 1

    known = data.y[:, 0].isfinite()
    assert not (data.train_mask & data.test_mask).any()
    assert torch.equal(data.train_mask | data.test_mask, known)
    row, column = (data.pos / 10).floor().long().T
    tile = (row + 9) * 40 + column
    in_test = tile[data.test_mask].unique()
    assert not torch.isin(tile[data.train_mask], in_test).any(), "a tile is in both"
    assert 0.15 < data.test_mask.sum() / known.sum() < 0.25
    assert 0.15 < len(in_test) / len(tile[known].unique()) < 0.25


def test_baselines_of_the_ocean():
    data = ocean.load(5)
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


@pytest.mark.parametrize("level", [0, 3])
def test_multi_mesh_of_the_weather(level):
    pos, levels = mesh.icosphere(level)
    edges = [mesh.edges_of(faces) for faces in levels]
    assert len(pos) == 10 * 4**level + 2
    assert sum(each.shape[1] for each in edges) == 20 * (4 ** (level + 1) - 1)
    for number, (faces, each) in enumerate(zip(levels, edges, strict=True)):
        vertices = faces.max() + 1
        assert vertices == 10 * 4**number + 2
        assert vertices - each.shape[1] // 2 + len(faces) == 2, "Euler's formula"
    np.testing.assert_allclose(np.linalg.norm(pos, axis=1), 1, rtol=1e-14)


def test_no_point_of_the_sphere_is_out_of_reach():
    pos, levels = mesh.icosphere(2)
    points = np.random.default_rng(0).standard_normal((500, 3))
    points = np.concatenate([points, pos[levels[-1]].mean(axis=1)])
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    reach = mesh.REACH * mesh.longest(pos, mesh.edges_of(levels[-1]))
    edges = mesh.within_reach(points, pos, reach)
    assert len(np.unique(edges[0])) == len(points)
    far = np.linalg.norm(points[:, None] - pos, axis=-1)
    found = set(map(tuple, edges.T.tolist()))
    assert found == set(zip(*(ids.tolist() for ids in np.nonzero(far <= reach)), strict=True))


def test_training_never_sees_the_months_held_out():
    assert (climate.HELD_OUT, climate.TEST) == ((1, 5, 9), [0, 4, 8])
    assert climate.TRAIN == [2, 3, 6, 7, 10, 11]
    for start in climate.TRAIN:
        assert not {start, (start + 1) % 12} & set(climate.HELD_OUT)


def test_grid_and_mesh_together_fetch_less():
    data = climate.load(3)
    owner = split.together(data, 4, 4)
    rows = split.fetched(data, owner, 4)
    alone = split.fetched(data, split.each_by_itself(data, 4), 4)
    assert rows[0] < alone[0] / 5
    assert rows[2] < alone[2] / 3
    work = sum(
        torch.bincount(owner[kind[2]][data[kind].edge_index[1]], minlength=4) * times
        for kind, times in split.passes(4).items()
    )
    assert work.max() < 1.1 * work.double().mean()


def halo_rows(rank):
    data = climate.load(2)
    graph = partition(data, method=split.together(data, 3, 3))
    kinds = [("grid", "to", "mesh"), ("mesh", "to", "mesh"), ("mesh", "to", "grid")]
    return [graph[kind].num_halo for kind in kinds]


def test_counted_rows_are_those_of_the_halos(worlds):
    data = climate.load(2)
    counted = split.fetched(data, split.together(data, 3, 3), 3)
    assert np.sum(worlds.run(3, halo_rows), axis=0).tolist() == counted


def test_tokens():
    corpus = example("text", "corpus")
    text = corpus.text()
    vocabulary = corpus.Vocabulary(text[:20_000])
    assert len(vocabulary) == len(set(vocabulary.tokens)) == 131
    ids = vocabulary.encode(text[50_000:60_000])
    assert vocabulary.decode(ids) == text[50_000:60_000]
    assert len(ids) < 0.8 * 10_000
    assert 0 <= ids.min() <= ids.max() < 131
    assert vocabulary.decode(torch.arange(131)).startswith(corpus.CHARACTERS)


def test_a_picture_that_can_be_written_leaves_nothing_until_it_is(tmp_path):
    hindrance = example(".", "command_line").hindrance
    assert hindrance(tmp_path / "new" / "a.png") is None
    assert not (tmp_path / "new" / "a.png").exists()
    (tmp_path / "old.png").write_text("drawn before")
    assert hindrance(tmp_path / "old.png") is None
    assert (tmp_path / "old.png").read_text() == "drawn before"
    for target in (tmp_path / "old.png" / "a.png", tmp_path):
        assert "cannot write" in hindrance(target)
