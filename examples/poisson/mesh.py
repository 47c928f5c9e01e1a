"""A triangle mesh of a plate with a notch and a hole, and Poisson's equation on it.

    -div grad u = f,  u = 0 on the boundary,

with linear finite elements. The minimum of half the sum of `weight * (u_i - u_j) ** 2` over edges,
minus the sum of `load * u` over nodes, satisfies `stiffness @ u == load`.
"""

from collections.abc import Callable

import numpy as np
import torch
from scipy import sparse
from scipy.sparse.linalg import cg, splu
from scipy.spatial import Delaunay, cKDTree
from torch_geometric.data import Data

HOLE, RADIUS = np.array([0.34, 0.36]), 0.15
CORNERS = np.array([[0, 0], [1, 0], [1, 0.55], [0.6, 0.55], [0.6, 1], [0, 1]])  # of the plate
COARSEST = 0.25  # spacing of the coarsest mesh
TESTS = (4, 8, 16)  # test functions along a side of the plate


def distance(pos: np.ndarray) -> np.ndarray:
    """Return the distance to the boundary, (N,), negative outside the plate."""
    to_hole = np.linalg.norm(pos - HOLE, axis=1) - RADIUS
    x, y = pos.T
    to_notch = np.where(
        (x < 0.6) & (y < 0.55), np.hypot(x - 0.6, y - 0.55), np.maximum(0.6 - x, 0.55 - y)
    )
    return np.min([x, y, 1 - x, 1 - y, to_hole, to_notch], axis=0)


def outline(spacing: float) -> np.ndarray:
    """Return points (B, 2) on the boundary, corners included."""
    turns = np.linspace(0, 2 * np.pi, round(2 * np.pi * RADIUS / spacing), endpoint=False)
    parts = [HOLE + RADIUS * np.stack([np.cos(turns), np.sin(turns)], axis=1)]
    for begin, end in zip(CORNERS, np.roll(CORNERS, -1, axis=0), strict=True):
        steps = max(1, round(np.linalg.norm(end - begin) / spacing))
        parts.append(begin + np.arange(steps)[:, None] / steps * (end - begin))
    return np.concatenate(parts)


def triangles(pos: np.ndarray) -> np.ndarray:
    """Return Delaunay triangles (T, 3), anticlockwise, with their centre inside the plate."""
    found = Delaunay(pos).simplices
    inside = distance(pos[found].mean(axis=1)) > 0
    return found[inside & (double_area(pos[found]) > 1e-9)]


def double_area(corner: np.ndarray) -> np.ndarray:
    """Return twice the area (T,) of triangles with corners (T, 3, 2)."""
    one, other = corner[:, 1] - corner[:, 0], corner[:, 2] - corner[:, 0]
    return np.abs(one[:, 0] * other[:, 1] - one[:, 1] * other[:, 0])


def scattered(spacing: float, generator: np.random.Generator) -> tuple[np.ndarray, int]:
    """Return nodes (N, 2) about `spacing` apart, boundary first, and the number on the boundary."""
    border = outline(spacing)
    kept, dense = [border], generator.random((int(8 / spacing**2), 2))
    dense = dense[distance(dense) > 0.6 * spacing]
    tree = cKDTree(dense)
    free = np.ones(len(dense), dtype=bool)
    for node, place in enumerate(dense):  # each chosen point excludes the points near it
        if free[node]:
            free[tree.query_ball_point(place, 0.8 * spacing)] = False
            kept.append(place[None])
    pos = np.concatenate(kept)
    for _ in range(10):  # moving nodes to the middle of their neighbours improves the triangles
        source, target = mesh_edges(triangles(pos))
        middle = sparse.coo_matrix((np.ones(len(source)), (target, source))).tocsr()
        middle = middle @ pos / np.bincount(target)[:, None]
        pos[len(border) :] = middle[len(border) :]
    return pos, len(border)


def mesh_edges(triangle: np.ndarray) -> np.ndarray:
    """Return the edges (2, E) of triangles, once in each direction."""
    sides = np.concatenate([triangle[:, [0, 1]], triangle[:, [1, 2]], triangle[:, [2, 0]]])
    return np.unique(np.concatenate([sides, sides[:, ::-1]]), axis=0).T


def stiffness(pos: np.ndarray, triangle: np.ndarray) -> sparse.csr_matrix:
    """Return the stiffness matrix (N, N) of linear elements."""
    corner = pos[triangle]
    opposite = np.roll(corner, -1, axis=1) - np.roll(corner, 1, axis=1)  # sides
    entries = opposite @ opposite.transpose(0, 2, 1) / (2 * double_area(corner)[:, None, None])
    row, column = np.broadcast_to(triangle[:, :, None], entries.shape), triangle[:, None]
    column = np.broadcast_to(column, entries.shape)
    shape = (len(pos), len(pos))
    return sparse.coo_matrix((entries.ravel(), (row.ravel(), column.ravel())), shape).tocsr()


def multi_mesh(pos: np.ndarray, spacing: float) -> np.ndarray:
    """Return edges (2, E) of the mesh and of coarser meshes, which carry information far.

    Each coarser mesh has nodes that are at least twice as far apart.
    """
    edges = [mesh_edges(triangles(pos))]
    kept = np.arange(len(pos))
    while (spacing := 2 * spacing) <= COARSEST:
        tree, free = cKDTree(pos[kept]), np.ones(len(kept), dtype=bool)
        for node in range(len(kept)):
            if free[node]:
                free[tree.query_ball_point(pos[kept[node]], 0.8 * spacing)] = False
                free[node] = True
        kept = kept[free]
        edges.append(kept[mesh_edges(triangles(pos[kept]))])
    return np.unique(np.concatenate(edges, axis=1), axis=1)


def test_functions(pos: np.ndarray, inside: np.ndarray, matrix: sparse.csr_matrix) -> np.ndarray:
    """Return values (N, M) of hat functions on grids of the plate, 0 on the boundary, energy 1."""
    hats = []
    for count in TESTS:
        line = np.arange(1, count) / count
        hat = np.maximum(0, 1 - count * np.abs(pos[:, :, None] - line))  # (N, 2, count - 1)
        hats.append((hat[:, 0, :, None] * hat[:, 1, None, :]).reshape(len(pos), -1))
    values = np.concatenate(hats, axis=1) * inside[:, None]
    values = values[:, (values > 0).sum(axis=0) > 3]
    return values / np.sqrt((values * (matrix @ values)).sum(axis=0))


def load(spacing: float = 0.025, seed: int = 0) -> Data:
    """Return the plate as a graph, in float64; nodes on the boundary come first.

    - ``pos`` (N, 2), ``distance`` (N,) to the boundary, ``inside`` (N,): not on the boundary.
    - ``edge_index`` (2, E) of all meshes, fine and coarse; ``edge_attr`` (E, 3): direction, and
      binary logarithm of the length in spacings.
    - ``weight`` (E,): minus the stiffness; 0 for edges of coarse meshes only.
    - ``diagonal`` (N,) of the stiffness; ``area`` (N,): a third of the triangles' area.
    - ``tests`` (N, M): values of the wider test functions.
    """
    pos, border = scattered(spacing, np.random.default_rng(seed))
    triangle = triangles(pos)
    matrix = stiffness(pos, triangle)
    inside = np.arange(len(pos)) >= border
    source, target = edge_index = multi_mesh(pos, spacing)
    step = (pos[target] - pos[source]) / spacing
    length = np.linalg.norm(step, axis=1, keepdims=True)
    thirds = np.repeat(double_area(pos[triangle]) / 6, 3)
    arrays = {
        "pos": pos,
        "edge_index": edge_index,
        "edge_attr": np.concatenate([step / length, np.log2(length)], axis=1),
        "weight": -np.asarray(matrix[source, target]).ravel(),
        "diagonal": matrix.diagonal(),
        "area": np.bincount(triangle.ravel(), thirds, len(pos)),
        "inside": inside,
        "distance": distance(pos).clip(0),
        "tests": test_functions(pos, inside, matrix),
    }
    return Data(**{name: torch.from_numpy(values) for name, values in arrays.items()})


class FiniteElements:
    """Classical solvers of the same equations."""

    def __init__(self, data: Data) -> None:
        pos = data.pos.double().numpy()
        self.inside, self.area = data.inside.numpy(), data.area.double().numpy()
        self.matrix = stiffness(pos, triangles(pos))[self.inside][:, self.inside].tocsc()
        self.factors = splu(self.matrix)

    def solution(self, f: torch.Tensor) -> torch.Tensor:
        """Return the solution u (N, 1) for a right-hand side f (N, 1), up to rounding."""
        return self._solved(f, self.factors.solve)

    def iterate(self, f: torch.Tensor, steps: int) -> torch.Tensor:
        """Return u (N, 1) after some steps of conjugate gradients."""
        return self._solved(f, lambda load: cg(self.matrix, load, rtol=0, maxiter=steps)[0])

    def _solved(self, f: torch.Tensor, solve: Callable[[np.ndarray], np.ndarray]) -> torch.Tensor:
        u = np.zeros(f.shape)
        u[self.inside, 0] = solve((self.area * f[:, 0].double().numpy())[self.inside])
        return torch.from_numpy(u)
