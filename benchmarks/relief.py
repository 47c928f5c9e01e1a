"""The world ocean as a graph, from NOAA's relief of the Earth: sea cells and their 8 neighbours."""

import lzma
from pathlib import Path

import numpy as np
import torch
from scipy.io import netcdf_file


def unpacked(file, folder):
    """The file itself, or a copy in a folder without its compression."""
    if file.suffix != ".xz":
        return file
    path = Path(folder) / file.stem
    path.write_bytes(lzma.decompress(file.read_bytes()))
    return path


def sea(path):
    """Which cells are sea, from the file as it is mapped into memory."""
    with netcdf_file(path, mmap=True) as file:
        relief = file.variables["ROSE"][:]
        columns = relief.shape[1] - (relief.shape[1] % 2)  # an odd last column repeats the first
        is_sea = np.asarray(relief[:, :columns] < 0)
        del relief  # which holds the file open
    return is_sea


def band(is_sea, rows, first_id):
    """Edges into the sea cells of some rows, and their positions in degrees.

    `first_id` is the number of the first sea cell of the row before the first one.
    """
    above = max(0, rows.start - 1)
    around = is_sea[above : rows.stop + 1]
    number = np.cumsum(around.reshape(-1), dtype=np.int64).reshape(around.shape) - 1 + first_id
    inner = slice(rows.start - above, rows.stop - above)
    edges = []
    for up in (-1, 0, 1):
        for right in (-1, 0, 1):
            if (up, right) == (0, 0):
                continue
            top, bottom = max(inner.start, -up), min(inner.stop, len(around) - up)
            target = number[top:bottom]
            source = np.roll(number[top + up : bottom + up], -right, axis=1)
            both = around[top:bottom] & np.roll(around[top + up : bottom + up], -right, axis=1)
            edges.append(torch.from_numpy(np.stack([source[both], target[both]])))
    row, column = np.nonzero(around[inner])
    pos = np.stack([column, row + rows.start], axis=1).astype(np.float32)
    return torch.cat(edges, dim=1), torch.from_numpy(pos)
