"""The command, at sizes that take seconds, and the grids that it takes."""

import lzma

import numpy as np
import pytest
import torch
from scipy.io import netcdf_file

import varcomm as vc
from varcomm import ArgumentError
from varcomm.cli.main import main

SMALL = ["--width", "8", "--blocks", "1"]


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


def test_table_and_picture(relief, tmp_path, capsys):
    picture = tmp_path / "scaling.png"
    arguments = ["--relief", str(relief), "--ranks", "1,2,4,16", "--weak", "--plot", str(picture)]
    assert main(["simulate", *SMALL, *arguments]) == 0
    printed = capsys.readouterr().out
    assert "680 nodes" in printed
    rows = [line.split() for line in printed.splitlines()]
    strong = [row[:2] for row in rows if row[1:2] == ["680"]]
    assert strong == [["1", "680"], ["2", "680"], ["4", "680"], ["16", "680"], ["4", "680"]]
    assert "predicted" not in printed
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_machines_have_sources(capsys):
    assert main(["simulate", "--machines"]) == 0
    printed = capsys.readouterr().out
    for name in vc.simulate.MACHINES:
        assert f"{name}: " in printed


def test_a_mesh(tmp_path, capsys):
    meshio = pytest.importorskip("meshio")
    points = np.stack(np.meshgrid(range(9), range(9), indexing="ij"), -1).reshape(-1, 2) / 1.0
    corner = np.array([9 * i + j for i in range(8) for j in range(8)])
    cells = corner[:, None] + [0, 9, 10, 1]
    path = tmp_path / "square.vtu"
    meshio.Mesh(np.pad(points, ((0, 0), (0, 1))), {"quad": cells}).write(path)
    assert main(["simulate", *SMALL, "--mesh", str(path), "--ranks", "2,3", "--method", "rcb"]) == 0
    assert "81 nodes, 288 edges" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--machine", "abacus"], "choose one of h100-ndr"),
        (["--ranks", "4,2"], "ascending positive integers"),
        (["--ranks", "few"], "ascending positive integers"),
        (["--width", "0"], "--width must be positive"),
        (["--method", "scissors"], "invalid choice: 'scissors'"),
        (["--grid", "3"], "give rows x columns"),
        (["--grid", "\u00b2x5"], "give rows x columns"),
        (["--mesh", "a.vtu", "--weak"], "a mesh cannot be coarsened"),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as raised:
        main(["simulate", *arguments])
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_weak_scaling_needs_powers(capsys):
    with pytest.raises(SystemExit):
        main(["simulate", *SMALL, "--grid", "4x8", "--ranks", "1,2", "--weak"])
    assert "4 times each other" in capsys.readouterr().err


def test_weak_scaling_takes_those_that_are_four_times_each_other(capsys):
    arguments = [*SMALL, "--grid", "8x16", "--ranks", "1,3,4", "--weak"]
    assert main(["simulate", *arguments]) == 0
    *_, weak, _ = capsys.readouterr().out.split("\n\n")
    assert [line.split()[0] for line in weak.splitlines()[1:]] == ["1", "4"]


def test_a_picture_in_no_folder(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["simulate", *SMALL, "--plot", str(tmp_path / "none" / "a.png")])
    told = capsys.readouterr()
    assert "there is no folder" in told.err
    assert not told.out, "it is said before the work"


def test_a_picture_of_no_kind(capsys):
    assert main(["simulate", "--plot", "scaling.txt"]) == 1
    assert "name a picture that ends in" in capsys.readouterr().err


def test_pictures_need_something(tmp_path):
    from varcomm.simulate.picture import draw

    with pytest.raises(ArgumentError, match="no scalings to draw"):
        draw([], tmp_path / "a.png", "", [])


def test_relief_of_the_earth(relief, tmp_path):
    is_sea = vc.simulate.read_sea(relief)
    assert is_sea.shape == (20, 36)
    assert int(is_sea.sum()) == 720 - 40
    packed = tmp_path / "etopo.cdf.xz"
    packed.write_bytes(lzma.compress(relief.read_bytes()))
    assert np.array_equal(vc.simulate.read_sea(packed), is_sea)
    with pytest.raises(ArgumentError, match=r"is no relief in netCDF 3"):
        vc.simulate.read_sea(__file__)
    with pytest.raises(ArgumentError, match=r"^there is no file .*none\.cdf\.$"):
        vc.simulate.read_sea(tmp_path / "none.cdf")


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
    with pytest.raises(ArgumentError, match="bools with rows and columns"):
        vc.simulate.ocean(np.ones((2, 4)))
    with pytest.raises(ArgumentError, match="3 columns at least; got 2"):
        vc.simulate.ocean(np.ones((2, 2), dtype=bool))
