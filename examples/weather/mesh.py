"""The multi-mesh: a refined icosahedron with the edges of all refinements.

R. Lam et al., "Learning skillful medium-range global weather forecasting", Science 382 (2023).
Positions are on the unit sphere, and lengths are chords.
"""

from itertools import combinations

import numpy as np
from scipy.spatial import cKDTree

REACH = 0.6  # of the longest edge: from level 1 on, some vertex is in reach of each point


def on_sphere(lat: np.ndarray, lon: np.ndarray) -> np.ndarray:
    """Return positions (N, 3) of latitudes and longitudes in degrees."""
    phi, theta = np.deg2rad(lat), np.deg2rad(lon)
    return np.stack([np.cos(phi) * np.cos(theta), np.cos(phi) * np.sin(theta), np.sin(phi)], axis=1)


def icosahedron() -> tuple[np.ndarray, np.ndarray]:
    """Return positions (12, 3) and triangles (20, 3), counterclockwise seen from outside."""
    golden = (1 + 5**0.5) / 2
    corners = [[0, a, b * golden] for a in (-1, 1) for b in (-1, 1)]
    pos = np.array([np.roll(corner, turn) for turn in range(3) for corner in corners])
    touch = np.isclose(np.linalg.norm(pos[:, None] - pos, axis=-1), 2)
    faces = [
        [a, b, c] if np.linalg.det(pos[[a, b, c]]) > 0 else [a, c, b]
        for a, b, c in combinations(range(12), 3)
        if touch[a, b] and touch[b, c] and touch[c, a]
    ]
    return pos / np.linalg.norm(pos[0]), np.array(faces)


def refine(pos: np.ndarray, faces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cut each triangle into four; the middles of sides follow the existing vertices."""
    low, high = np.sort(edges_of(faces), axis=0)
    sides, place = np.unique(low * len(pos) + high, return_inverse=True)
    middles = pos[sides // len(pos)] + pos[sides % len(pos)]
    middles /= np.linalg.norm(middles, axis=1, keepdims=True)
    (a, b, c), (ab, bc, ca) = faces.T, len(pos) + place.reshape(3, -1)
    faces = np.stack([[a, ab, ca], [b, bc, ab], [c, ca, bc], [ab, bc, ca]])
    return np.concatenate([pos, middles]), faces.transpose(0, 2, 1).reshape(-1, 3)


def edges_of(faces: np.ndarray) -> np.ndarray:
    """Return directed edges (2, E); two triangles share a side, in opposite directions."""
    return np.concatenate([faces[:, [0, 1]], faces[:, [1, 2]], faces[:, [2, 0]]]).T


def icosphere(level: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the positions of the finest mesh, and the triangles of each level up to `level`.

    Vertices have the same ids in all levels.
    """
    pos, faces = icosahedron()
    levels = [faces]
    for _ in range(level):
        pos, faces = refine(pos, faces)
        levels.append(faces)
    return pos, levels


def longest(pos: np.ndarray, edge_index: np.ndarray) -> float:
    source, target = pos[edge_index]
    return float(np.linalg.norm(source - target, axis=1).max())


def within_reach(points: np.ndarray, mesh: np.ndarray, reach: float) -> np.ndarray:
    """Return edges (2, E) from each point to all vertices within `reach`."""
    pairs = cKDTree(points).sparse_distance_matrix(cKDTree(mesh), reach, output_type="ndarray")
    edge_index = np.stack([pairs["i"], pairs["j"]])
    return edge_index[:, np.lexsort(edge_index)]


def around(mesh: np.ndarray, faces: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Return edges (2, 3 N) to each point from the corners of its triangle."""
    _, near = cKDTree(mesh[faces].sum(axis=1)).query(points, k=min(12, len(faces)))
    # A point is inside a triangle if all its barycentric coordinates are nonnegative.
    corners = mesh[faces[near]].swapaxes(-1, -2)
    shares = np.linalg.solve(corners, points[:, None, :, None])[..., 0]
    best = shares.min(axis=-1).argmax(axis=1)
    chosen = faces[near[np.arange(len(points)), best]]
    return np.stack([chosen.ravel(), np.arange(len(points)).repeat(3)])


def seen_from_target(source: np.ndarray, target: np.ndarray, edge_index: np.ndarray) -> np.ndarray:
    """Return displacements (E, 4) of sources from targets: east, north, up and length.

    The longest edge has the length 1.
    """
    lon, lat = np.arctan2(target[:, 1], target[:, 0]), np.arcsin(target[:, 2])
    east = np.stack([-np.sin(lon), np.cos(lon), np.zeros_like(lon)], axis=1)
    north = on_sphere(np.rad2deg(lat) + 90, np.rad2deg(lon))
    frame = np.stack([east, north, target], axis=1)
    step = source[edge_index[0]] - target[edge_index[1]]
    length = np.linalg.norm(step, axis=1, keepdims=True)
    place = np.einsum("eij,ej->ei", frame[edge_index[1]], step)
    return np.concatenate([place, length], axis=1) / length.max()
