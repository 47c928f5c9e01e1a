"""The world ocean as a graph: predict the temperature at 400 m from surface data.

A node is a sea cell of a regular grid, with edges to up to 8 neighbouring sea cells. Test tiles are
squares of 10 degrees, spread evenly, in which the temperature at 400 m is held out.
"""

from pathlib import Path

import numpy as np
import torch
from torch_geometric.data import Data

FILE = Path(__file__).parent / "data" / "ocean_1deg.npz"
TILE = 10  # degrees
SPACINGS = [n for n in range(1, 46) if 180 % n == 0]  # coarser grids have no test nodes


def neighbours(row: np.ndarray, column: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Return directed edges (2, E) between cells that touch; longitudes are periodic."""
    node = np.full((shape[0] + 2, shape[1]), -1)  # a row of land beyond each pole
    node[row + 1, column] = np.arange(len(row))
    around = [(north, east) for north in (-1, 0, 1) for east in (-1, 0, 1) if north or east]
    source = np.stack(
        [node[row + 1 + north, (column + east) % shape[1]] for north, east in around], axis=1
    )
    target = np.broadcast_to(np.arange(len(row))[:, None], source.shape)
    return np.stack([source, target])[:, source >= 0]


def on_sphere(lat: np.ndarray, lon: np.ndarray) -> np.ndarray:
    """Return positions (N, 3) on the unit sphere, which have no seam as longitudes have."""
    phi, theta = np.deg2rad(lat), np.deg2rad(lon)
    return np.stack([np.cos(phi) * np.cos(theta), np.cos(phi) * np.sin(theta), np.sin(phi)], axis=1)


def displacement(pos: np.ndarray, edge_index: np.ndarray) -> np.ndarray:
    """Return displacements (E, 3) from source to target: east, north and length, in degrees."""
    source, target = pos[edge_index[0]], pos[edge_index[1]]
    north, east = (target - source).T
    east = (east + 180) % 360 - 180
    east = east * np.cos(np.deg2rad(target[:, 0]))
    return np.stack([east, north, np.hypot(east, north)], axis=1)


def standardise(values: np.ndarray) -> np.ndarray:
    return (values - values.mean()) / values.std()


def load(spacing: int = 1) -> Data:
    """Return the graph of the sea cells, in float32; nodes go from south to north, then eastwards.

    ``spacing`` is in degrees: with k, every k-th row and column of cells. The graph has

    - ``x`` (N, 6): position on the unit sphere, surface temperature, surface salinity, depth of
      the sea floor. The last three are standardised over all nodes.
    - ``edge_attr`` (E, 3): displacement to the east and to the north, and distance, in spacings.
    - ``y`` (N, 1): temperature at 400 m, standardised over the training nodes; NaN if the sea
      is shallower. In deg C it is ``y * y_std + y_mean``.
    - ``train_mask``, ``test_mask`` (N,): nodes with a ``y``; one tile in five is for the test.
    - ``pos`` (N, 2): latitude north and longitude east, in degrees.
    """
    if spacing < 1 or 180 % spacing:
        raise ValueError(f"spacing must divide 180 degrees, got {spacing}")
    with np.load(FILE) as file:
        field = {name: file[name].astype(np.float64) for name in file.files}
    row = np.floor(field["lat"] + 90).astype(np.int64)
    column = np.floor(field["lon"] - 20).astype(np.int64)  # the grid begins at 20 degrees east
    kept = (row % spacing == 0) & (column % spacing == 0)
    field = {name: values[kept] for name, values in field.items()}
    row, column = row[kept] // spacing, column[kept] // spacing

    pos = np.stack([field["lat"], field["lon"]], axis=1)
    edge_index = neighbours(row, column, (180 // spacing, 360 // spacing))
    surface = ("surface_temperature", "surface_salinity", "floor_depth")
    x = np.column_stack([on_sphere(*pos.T), *(standardise(field[name]) for name in surface)])

    deep = np.isfinite(field["temperature_400m"])
    tile_row, tile_column = (pos // TILE).astype(np.int64).T
    # Test tiles are a knight's move apart: two of them touch only at the seam of longitudes.
    test = (tile_row + 2 * tile_column) % 5 == 0
    known = field["temperature_400m"][deep & ~test]
    y = (field["temperature_400m"] - known.mean()) / known.std()

    return Data(
        x=torch.from_numpy(x).float(),
        edge_index=torch.from_numpy(edge_index),
        edge_attr=torch.from_numpy(displacement(pos, edge_index) / spacing).float(),
        y=torch.from_numpy(y).float().unsqueeze(1),
        pos=torch.from_numpy(pos).float(),
        train_mask=torch.from_numpy(deep & ~test),
        test_mask=torch.from_numpy(deep & test),
        y_mean=float(known.mean()),
        y_std=float(known.std()),
    )


def rmse(data: Data, prediction: torch.Tensor) -> float:
    """Return the error of a standardised prediction (N, 1) in the test tiles, in deg C."""
    error = (prediction - data.y)[data.test_mask].double()
    return float(error.square().mean().sqrt()) * data.y_std


def baselines(data: Data) -> dict[str, float]:
    """Return errors of baselines without a network in the test tiles, in deg C."""
    known = torch.cat([data.x[:, :5], torch.ones_like(data.x[:, :1])], dim=1).double()
    train = data.train_mask
    weights = torch.linalg.lstsq(known[train], data.y[train].double()).solution
    return {
        "mean of the field": rmse(data, torch.zeros_like(data.y)),
        "linear fit to position, surface temperature and salinity": rmse(data, known @ weights),
    }
