"""Sea cells of some rows of NOAA's relief of the Earth, with edges to their 8 neighbours."""

from itertools import product

import numpy as np
import torch

import varcomm as vc


def saved_sea(file, folder):
    """Write the table of sea cells as .npy, which ranks map into memory; return its path."""
    path = f"{folder}/sea.npy"
    np.save(path, vc.simulate.read_sea(file))
    return path


def band(is_sea, rows, first_id):
    """Edges into the sea cells of some rows, and their columns and rows.

    `first_id` is the number of the first sea cell of the row before the first one.
    """
    above = max(0, rows.start - 1)
    around = np.asarray(is_sea[above : rows.stop + 1])
    number = np.cumsum(around.reshape(-1), dtype=np.int64).reshape(around.shape) - 1 + first_id
    inner = slice(rows.start - above, rows.stop - above)
    edges = []
    for up, right in product((-1, 0, 1), repeat=2):
        if (up, right) != (0, 0):
            top, bottom = max(inner.start, -up), min(inner.stop, len(around) - up)
            source = np.roll(number[top + up : bottom + up], -right, axis=1)
            both = around[top:bottom] & np.roll(around[top + up : bottom + up], -right, axis=1)
            edges.append(torch.from_numpy(np.stack([source[both], number[top:bottom][both]])))
    row, column = np.nonzero(around[inner])
    pos = np.stack([column, row + rows.start], axis=1).astype(np.float32)
    return torch.cat(edges, dim=1), torch.from_numpy(pos)
