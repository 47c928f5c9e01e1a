"""The climate of the sea, month by month, on a grid of latitudes and longitudes.

The grid has 67 latitudes and 180 longitudes, 2 degrees apart. The task is to predict the change of
the surface temperature of the sea from one month to the next. The data are those of
``examples/weather``.
"""

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from scipy.io import netcdf_file
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1]))
from sea_months import FIELDS, FILE, SEEN, TEST, TRAIN, insolation

import varcomm as vc

SOUTH, WEST, STEP = -57, 21, 2  # the first point, and the spacing, in degrees
SHAPE = (67, 180)
CHANNELS = len(FIELDS) + 5  # and insolation of both months, sea, and two of the latitude


class Block(NamedTuple):
    """The rows and columns of the grid that a rank has."""

    fields: Tensor  # (12, 7, rows, columns), zeros on land
    sea: Tensor  # whether a point is sea, (rows, columns)
    lat: Tensor  # degrees of each row, (rows, 1)


def read(rows: range, columns: range) -> Block:
    """Return a block of the grid from the file, which has the cells of the sea alone."""
    with netcdf_file(FILE, mmap=False) as file:
        lat, lon = (file.variables[name].data for name in ("lat", "lon"))
        row, column = ((x - first) // STEP for x, first in ((lat, SOUTH), (lon, WEST)))
        first, last = np.searchsorted(row, [rows.start, rows.stop])  # from south to north
        row = row[first:last].astype(int) - rows.start
        column = column[first:last].astype(int) - columns.start
        inside = (column >= 0) & (column < len(columns))
        fields = np.zeros((12, len(FIELDS), len(rows), len(columns)))
        for place, name in enumerate(FIELDS):
            values = file.variables[name].data[:, first:last][:, inside] / 100.0
            fields[:, place, row[inside], column[inside]] = values
    sea = np.zeros(fields.shape[2:], bool)
    sea[row[inside], column[inside]] = True
    north = SOUTH + STEP * torch.arange(rows.start, rows.stop, dtype=torch.float64)
    return Block(torch.from_numpy(fields), torch.from_numpy(sea), north[:, None])


class Months:
    """Inputs and truth of forecasts on a rank's block of the grid; collective.

    ``weight`` (rows, columns) is the area of a point of the sea, and zero on land. ``y_std`` is the
    deviation, in deg C, of the changes in the training months.
    """

    def __init__(self, block: Block, dtype: torch.dtype) -> None:
        fields, sea, lat = block
        self.dtype, self.weight = dtype, (sea * torch.cos(torch.deg2rad(lat))).to(dtype)
        self.change = fields.roll(-1, 0)[:, :1] - fields[:, :1]
        count = vc.all_reduce(sea.sum().double())

        def moments(values: Tensor) -> tuple[Tensor, Tensor]:
            """Return mean and deviation over months and the sea of all ranks."""
            total = len(values) * count
            mean = vc.all_reduce((values * sea).sum((0, 2, 3))).view(-1, 1, 1) / total
            square = vc.all_reduce(((values - mean).square() * sea).sum((0, 2, 3))) / total
            return mean, square.view(-1, 1, 1).sqrt()

        mean, std = moments(fields[SEEN])
        self.y_std = moments(self.change[TRAIN])[1].item()
        sun = torch.from_numpy(insolation(lat[:, 0].numpy()))[..., None].expand(12, *sea.shape)
        sun = (sun - 0.25) / 0.1
        place = [sea, torch.sin(torch.deg2rad(lat)), torch.cos(torch.deg2rad(lat))]
        fixed = torch.stack([x.expand(sea.shape) for x in place])
        self.inputs = torch.cat(
            [
                (fields - mean) / std * sea,
                torch.stack([sun, sun.roll(-1, 0)], dim=1),
                fixed.expand(12, *fixed.shape),
            ],
            dim=1,
        ).to(dtype)

    def sample(self, start: int) -> tuple[Tensor, Tensor]:
        """Return the input (1, 12, rows, columns) of a forecast, and the truth (1, 1, ...).

        The truth is the change of the surface temperature in a month, in units of ``y_std``.
        """
        truth = (self.change[start] / self.y_std).to(self.dtype)
        return self.inputs[start : start + 1], truth[None]


def temperatures() -> np.ndarray:
    """Return the surface temperatures of the full grid, (12, rows, columns), in deg C."""
    sst: np.ndarray = read(*map(range, SHAPE)).fields[:, 0].numpy()
    return sst


def rmse(change: np.ndarray) -> np.ndarray:
    """Return errors, in deg C, of predicted changes (12, rows, columns) in held-out months."""
    block = read(range(SHAPE[0]), range(SHAPE[1]))
    sst = block.fields[:, 0].numpy()
    error = change - (np.roll(sst, -1, axis=0) - sst)
    area = (block.sea * torch.cos(torch.deg2rad(block.lat))).numpy()
    return np.sqrt((error[TEST] ** 2 * area).sum((1, 2)) / area.sum())
