"""The sea on a grid of latitudes and longitudes, as a graph to count with."""

from __future__ import annotations

import lzma
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from varcomm.errors import ArgumentError, MissingPackageError

if TYPE_CHECKING:
    from torch_geometric.data import Data

__all__ = ["coarsened", "ocean", "read_sea"]


def ocean(is_sea: np.ndarray[Any, Any]) -> Data:
    """Join each sea cell to those of its 8 neighbours that are sea, in both directions.

    Parameters
    ----------
    is_sea : numpy.ndarray
        Bool of shape (rows, columns): rows from one pole to the other, columns around the Earth, so
        that the last is beside the first.

    Returns
    -------
    torch_geometric.data.Data
        ``edge_index`` and ``pos``, the place of each cell's middle on the unit sphere, float32
        (N, 3).

    Raises
    ------
    ArgumentError
        If `is_sea` is no table of bools, of two columns at least.

    Examples
    --------
    >>> ocean(np.ones((2, 4), dtype=bool))
    Data(edge_index=[2, 40], pos=[8, 3])
    """
    from torch_geometric.data import Data

    if not isinstance(is_sea, np.ndarray) or is_sea.dtype != bool or is_sea.ndim != 2:
        raise ArgumentError("is_sea must be a NumPy array of bools with rows and columns.")
    rows, columns = is_sea.shape
    if columns < 3:
        raise ArgumentError(f"is_sea must have 3 columns at least; got {columns}.")
    number = np.cumsum(is_sea, dtype=np.int64).reshape(is_sea.shape) - 1
    edges = []
    for down in (-1, 0, 1):
        here, there = (
            slice(max(0, -down), rows - max(0, down)),
            slice(max(0, down), rows + min(0, down)),
        )
        for right in (-1, 0, 1):
            if (down, right) != (0, 0):
                other = np.roll(is_sea[there], -right, axis=1)
                both = is_sea[here] & other
                source = np.roll(number[there], -right, axis=1)[both]
                edges.append(torch.from_numpy(np.stack([source, number[here][both]])))
    row, column = np.nonzero(is_sea)
    south, east = (row + 0.5) * (np.pi / rows), (column + 0.5) * (2 * np.pi / columns)
    pos = np.stack([np.sin(south) * np.cos(east), np.sin(south) * np.sin(east), np.cos(south)], 1)
    return Data(edge_index=torch.cat(edges, dim=1), pos=torch.from_numpy(pos.astype(np.float32)))


def coarsened(is_sea: np.ndarray[Any, Any], times: int) -> np.ndarray[Any, Any]:
    """Return every so many-th row and column.

    Parameters
    ----------
    is_sea : numpy.ndarray
        Of shape (rows, columns).
    times : int
        How many rows, and columns, one is to stand for.

    Returns
    -------
    numpy.ndarray
        A view of the rows and columns that are left.

    Examples
    --------
    >>> coarsened(np.eye(4, dtype=bool), 2).shape
    (2, 2)
    """
    return is_sea[times // 2 :: times, times // 2 :: times]


def read_sea(path: str | os.PathLike[str]) -> np.ndarray[Any, Any]:
    """Read where the sea is from NOAA's relief of the Earth, ETOPO, as Ferret's data sets have it.

    Parameters
    ----------
    path : path
        A file in netCDF 3 with heights in m as ``ROSE``, one of ``etopo5.cdf``, ``etopo20.cdf`` and
        ``etopo60.cdf``, or the same compressed by xz. Needs SciPy.

    Returns
    -------
    numpy.ndarray
        Bool of shape (rows, columns); 2161 and 4320 at 1/12 degree.

    Raises
    ------
    ArgumentError
        If the file is not there or is something else.
    MissingPackageError
        If SciPy is not installed.
    """
    try:
        from scipy.io import netcdf_file  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingPackageError("read_sea needs SciPy: pip install scipy") from error
    path = Path(path)
    if not path.is_file():
        raise ArgumentError(f"there is no file {path}.")
    with tempfile.TemporaryDirectory() as folder:
        try:
            plain = path
            if path.suffix == ".xz":
                plain = Path(folder) / path.stem
                plain.write_bytes(lzma.decompress(path.read_bytes()))
            with netcdf_file(plain, mmap=False) as file:
                relief = file.variables["ROSE"][:]
        except (OSError, KeyError, TypeError, ValueError, lzma.LZMAError) as error:
            raise ArgumentError(f"{path} is no relief in netCDF 3: {error}.") from error
    # an odd last column repeats the first
    return np.asarray(relief[:, : relief.shape[1] - relief.shape[1] % 2] < 0)
