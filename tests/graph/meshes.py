"""Small meshes of every kind of cell, made by hand."""

from itertools import product

import meshio
import numpy as np

# The corners of a cube, bottom and top, each counterclockwise from above.
CUBE = [(0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (1, 1, 1), (0, 1, 1)]
# How a cube is cut into cells; its middle is point 8.
CUTS = {
    "hexahedron": [range(8)],
    "wedge": [(0, 1, 2, 4, 5, 6), (0, 2, 3, 4, 6, 7)],
    "tetra": [(0, 1, 2, 6), (0, 2, 3, 6), (0, 3, 7, 6), (0, 7, 4, 6), (0, 4, 5, 6), (0, 5, 1, 6)],
    "pyramid": [
        (0, 1, 2, 3, 8),
        (4, 7, 6, 5, 8),
        (0, 4, 5, 1, 8),
        (1, 5, 6, 2, 8),
        (2, 6, 7, 3, 8),
        (3, 7, 4, 0, 8),
    ],
    "quad": [range(4)],
    "triangle": [(0, 1, 2), (0, 2, 3)],
}
VOLUMES = {"hexahedron": 1, "wedge": 1 / 2, "tetra": 1 / 6, "pyramid": 1 / 6, "quad": 1}
VOLUMES["triangle"] = 1 / 2


def box(shape, kinds):
    """A box of unit cubes, or of squares in the plane, cut into cells of each kind in turn.

    Only cuts whose facets fit may stand side by side. Returns points (N, 3) and a list of
    (kind, corners), a block for each cube.
    """
    flat = len(shape) == 2
    numbers = {}
    blocks = []
    for i, cube in enumerate(product(*map(range, shape))):
        base = np.array((*cube, 0) if flat else cube)
        kind = kinds[i % len(kinds)]
        corners = [tuple(base + corner) for corner in CUBE[: 4 if flat else 8]]
        if kind == "pyramid":
            corners.append(tuple(base + 0.5))
        ids = [numbers.setdefault(corner, len(numbers)) for corner in corners]
        blocks.append((kind, np.array([[ids[k] for k in cell] for cell in CUTS[kind]])))
    return np.array(list(numbers), dtype=float), blocks


def saved(folder, points, blocks, name="mesh.vtu", **fields):
    path = folder / name
    meshio.Mesh(points, blocks, **fields).write(path)
    return path


def edges_of(pairs):
    """Both directions of some pairs, sorted."""
    return sorted({*pairs, *((b, a) for a, b in pairs)})
