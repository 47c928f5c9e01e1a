"""A triangle mesh of the world ocean with its real coasts and depths, and long waves on it.

Waves that are long compared to the depth H follow the equations

    d level / dt = -div (H velocity),   d velocity / dt = -g grad level.

From rest, an implicit time step is the solution of one elliptic equation,

    level - (g step^2) div (H grad level) = disturbance,   no flow through coasts,

which ocean models solve in each step. A disturbance spreads by about `step * sqrt(g H)`. Lengths
are in km, times in hours.
"""

from pathlib import Path

import numpy as np
import torch
from scipy import sparse
from scipy.sparse.csgraph import connected_components, dijkstra
from scipy.sparse.linalg import cg, eigsh, splu
from scipy.spatial import ConvexHull, cKDTree
from torch_geometric.data import Data

FILE = Path(__file__).parents[1] / "ocean" / "data" / "ocean_1deg.npz"
RADIUS, GRAVITY = 6371.0, 9.81e-3 * 3600**2
DEEP = 4.0  # km: from this depth on, nodes have the largest spacing
HELD_OUT, HELD_OUT_SEED = 32, 10**6
COARSEST = 32  # degrees between nodes of the coarsest mesh, at most
MODES = 32  # slowest waves, as features of points


def cells() -> tuple[np.ndarray, np.ndarray]:
    """Return positions (C, 3) on the unit sphere and depths (C,) in km of all sea cells."""
    with np.load(FILE) as file:
        phi, theta = np.deg2rad(file["lat"].astype(float)), np.deg2rad(file["lon"].astype(float))
        depth = file["floor_depth"].astype(float) / 1000
    pos = np.stack([np.cos(phi) * np.cos(theta), np.cos(phi) * np.sin(theta), np.sin(phi)], axis=1)
    return pos, depth.clip(0.02)


def chosen(pos: np.ndarray, depth: np.ndarray, spacing: float) -> np.ndarray:
    """Return the cells (N,) that become nodes, with spacings proportional to sqrt(depth)."""
    reach = 0.8 * np.deg2rad(spacing) * np.sqrt((depth / DEEP).clip(0.12, 1))
    tree, free, kept = cKDTree(pos), np.ones(len(pos), dtype=bool), []
    for cell in np.argsort(depth, kind="stable"):  # shelves first, so that no deep node thins them
        if free[cell]:
            free[tree.query_ball_point(pos[cell], reach[cell])] = False
            kept.append(cell)
    return np.sort(kept)


def triangles(pos: np.ndarray, sea: np.ndarray) -> np.ndarray:
    """Return Delaunay triangles (T, 3) on the sphere that do not touch land.

    ``sea`` (C, 3): centres of all sea cells, 1 degree apart.
    """
    found = ConvexHull(pos).simplices
    steps = np.array([(a, b, 4 - a - b) for a in range(5) for b in range(5 - a)]) / 4
    inside = np.einsum("sk,tkd->tsd", steps, pos[found])
    inside /= np.linalg.norm(inside, axis=2, keepdims=True)
    away, _ = cKDTree(sea).query(inside)
    return found[(away < np.deg2rad(0.75)).all(axis=1)]  # half a cell's diagonal


def stiffness(pos: np.ndarray, triangle: np.ndarray, weight: np.ndarray) -> sparse.csc_matrix:
    """Return the stiffness matrix (N, N) of linear elements, with a weight per triangle."""
    corner = pos[triangle]
    opposite = np.roll(corner, -1, axis=1) - np.roll(corner, 1, axis=1)  # sides
    scale = weight / (4 * area_of(corner))
    entries = opposite @ opposite.transpose(0, 2, 1) * scale[:, None, None]
    row = np.repeat(triangle, 3, axis=1).ravel()
    column = np.tile(triangle, 3).ravel()
    return sparse.coo_matrix((entries.ravel(), (row, column)), (len(pos), len(pos))).tocsc()


def area_of(corner: np.ndarray) -> np.ndarray:
    """Return the areas (T,) of triangles with corners (T, 3, 3)."""
    one, other = corner[:, 1] - corner[:, 0], corner[:, 2] - corner[:, 0]
    return np.linalg.norm(np.cross(one, other), axis=1) / 2


class Ocean:
    """Nodes, triangles and the exact solver of the largest connected sea.

    ``pos`` (N, 3) in km, ``depth`` (N,) in km, ``triangle`` (T, 3), ``area`` (N,) in km^2.
    """

    def __init__(self, spacing: float) -> None:
        sea, depth = cells()
        nodes = chosen(sea, depth, spacing)
        found = triangles(sea[nodes], sea)
        sides = sparse.coo_matrix((np.ones(len(found)), found[:, :2].T), (len(nodes),) * 2)
        sides += sparse.coo_matrix((np.ones(len(found)), found[:, 1:].T), (len(nodes),) * 2)
        _, part = connected_components(sides, directed=False)
        inside = part == np.bincount(part).argmax()
        nodes, found = nodes[inside], found[inside[found].all(axis=1)]
        self.pos, self.depth = RADIUS * sea[nodes], depth[nodes]
        self.triangle = (np.cumsum(inside) - 1)[found]
        thirds = np.repeat(area_of(self.pos[self.triangle]) / 3, 3)
        self.area = np.bincount(self.triangle.ravel(), thirds, len(nodes))
        mean_depth = self.depth[self.triangle].mean(axis=1)
        self.stiffness = stiffness(self.pos, self.triangle, GRAVITY * mean_depth)

    def matrix(self, hours: float) -> sparse.csc_matrix:
        return (sparse.diags(self.area) + hours**2 * self.stiffness).tocsc()

    def after(self, disturbance: np.ndarray, hours: float) -> np.ndarray:
        """Return sea levels (N, S) one step after disturbances (N, S), up to rounding."""
        return splu(self.matrix(hours)).solve(self.area[:, None] * disturbance)

    def iterate(self, disturbance: np.ndarray, hours: float, steps: int) -> np.ndarray:
        """Return sea levels (N, S) after some steps of conjugate gradients."""
        matrix, load = self.matrix(hours), self.area[:, None] * disturbance
        scale = sparse.diags(1 / matrix.diagonal())
        solved = [cg(matrix, one, rtol=0, maxiter=steps, M=scale)[0] for one in load.T]
        return np.stack(solved, axis=1)

    def modes(self, count: int) -> np.ndarray:
        """Return the `count` slowest standing waves (N, count) between the coasts, of size 1."""
        mass = sparse.diags(self.area / self.area.sum())
        _, waves = eigsh(self.stiffness / self.area.sum(), count + 1, mass, sigma=-1e-4)
        return waves[:, 1:] * np.sign(waves[0, 1:])  # without the constant

    def multi_mesh(self, spacing: float) -> tuple[np.ndarray, np.ndarray]:
        """Return edges (2, E) of this mesh and of coarser ones, and the level (E,) of each.

        Each coarser mesh has nodes that are about twice as far apart, and edges between those that
        are near each other by sea.
        """
        sides = np.concatenate([self.triangle[:, [a, b]] for a, b in ((0, 1), (1, 2), (2, 0))])
        edges = [np.unique(np.concatenate([sides, sides[:, ::-1]]), axis=0).T]
        source, target = edges[0]
        length = np.linalg.norm(self.pos[target] - self.pos[source], axis=1)
        sea = sparse.csr_matrix((length, (source, target)), (len(self.pos),) * 2)
        kept, reach = np.arange(len(self.pos)), np.deg2rad(spacing) * RADIUS
        while (spacing := 2 * spacing) <= COARSEST:
            reach *= 2
            free, near = np.isin(np.arange(len(self.pos)), kept), {}
            for node in kept:
                if free[node]:
                    away = dijkstra(sea, indices=node, limit=1.7 * reach)
                    free[away < 0.8 * reach] = False
                    near[node] = np.flatnonzero(away < np.inf)
            kept = np.array([*near])
            pairs = [(other, node) for node in kept for other in near[node] if other in near]
            edges.append(np.array([pair for pair in pairs if pair[0] != pair[1]]).T)
        level = np.repeat(np.arange(len(edges)), [found.shape[1] for found in edges])
        return np.concatenate(edges, axis=1), level

    def disturbances(self, count: int, seed: int) -> np.ndarray:
        """Return random sea levels (N, count) in m: one hump in deep water each, with zero mean."""
        draws, share = np.random.default_rng(seed), self.area / self.area.sum()
        deep = share * (self.depth > DEEP / 2)
        centre = self.pos[draws.choice(len(self.pos), count, p=deep / deep.sum())]
        square = 2 * (RADIUS**2 - self.pos @ centre.T)  # of chords
        level = np.exp(-square / (2 * draws.uniform(1000, 2000, count) ** 2))
        return level - share @ level


def load(ocean: Ocean, hours: list[float], samples: int, seed: int, spacing: float) -> Data:
    """Return the ocean as a graph, in float64.

    - ``x`` (N, 2): depth / 4 km, logarithm of the node's area.
    - ``place`` (N, 3 + MODES): position on the unit sphere, slowest waves.
    - ``edge_index`` (2, E) of all meshes, fine and coarse; ``edge_attr`` (E, 4): displacement to
      the east and to the north, and length, in spacings of the edge's mesh; the mesh, from 0.
    - ``area`` (N,): the node's share of the ocean; the sum is 1.
    - ``disturbance`` (N, samples) and ``level`` (N, samples, hours) after each step, in m.
    """
    (source, target), mesh = ocean.multi_mesh(spacing)
    step = (ocean.pos[target] - ocean.pos[source]) / (np.deg2rad(spacing) * RADIUS)
    step /= 2 ** mesh[:, None]
    unit = ocean.pos / RADIUS
    east = np.stack([-unit[:, 1], unit[:, 0], np.zeros(len(unit))], axis=1)
    east /= np.linalg.norm(east, axis=1, keepdims=True)
    north = np.cross(unit, east)
    along = [(step * frame[target]).sum(axis=1) for frame in (east, north)]
    fields = [ocean.disturbances(HELD_OUT, HELD_OUT_SEED), ocean.disturbances(samples, seed)]
    disturbance = np.concatenate(fields, axis=1)
    arrays = {
        "x": np.column_stack([ocean.depth / DEEP, np.log(ocean.area / ocean.area.mean())]),
        "place": np.column_stack([unit, ocean.modes(MODES)]),
        "edge_index": np.stack([source, target]),
        "edge_attr": np.column_stack([*along, np.linalg.norm(step, axis=1), mesh]),
        "area": ocean.area / ocean.area.sum(),
        "disturbance": disturbance,
        "level": np.stack([ocean.after(disturbance, each) for each in hours], axis=2),
    }
    return Data(**{name: torch.from_numpy(values) for name, values in arrays.items()})
