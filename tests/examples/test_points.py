"""Long waves on the ocean: the finite elements and the exact step that models learn."""

import numpy as np
import pytest

from tests.examples.loading import example

mesh = example("points", "mesh")


def test_stiffness_has_the_first_eigenvalue_of_the_sphere():
    lat, lon = np.meshgrid(np.deg2rad(np.arange(-89.5, 90)), np.deg2rad(np.arange(360)))
    cells = np.stack([np.cos(lat) * np.cos(lon), np.cos(lat) * np.sin(lon), np.sin(lat)], axis=-1)
    cells = cells.reshape(-1, 3)
    pos = cells[mesh.chosen(cells, np.full(len(cells), mesh.DEEP), 8)]
    triangle = mesh.triangles(pos, cells)
    area = mesh.area_of(pos[triangle])
    assert area.sum() == pytest.approx(4 * np.pi, rel=0.01)
    matrix = mesh.stiffness(pos, triangle, np.full(len(triangle), 3.0))
    weight = np.bincount(triangle.ravel(), np.repeat(area / 3, 3))
    for wave in pos.T:
        assert wave @ matrix @ wave / (weight @ wave**2) == pytest.approx(3 * 2, rel=0.02)


def test_a_step_of_waves():
    ocean = mesh.Ocean(10)
    before = ocean.disturbances(3, 0)
    short, long = (ocean.after(before, hours) for hours in (1, 8))
    for level in (before, short, long):
        water = ocean.area @ level / ocean.area.sum()
        assert water == pytest.approx(0, abs=1e-9), "no water is added"
    size, of_short, of_long = (ocean.area @ level**2 for level in (before, short, long))
    assert (of_long < of_short).all()
    assert (of_short < size).all()
    np.testing.assert_allclose(ocean.iterate(before, 8, 500), long, atol=1e-8)
