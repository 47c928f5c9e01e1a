"""The command `simulate`, at sizes that take seconds, and grids of the sea."""

import lzma

import numpy as np
import pytest
import torch
from scipy.io import netcdf_file

import varcomm as vc
from tests.cli.test_partition import channel
from varcomm.cli.main import main

SMALL = ["simulate", "--width", "8", "--blocks", "1"]


def test_relief_of_the_earth(tmp_path):
    """A file like NOAA's: an island, and a last column that repeats the first."""
    heights = np.full((20, 37), -1000.0, dtype=np.float32)
    heights[5:9, 10:20] = 200
    path, packed = tmp_path / "etopo.cdf", tmp_path / "etopo.cdf.xz"
    with netcdf_file(path, "w") as file:
        file.createDimension("lat", 20)
        file.createDimension("lon", 37)
        file.createVariable("ROSE", "f4", ("lat", "lon"))[:] = heights
    packed.write_bytes(lzma.compress(path.read_bytes()))
    for each in (path, packed):
        is_sea = vc.simulate.read_sea(each)
        assert is_sea.shape == (20, 36)
        assert int(is_sea.sum()) == 720 - 40


@pytest.mark.slow
def test_graphs(tmp_path, capsys):
    path = channel(tmp_path / "square.vtu", 9, 9)
    for graph, ranks, shown in (
        (["--mesh", str(path)], "2,3", "81 nodes, 288 edges"),
        (["--grid", "20x36"], "1,4,16", "720 nodes, "),
    ):
        assert main([*SMALL, *graph, "--ranks", ranks]) == 0
        printed = capsys.readouterr().out
        assert printed.startswith(shown)
        rows = [line.split() for line in printed.splitlines()]
        assert [row[0] for row in rows if len(row) == 13 and row[0].isdecimal()] == ranks.split(",")


def test_verdict_and_machines(capsys):
    assert main([*SMALL, "--grid", "20x36", "--ranks", "1,16"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("verdict: efficient up to 1 rank; on 16 ranks, starting kernels takes")
    assert main(["simulate", "--machines"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [*vc.simulate.MACHINES]


@pytest.mark.parametrize("line", ["--grid 7", "--grid 7x2", "--mesh none.vtu"])
def test_an_impossible_graph(line, capsys):
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
