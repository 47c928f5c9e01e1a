"""Data of the examples: the ocean, and the mesh of the weather."""

import numpy as np
import pytest
import torch
from torch_geometric.utils import is_undirected

from tests.examples.loading import example

ocean = example("ocean", "ocean")
climate, mesh, split = (example("weather", name) for name in ("climate", "mesh", "split"))
months = example(".", "sea_months")


@pytest.mark.parametrize(
    ("spacing", "nodes"), [pytest.param(1, 42_164, marks=pytest.mark.slow), (5, 1_654)]
)
def test_ocean(spacing, nodes):
    data = ocean.load(spacing)
    assert data.num_nodes == nodes
    places = [tuple(place) for place in data.pos.tolist()]
    assert places == sorted(set(places)), "from south to north, and then eastwards"
    assert is_undirected(data.edge_index)
    assert not data.has_self_loops()
    assert len(data.edge_index.T.unique(dim=0)) == data.num_edges
    source, target = data.edge_index
    steps = (data.pos[target] - data.pos[source]).abs().round() / spacing
    assert steps[:, 0].max() == torch.minimum(steps[:, 1], 360 / spacing - steps[:, 1]).max() == 1

    known = data.y[:, 0].isfinite()
    assert torch.equal(data.train_mask ^ data.test_mask, known)
    row, column = (data.pos / 10).floor().long().T
    tile = (row + 9) * 40 + column
    in_test = tile[data.test_mask].unique()
    assert not torch.isin(tile[data.train_mask], in_test).any(), "a tile is in both"
    assert 0.15 < data.test_mask.sum() / known.sum() < 0.25


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
    assert (months.HELD_OUT, months.TEST) == ((1, 5, 9), [0, 4, 8])
    seen = {(start + later) % 12 for start in months.TRAIN for later in (0, 1)}
    assert not seen & set(months.HELD_OUT)


def test_grid_and_mesh_together_fetch_less():
    data = climate.load(3)
    rows = split.fetched(data, split.together(data, 4, 4), 4)
    alone = split.fetched(data, split.each_by_itself(data, 4), 4)
    assert rows[0] < alone[0] / 5
    assert rows[2] < alone[2] / 3
