"""Arrays of other libraries: opened by path; their chunks, names of dimensions and packing."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from varcomm.errors import ArgumentError
from varcomm.graph.libraries import package
from varcomm.graph.node_shard import described

Array = np.ndarray[Any, Any]


def opened(path: str) -> Any:
    """Return the array, or the group of arrays, in a file; no values are read."""
    if path.endswith(".npy"):
        return np.load(path, mmap_mode="r")
    if Path(path).is_dir():
        return package("zarr", path).open(path, mode="r")
    with Path(path).open("rb") as file:
        start = file.read(8)
    if start == b"\x89HDF\r\n\x1a\n":
        return package("h5py", path).File(path, "r")
    if start[:4] in (b"CDF\x01", b"CDF\x02"):
        file = package("scipy.io", path).netcdf_file(path, mmap=True)
        return {name: _Variable(file, name) for name in file.variables}
    raise ArgumentError(
        f"{path} is not a .npy, zarr, HDF5 or NetCDF file. Pass a function that opens the array, "
        "such as lambda: xarray.open_dataset(path)[name]."
    )


class _Variable:
    """A variable of a mapped NetCDF 3 file that copies what is read: SciPy can close the file."""

    def __init__(self, file: Any, name: str) -> None:
        self._file, self._name = file, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file.variables[self._name], name)

    def __getitem__(self, index: Any) -> Array:
        return np.array(self._file.variables[self._name][index])


def selected(source: Any, variable: str | None) -> Any:
    """Return an array, or one of a group by its name; the name may be missing if there is one."""
    if hasattr(source, "shape"):
        return source
    group = getattr(source, "variables", source)  # of netcdf_file and netCDF4.Dataset
    if not hasattr(group, "keys") or isinstance(group, type):
        raise ArgumentError(
            "source must be an array with shape and slices, a path, or a function that opens an "
            f"array, such as lambda: zarr.open_array(path); got {described(source)}."
        )
    names = [name for name in group if hasattr(group[name], "shape")]
    fields = [name for name in names if len(group[name].shape) > 1]
    if variable is None and len(fields) == 1:
        return group[fields[0]]
    if variable is not None and variable in group and hasattr(group[variable], "shape"):
        return group[variable]
    listed = ", ".join(sorted(map(str, names)))
    asked = "several arrays" if variable is None else f"no array {variable!r}"
    raise ArgumentError(f"the source has {asked}. Pass variable=, one of {listed}.")


def names_of(array: Any) -> tuple[str, ...]:
    """Return the names of dimensions, as xarray, NetCDF, zarr or h5py keep them; () if unnamed."""
    found: Any = getattr(array, "dimensions", None) or getattr(array, "dims", None)
    if hasattr(array, "metadata"):  # zarr 3, and zarr 2 as xarray writes it
        found = getattr(array.metadata, "dimension_names", None)
        found = found or array.attrs.get("_ARRAY_DIMENSIONS")
    elif hasattr(array, "make_scale"):  # h5py: labels, or scales of a NetCDF file
        found = [
            dim.label or (dim[0].name.rpartition("/")[2] if len(dim) else "") for dim in array.dims
        ]
    return tuple(map(str, found)) if found and all(found) else ()


def chunks_of(array: Any, shape: tuple[int, ...]) -> Sequence[int] | None:
    """Return the sizes of chunks, as tensorstore, zarr, h5py, dask or xarray name them."""
    layout, encoding = getattr(array, "chunk_layout", None), getattr(array, "encoding", {})
    sizes = layout.read_chunk.shape if layout is not None else getattr(array, "chunks", None)
    sizes = sizes or encoding.get("chunksizes") or encoding.get("chunks")
    if not sizes or len(sizes) != len(shape) or None in sizes:  # tensorstore: not known
        return None
    return [max(1, each[0] if isinstance(each, tuple) else each) for each in sizes]


@dataclass(frozen=True, eq=False)
class Packing:
    """Stored numbers, by the CF conventions: a value is ``stored * scale + offset``, or missing."""

    stored: np.dtype[Any]
    dtype: np.dtype[Any]
    scale: Any
    offset: Any
    missing: Array

    @classmethod
    def of(cls, array: Any, stored: np.dtype[Any]) -> Packing:
        """Read the attributes of an array, unless its library has unpacked the values."""

        def attribute(name: str) -> Any:
            attrs = getattr(array, "attrs", None)
            value = attrs.get(name) if attrs is not None else getattr(array, name, None)
            if isinstance(value, str) and hasattr(array, "metadata"):  # of zarr 3, by xarray
                value = np.frombuffer(b64decode(value), "<f8")
            return None if value is None or np.asarray(value).dtype.kind not in "biuf" else value

        # netCDF4 and SciPy unpack by themselves, if this is True
        if any(getattr(array, name, False) is True for name in ("scale", "maskandscale")):
            return cls(stored, stored, None, None, np.empty(0, stored))
        attrs = getattr(array, "attrs", None)
        unsigned = attrs.get("_Unsigned") if attrs is not None else getattr(array, "_Unsigned", "")
        if stored.kind == "i" and unsigned in ("true", b"true", "True"):
            stored = np.dtype(f"u{stored.itemsize}")
        scale, offset = attribute("scale_factor"), attribute("add_offset")
        marks = [attribute(name) for name in ("_FillValue", "missing_value")]
        if attrs is not None and "_ARRAY_DIMENSIONS" in attrs:  # zarr 2, by xarray
            marks.append(array.fill_value)
        missing = [np.atleast_1d(mark).astype(stored) for mark in marks if mark is not None]
        dtype = stored
        if stored.kind in "biuf" and (scale is not None or offset is not None):
            given = [np.asarray(each).dtype for each in (scale, offset) if each is not None]
            dtype = np.result_type(np.float32, *given)
        elif stored.kind in "iu" and missing:
            dtype = np.dtype(np.float32 if stored.itemsize <= 2 else np.float64)
        none = np.empty(0, stored)
        return cls(stored, dtype, scale, offset, np.concatenate([none, *missing]))

    def unpacked(self, stored: Array) -> Array:
        """Return values; missing ones are NaN."""
        stored = stored.view(self.stored)
        values = stored.astype(self.dtype, copy=False)
        if self.scale is not None:
            values = values * np.asarray(self.scale, self.dtype).reshape(())
        if self.offset is not None:
            values = values + np.asarray(self.offset, self.dtype).reshape(())
        if self.dtype.kind == "f" and self.missing.size:
            values[np.isin(stored, self.missing)] = np.nan
        return values
