"""Spots on a plate: predict a later field from an earlier one.

A value at each node of a triangle mesh diffuses along edges of different conductivity, and is
driven towards -1 or +1: ``u' = sum_j c_ij (u_j - u_i) + u - u**3`` (Allen and Cahn). A sample is
one initial field; all samples are on the same mesh.
"""

import numpy as np
import torch
from scipy.sparse import coo_array, csr_array
from scipy.spatial import Delaunay
from torch_geometric.data import Data

TIME, STEP = 2.0, 0.05  # predicted time, and time step of the simulation


def mesh(side: int, draws: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return points (N, 2) of a displaced grid of spacing 1, and directed edges (2, E)."""
    row, column = np.divmod(np.arange(side * side), side)
    points = np.stack([column, row], axis=1) + draws.uniform(-0.3, 0.3, (side * side, 2))
    corners = Delaunay(points).simplices
    edges = np.concatenate([corners[:, [a, b]] for a in range(3) for b in range(3) if a != b])
    edges = np.unique(edges, axis=0).T
    length = np.linalg.norm(points[edges[0]] - points[edges[1]], axis=1)
    return points, edges[:, length < 2.5]  # without slivers along the rim


def smooth(points: np.ndarray, waves: int, fields: int, draws: np.random.Generator) -> np.ndarray:
    """Return random fields (N, fields) of mean 0 and deviation 1, with scales above 6."""
    turns = draws.normal(0, 0.35, (2, waves, fields))
    phase = draws.uniform(0, 2 * np.pi, (waves, fields))
    values = np.cos(np.einsum("nd,dwf->nwf", points, turns) + phase).sum(axis=1)
    return (values - values.mean(axis=0)) / values.std(axis=0)


def later(start: np.ndarray, edges: np.ndarray, conductivity: np.ndarray) -> np.ndarray:
    """Return each field (N, fields) at the later time, from small explicit steps."""
    nodes, value = len(start), start
    matrix = csr_array(coo_array((conductivity, (edges[1], edges[0])), shape=(nodes, nodes)))
    lost = matrix.sum(axis=1)[:, None]
    for _ in range(round(TIME / STEP)):
        value = value + STEP * (matrix @ value - lost * value + value - value**3)
    return value


def load(side: int, train: int, test: int) -> Data:
    """Return the plate of ``side * side`` nodes, in float32, equal at every call.

    - ``x`` (N, train, 1) and ``y`` (N, train, 1): the training samples, before and after.
    - ``test_x`` and ``test_y`` (N, test, 1): the held-out samples.
    - ``edge_attr`` (E, 3): displacement from source to target, and conductivity.
    - ``pos`` (N, 2): positions of nodes.
    """
    draws = np.random.default_rng(0)
    points, edges = mesh(side, draws)
    good = 1 / (1 + np.exp(-3 * smooth(points, 20, 1, draws)[:, 0]))  # between 0 and 1
    conductivity = 0.02 + 0.5 * good[edges].mean(axis=0)
    start = 0.6 * smooth(points, 12, train + test, draws) + draws.normal(0, 0.3, (1, train + test))
    end = later(start, edges, conductivity)

    def samples(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).float().unsqueeze(-1).contiguous()

    edge_attr = np.column_stack([(points[edges[1]] - points[edges[0]]), 2 * conductivity])
    return Data(
        x=samples(start[:, :train]),
        y=samples(end[:, :train]),
        test_x=samples(start[:, train:]),
        test_y=samples(end[:, train:]),
        edge_index=torch.from_numpy(edges.astype(np.int64)),
        edge_attr=torch.from_numpy(edge_attr).float(),
        pos=torch.from_numpy(points).float(),
    )


def baselines(data: Data) -> dict[str, float]:
    """Return mean squared errors of baselines on the held-out samples."""
    source, target = data.edge_index
    degree = torch.bincount(target, minlength=data.num_nodes).view(-1, 1, 1)

    def around(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x).index_add(0, target, x[source]) / degree

    def fitted(known: "list[torch.Tensor]", test: "list[torch.Tensor]") -> float:
        matrix, held_out = (torch.cat(c, dim=-1).flatten(0, 1).double() for c in (known, test))
        weights = torch.linalg.lstsq(matrix, data.y.flatten(0, 1).double()).solution
        return float((held_out @ weights - data.test_y.flatten(0, 1)).square().mean())

    def powers(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.ones_like(x), x, x**2, x**3]

    x, test_x = data.x, data.test_x
    return {
        "nothing changes": float((test_x - data.test_y).square().mean()),
        "a cubic of each node's value": fitted(powers(x), powers(test_x)),
        "the same, and the mean of its neighbours": fitted(
            [*powers(x), around(x), around(around(x))],
            [*powers(test_x), around(test_x), around(around(test_x))],
        ),
    }
