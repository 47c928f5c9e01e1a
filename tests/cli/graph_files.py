"""Files of graphs, small ones."""

import meshio
import numpy as np


def channel(path, rows=9, columns=5):
    """Write a mesh of quads with a field of its points, in two dimensions."""
    points = np.stack(np.meshgrid(range(rows), range(columns), indexing="ij"), -1).reshape(-1, 2)
    corner = np.array([columns * i + j for i in range(rows - 1) for j in range(columns - 1)])
    cells = corner[:, None] + [0, columns, columns + 1, 1]
    points = np.pad(points / 1.0, ((0, 0), (0, 1)))
    height = np.arange(len(points)) / 2
    meshio.Mesh(points, {"quad": cells}, point_data={"height": height}).write(path)
    return path
