"""The climate of the sea, month by month, on a grid and a mesh that cover the same sphere.

The grid has sea cells of 2 degrees. The task is to predict the change of the surface temperature
from one month to the next.
"""

import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
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
from scipy.io import netcdf_file
from torch_geometric.data import HeteroData

sys.path.append(str(Path(__file__).parents[1]))
from sea_months import FIELDS, FILE, SEEN, TRAIN, insolation

import varcomm as vc
from varcomm.graph import PartitionedGraph

CHANNELS = len(FIELDS) + 5  # inputs of a cell: fields, insolation twice, position


def read(names: Iterable[str] = (*FIELDS, "lat", "lon")) -> dict[str, np.ndarray]:
    """Return the full fields (12, G), and the latitude and longitude (G,) of the cells."""
    with netcdf_file(FILE, mmap=False) as file:
        return {
            name: file.variables[name].data / (100.0 if name in FIELDS else 1.0) for name in names
        }


def field(name: str) -> np.ndarray:
    """Return hundredths of a field, (12, G), as a map of the file: a rank reads only its cells."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the array keeps the map open
        with netcdf_file(FILE) as file:
            return file.variables[name].data


def standardise(values: np.ndarray) -> np.ndarray:
    """Standardise with the mean and deviation of the training months; months come first."""
    return (values - values[SEEN].mean()) / values[SEEN].std()


def load(level: int) -> HeteroData:
    """Return grid and mesh as one graph, in float32, without the fields.

    The grid has G cells, from south to north and then eastwards:

    - ``sun`` (G, 12): the standardised insolation of each month; the first is January.
    - ``area`` (G, 1): the area of the cell, 1 on average.

    The mesh has ``x`` (M, 3), positions. All edges have ``edge_attr`` (E, 4), the displacement of
    the source from the target. All nodes have ``pos``, on the unit sphere.
    """
    file = read(["lat", "lon"])
    grid = on_sphere(file["lat"], file["lon"])
    mesh, levels = icosphere(level)
    finest = edges_of(levels[-1])
    edges = {
        ("grid", "to", "mesh"): within_reach(grid, mesh, REACH * longest(mesh, finest)),
        ("mesh", "to", "mesh"): np.concatenate([edges_of(faces) for faces in levels], axis=1),
        ("mesh", "to", "grid"): around(mesh, levels[-1], grid),
    }

    area = np.cos(np.deg2rad(file["lat"]))

    data = HeteroData()
    data["grid"].sun = torch.from_numpy(standardise(insolation(file["lat"])).T).float()
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


class Months:
    """The fields of each month; each rank reads its own cells; collective.

    ``y_std`` is the deviation, in deg C, of the changes in the training months.
    """

    def __init__(self, graph: PartitionedGraph) -> None:
        self.grid = graph["grid"]
        self.rows = [vc.graph.Rows(field(name), graph, node_type="grid") for name in FIELDS]
        fields = torch.stack([*self._fields(range(12))])
        self.mean, self.std = self._moments(fields[SEEN])
        warmer = fields[..., :1].roll(-1, 0) - fields[..., :1]
        self.y_std = self._moments(warmer[TRAIN])[1].item()

    def _fields(self, months: Sequence[int]) -> Iterator[torch.Tensor]:
        """Yield the 7 fields of each month, (n, 7); threads read the next months."""
        for month in zip(*(rows.samples(months) for rows in self.rows), strict=True):
            yield torch.stack(month, dim=1).double() / 100

    def _moments(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean and deviation over months and the cells of all ranks."""
        count = len(values) * self.grid.num_nodes
        mean = vc.all_reduce(values.sum((0, 1))) / count
        return mean, (vc.all_reduce((values - mean).square().sum((0, 1))) / count).sqrt()

    def samples(self, starts: Sequence[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the input of a forecast (n, 12), and the truth (n, 1), for each month of `starts`.

        The input is 7 fields, the insolation of both months, all standardised, and the position.
        The truth is the change of the surface temperature in a month, in units of ``y_std``.
        """
        fields_of = self._fields([(start + i) % 12 for start in starts for i in (0, 1)])
        for start in starts:
            now, later = next(fields_of), next(fields_of)
            fields = ((now - self.mean) / self.std).float()
            sun = self.grid.sun[:, [start, (start + 1) % 12]]
            x = torch.cat([fields, sun, self.grid.pos.float()], dim=1)
            yield x, ((later - now)[:, :1] / self.y_std).float()


def rmse(change: np.ndarray, starts: Sequence[int]) -> np.ndarray:
    """Return errors, in deg C, of predicted changes (12, G) from each of some months."""
    file = read()
    truth = np.roll(file["sst"], -1, axis=0) - file["sst"]
    area = np.cos(np.deg2rad(file["lat"]))
    return np.sqrt(np.average((change - truth)[starts] ** 2, axis=1, weights=area))


def known() -> tuple[np.ndarray, np.ndarray]:
    """Return inputs of forecasts (12, G, 12), and changes (12, G) in deg C; in one process."""
    file = read()
    known = [standardise(file[name]) for name in FIELDS]
    known.append(standardise(insolation(file["lat"])))
    known.append(np.roll(known[-1], -1, axis=0))
    place = on_sphere(file["lat"], file["lon"])
    place = np.broadcast_to(place, (12, *place.shape))
    change = np.roll(file["sst"], -1, axis=0) - file["sst"]
    return np.concatenate([np.stack(known, axis=-1), place], axis=-1), change


def linear() -> np.ndarray:
    """Return changes (12, G), in deg C, from a linear fit to the inputs of a cell."""
    x, change = known()
    x = np.pad(x, [(0, 0), (0, 0), (0, 1)], constant_values=1.0)
    weights = np.linalg.lstsq(x[TRAIN].reshape(-1, x.shape[-1]), change[TRAIN].ravel())[0]
    return x @ weights
