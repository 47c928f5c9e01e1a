"""Draw images/command_line.png and images/partition.png: partitioned meshes, as `plot` draws them.

python docs/draw_partitions.py
"""

import contextlib
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

import meshio
import numpy as np
from matplotlib.figure import Figure

import varcomm as vc

sys.path.append(str(Path(__file__).parent / "_ext"))
from dark import save
from page_code import blocks_of, run

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
sys.path.insert(0, str(ROOT / "examples" / "ocean"))

import ocean  # noqa: E402


def squares(west, south, side):
    """Return the points and the cells of squares by their lower left corners, in degrees."""
    corners = np.array([[0, 0], [side, 0], [side, side], [0, side]])
    every = (np.stack([west, south], axis=-1)[:, None] + corners).reshape(-1, 2)
    points, cells = np.unique(every, axis=0, return_inverse=True)
    return np.pad(points, ((0, 0), (0, 1))), cells.reshape(-1, 4)


def with_twin(figure, path, savefig=Figure.savefig):
    with patch.object(Figure, "savefig", savefig):
        save(figure, path)


def draw(file, nodes, ranks, method, name):
    mesh = vc.graph.read_mesh(file, nodes=nodes)
    with patch.object(Figure, "savefig", with_twin):
        vc.simulate.partition(mesh.data, ranks, method).plot(IMAGES / name, mesh)


if __name__ == "__main__":
    lat, lon = ocean.load(2).pos.numpy().T
    points, cells = squares(lon - 1, lat - 1, 2)
    (code,) = blocks_of(ROOT / "docs" / "reference" / "command_line.md")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        run(code, {})
        draw("channel.vtu", "points", 4, "rcb", "command_line.png")
        meshio.Mesh(points, {"quad": cells}).write("ocean.vtu")
        draw("ocean.vtu", "cells", 6, "rcb", "partition.png")
