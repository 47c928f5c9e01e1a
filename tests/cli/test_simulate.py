"""The command `simulate`, at sizes that take seconds, and the grids that it takes."""

import lzma

import numpy as np
import pytest
import torch
from scipy.io import netcdf_file

import varcomm as vc
from tests.cli.test_partition import channel
from varcomm.cli.main import main

SMALL = ["simulate", "--width", "8", "--blocks", "1"]


@pytest.fixture
def relief(tmp_path):
    """A file like NOAA's: an island, and a last column that repeats the first."""
    heights = np.full((20, 37), -1000.0, dtype=np.float32)
    heights[5:9, 10:20] = 200
    path = tmp_path / "etopo.cdf"
    with netcdf_file(path, "w") as file:
        file.createDimension("lat", 20)
        file.createDimension("lon", 37)
        file.createVariable("ROSE", "f4", ("lat", "lon"))[:] = heights
    return path


def test_relief_of_the_earth(relief, tmp_path, capsys):
    is_sea = vc.simulate.read_sea(relief)
    assert is_sea.shape == (20, 36)
    assert int(is_sea.sum()) == 720 - 40
    packed, picture = tmp_path / "etopo.cdf.xz", tmp_path / "scaling.png"
    packed.write_bytes(lzma.compress(relief.read_bytes()))
    assert np.array_equal(vc.simulate.read_sea(packed), is_sea)
    arguments = ["--relief", str(packed), "--ranks", "1,2,4,16", "--weak", "--plot", str(picture)]
    assert main([*SMALL, *arguments]) == 0
    printed = capsys.readouterr().out
    assert "680 nodes" in printed
    strong, weak, _ = printed.split("\n\n")
    for table, ranks in ((strong, ["1", "2", "4", "16"]), (weak, ["1", "4", "16"])):
        rows = [line.split() for line in table.splitlines()]
        assert [row[0] for row in rows if len(row) == 13 and row[0].isdecimal()] == ranks
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_machines_have_sources(capsys):
    assert main(["simulate", "--machines"]) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.split() == ["name", *vc.simulate.MACHINES]
    assert last.startswith("source: ")


def test_a_mesh(tmp_path, capsys):
    path = channel(tmp_path / "square.vtu", 9, 9)
    assert main([*SMALL, "--mesh", str(path), "--ranks", "2,3"]) == 0
    assert "81 nodes, 288 edges" in capsys.readouterr().out


@pytest.mark.parametrize(
    "line", ["--plot scaling.txt", "--plot none/a.png", "--grid 7", "--grid 7x2", "--relief a.cdf"]
)
def test_an_impossible_picture_or_graph(line, capsys):
    assert main(["simulate", *line.split()]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_edges_of_the_sea():
    is_sea = np.array([[1, 1, 0, 1], [0, 1, 1, 0], [1, 0, 0, 0]], dtype=bool)
    data = vc.simulate.ocean(is_sea)
    cells = [tuple(cell) for cell in np.argwhere(is_sea).tolist()]
    expected = {
        (i, j)
        for i, (row, column) in enumerate(cells)
        for j, (other, there) in enumerate(cells)
        if i != j and abs(row - other) <= 1 and (column - there) % 4 in (0, 1, 3)
    }
    assert set(map(tuple, data.edge_index.T.tolist())) == expected
    assert data.num_edges == len(expected)
    torch.testing.assert_close(data.pos.norm(dim=1), torch.ones(len(cells)))
