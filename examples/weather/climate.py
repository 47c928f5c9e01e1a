"""The climate of the sea, month by month, on a grid and a mesh that cover the same sphere.

The grid has the cells of the sea, 2 degrees wide. The task is how the temperature of the surface
changes from a month to the next.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from mesh import (
    REACH,
    around,
    edges_of,
    icosphere,
    longest,
    on_sphere,
    seen_from_target,
    within_reach,
)
from torch_geometric.data import HeteroData

FILE = Path(__file__).parent / "data" / "coads_2deg.npz"
FIELDS = ("sst", "airt", "speh", "wspd", "uwnd", "vwnd", "slp")
MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]
HELD_OUT = (1, 5, 9)  # February, June and October: no training looks at them, nor predicts them
SEEN = [month for month in range(12) if month not in HELD_OUT]
# A forecast starts at a month, and is of the next; December comes before January.
TEST = [(month - 1) % 12 for month in HELD_OUT]
TRAIN = [month for month in SEEN if (month + 1) % 12 in SEEN]


def read() -> dict[str, np.ndarray]:
    """The fields (12, G), in their units, and latitude and longitude (G,) of the cells."""
    with np.load(FILE) as file:
        fields = {name: file[name].astype(np.float64) / 100 for name in FIELDS}
        return fields | {name: file[name].astype(np.float64) for name in ("lat", "lon")}


def insolation(lat: np.ndarray) -> np.ndarray:
    """What the sun would bring without air, (12, G): the mean of a day, over that at its zenith."""
    day = 365 * (np.arange(12)[:, None] + 0.5) / 12
    tilt = np.deg2rad(-23.44) * np.cos(2 * np.pi * (day + 10) / 365)
    phi = np.deg2rad(lat)
    noon = np.arccos(np.clip(-np.tan(phi) * np.tan(tilt), -1, 1))  # from there to sunset
    high, low = np.cos(phi) * np.cos(tilt), np.sin(phi) * np.sin(tilt)
    return (noon * low + np.sin(noon) * high) / np.pi


def standardise(values: np.ndarray) -> np.ndarray:
    """By mean and deviation of the months that training sees; months come first."""
    return (values - values[SEEN].mean()) / values[SEEN].std()


def load(level: int) -> HeteroData:
    """Grid and mesh as one graph, in float32; of the months, the first is January.

    Of the grid's G cells, from south to north and then eastwards:

    - ``x`` (G, 12, 12): what a forecast knows that starts at each month: 7 fields, the insolation
      then and a month later, all standardised, and the position.
    - ``y`` (G, 12): how much warmer the surface is a month later, in units of ``y_std`` deg C.
    - ``area`` (G, 1): of the cell, 1 on average.

    Of the mesh's nodes ``x`` (M, 3): the position. Of all edges ``edge_attr`` (E, 4): where the
    source lies as seen from the target. All nodes have ``pos``, on the unit sphere.
    """
    file = read()
    grid = on_sphere(file["lat"], file["lon"])
    mesh, levels = icosphere(level)
    finest = edges_of(levels[-1])
    edges = {
        ("grid", "to", "mesh"): within_reach(grid, mesh, REACH * longest(mesh, finest)),
        ("mesh", "to", "mesh"): np.concatenate([edges_of(faces) for faces in levels], axis=1),
        ("mesh", "to", "grid"): around(mesh, levels[-1], grid),
    }

    sun = insolation(file["lat"])
    known = [standardise(values) for values in (*(file[name] for name in FIELDS), sun)]
    known.append(np.roll(known[-1], -1, axis=0))
    place = np.broadcast_to(grid, (12, *grid.shape))
    change = np.roll(file["sst"], -1, axis=0) - file["sst"]
    area = np.cos(np.deg2rad(file["lat"]))

    data = HeteroData()
    data.y_std = float(change[TRAIN].std())
    x = np.concatenate([np.stack(known, axis=-1), place], axis=-1)
    data["grid"].x = torch.from_numpy(x.swapaxes(0, 1)).float()
    data["grid"].y = torch.from_numpy(change.T / data.y_std).float()
    data["grid"].area = torch.from_numpy(area / area.mean()).float()[:, None]
    data["mesh"].x = torch.from_numpy(mesh).float()
    pos = {"grid": grid, "mesh": mesh}
    for kind in pos:
        data[kind].pos = torch.from_numpy(pos[kind])
    for kind, edge_index in edges.items():
        data[kind].edge_index = torch.from_numpy(edge_index)
        seen = seen_from_target(pos[kind[0]], pos[kind[2]], edge_index)
        data[kind].edge_attr = torch.from_numpy(seen).float()
    return data


def rmse(change: np.ndarray, starts: Sequence[int]) -> np.ndarray:
    """Errors, in deg C, of changes (12, G) that are predicted from each of some months."""
    file = read()
    truth = np.roll(file["sst"], -1, axis=0) - file["sst"]
    area = np.cos(np.deg2rad(file["lat"]))
    return np.sqrt(np.average((change - truth)[starts] ** 2, axis=1, weights=area))


def linear(data: HeteroData) -> np.ndarray:
    """Changes (12, G), in deg C, by the linear fit to what a cell knows of itself."""
    known = torch.nn.functional.pad(data["grid"].x, (0, 1), value=1.0).double()
    weights = torch.linalg.lstsq(
        known[:, TRAIN].flatten(0, 1), data["grid"].y[:, TRAIN].double().view(-1, 1)
    ).solution
    return (known @ weights)[..., 0].T.numpy() * data.y_std


def baselines() -> dict[str, np.ndarray]:
    """Changes (12, G), in deg C, that need no network, by name."""
    sst = read()["sst"]
    mean = np.broadcast_to(sst[SEEN].mean(axis=0), sst.shape)
    angle = 2 * np.pi * np.arange(12) / 12
    waves = np.stack([np.ones(12), np.cos(angle), np.sin(angle)], axis=1)
    yearly = waves @ np.linalg.lstsq(waves[SEEN], sst[SEEN], rcond=None)[0]
    return {
        "persistence: no change": np.zeros_like(sst),
        "mean of the cell over training months": mean - sst,
        "a yearly wave through the cell's training months": np.roll(yearly, -1, axis=0) - sst,
    }
