"""Draw images/command_line.png and images/partition.png: partitioned meshes, as `plot` draws them.

python docs/draw_partitions.py
"""

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


def draw(points, cells, nodes, ranks, method, name):
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/mesh.vtu"
        meshio.Mesh(points, {"quad": cells}).write(file)
        mesh = vc.graph.read_mesh(file, nodes=nodes)
    with patch.object(Figure, "savefig", with_twin):
        vc.simulate.partition(mesh.data, ranks, method).plot(IMAGES / name, mesh)


if __name__ == "__main__":
    # the example of the page about the command line
    across, up = np.meshgrid(np.arange(40) / 20, np.arange(20) / 20, indexing="ij")
    draw(*squares(across.ravel(), up.ravel(), 1 / 20), "points", 4, "rcb", "command_line.png")
    lat, lon = ocean.load(2).pos.numpy().T
    draw(*squares(lon - 1, lat - 1, 2), "cells", 6, "rcb", "partition.png")
