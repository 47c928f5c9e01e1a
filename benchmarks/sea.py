"""The world ocean on a grid of latitudes and longitudes, as a graph.

``read_sea`` reads the sea cells of NOAA's relief of the Earth, ETOPO, from the data sets of PMEL's
Ferret, in the public domain: ``etopo5.cdf``, ``etopo20.cdf`` or ``etopo60.cdf``, or one of these
files compressed with xz.
"""

import io
import lzma
from itertools import product
from pathlib import Path

import numpy as np
import torch
from scipy.io import netcdf_file
from torch_geometric.data import Data


def ocean(is_sea):
    """Connect each sea cell to its neighbouring sea cells, up to 8, in both directions.

    `is_sea` has rows from pole to pole, and at least 3 columns around the Earth. The graph has the
    centre of each cell on the unit sphere as ``pos``, fp32 of shape (N, 3).
    """
    rows, columns = is_sea.shape
    number = np.cumsum(is_sea, dtype=np.int64).reshape(is_sea.shape) - 1
    edges = []
    for down, right in product((-1, 0, 1), repeat=2):
        if (down, right) != (0, 0):
            here = slice(max(0, -down), rows - max(0, down))
            there = slice(max(0, down), rows + min(0, down))
            both = is_sea[here] & np.roll(is_sea[there], -right, axis=1)
            source = np.roll(number[there], -right, axis=1)[both]
            edges.append(torch.from_numpy(np.stack([source, number[here][both]])))
    row, column = np.nonzero(is_sea)
    south, east = (row + 0.5) * (np.pi / rows), (column + 0.5) * (2 * np.pi / columns)
    pos = np.stack([np.sin(south) * np.cos(east), np.sin(south) * np.sin(east), np.cos(south)], 1)
    return Data(edge_index=torch.cat(edges, dim=1), pos=torch.from_numpy(pos.astype(np.float32)))


def coarsened(is_sea, times):
    """Return every `times`-th row and column, as a view."""
    return is_sea[times // 2 :: times, times // 2 :: times]


def read_sea(path):
    """Return bools of shape (rows, columns); 2161 and 4320 at 1/12 degree."""
    path = Path(path)
    content = path.read_bytes()
    content = lzma.decompress(content) if path.suffix == ".xz" else content
    with netcdf_file(io.BytesIO(content), mmap=False) as file:
        relief = file.variables["ROSE"][:]
    # An odd last column repeats the first.
    return np.asarray(relief[:, : relief.shape[1] - relief.shape[1] % 2] < 0)
