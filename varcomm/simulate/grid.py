"""The world ocean on a grid of latitudes and longitudes, as a graph."""

from __future__ import annotations

import io
import lzma
import os
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from varcomm.errors import ArgumentError, MissingPackageError

if TYPE_CHECKING:
    from torch_geometric.data import Data

__all__ = ["coarsened", "ocean", "read_sea"]


def ocean(is_sea: np.ndarray[Any, Any]) -> Data:
    """Connect each sea cell to its neighbouring sea cells, up to 8, in both directions.

    Parameters
    ----------
    is_sea : numpy.ndarray
        Bool of shape (rows, columns): rows from pole to pole, at least 3 columns around the Earth.

    Returns
    -------
    torch_geometric.data.Data
        ``edge_index`` and ``pos``, the centre of each cell on the unit sphere, fp32 (N, 3).

    Raises
    ------
    ArgumentError
        If `is_sea` is not a table of bools with at least 3 columns.

    See Also
    --------
    read_sea, coarsened

    Examples
    --------
    >>> ocean(np.ones((2, 4), dtype=bool))
    Data(edge_index=[2, 40], pos=[8, 3])
    """
    from torch_geometric.data import Data

    is_table = isinstance(is_sea, np.ndarray) and is_sea.dtype == bool and is_sea.ndim == 2
    if not is_table or is_sea.shape[1] < 3:
        raise ArgumentError("is_sea must be a NumPy array of bools: rows, and at least 3 columns.")
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


def coarsened(is_sea: np.ndarray[Any, Any], times: int) -> np.ndarray[Any, Any]:
    """Return every `times`-th row and column of a table of cells, as a view.

    Parameters
    ----------
    is_sea : numpy.ndarray
        Bool of shape (rows, columns).
    times : int
        Step between rows, and between columns.

    Returns
    -------
    numpy.ndarray
        The remaining rows and columns.

    See Also
    --------
    ocean, partition

    Examples
    --------
    >>> coarsened(np.eye(4, dtype=bool), 2).shape
    (2, 2)
    """
    return is_sea[times // 2 :: times, times // 2 :: times]


def read_sea(path: str | os.PathLike[str]) -> np.ndarray[Any, Any]:
    """Read the sea cells of NOAA's relief of the Earth, ETOPO, from Ferret's data sets.

    Parameters
    ----------
    path : path
        A netCDF 3 file with heights in m as ``ROSE``: ``etopo5.cdf``, ``etopo20.cdf`` or
        ``etopo60.cdf``, or one of these files compressed with xz. Needs SciPy.

    Returns
    -------
    numpy.ndarray
        Bool of shape (rows, columns); 2161 and 4320 at 1/12 degree.

    Raises
    ------
    MissingPackageError
        If SciPy is not installed.
    ArgumentError
        If the file is not an ETOPO relief.

    See Also
    --------
    ocean, coarsened
    """
    try:
        from scipy.io import netcdf_file  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingPackageError("read_sea needs SciPy: pip install scipy") from error
    path = Path(path)
    try:
        content = path.read_bytes()
        content = lzma.decompress(content) if path.suffix == ".xz" else content
        with netcdf_file(io.BytesIO(content), mmap=False) as file:
            relief = file.variables["ROSE"][:]
    except (OSError, KeyError, TypeError, ValueError, lzma.LZMAError) as error:
        raise ArgumentError(f"{path} is not a relief in netCDF 3: {error}.") from error
    # An odd last column repeats the first.
    return np.asarray(relief[:, : relief.shape[1] - relief.shape[1] % 2] < 0)
