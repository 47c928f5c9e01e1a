"""Arrays of samples by rows: zarr, HDF5, NetCDF and NumPy files, and arrays in memory."""

from __future__ import annotations

import os
import struct
import threading
import warnings
from base64 import b64decode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from varcomm.errors import ArgumentError, MissingPackageError
from varcomm.graph.libraries import package
from varcomm.graph.node_shard import described

__all__ = ["Array", "StoredArray"]

Array = np.ndarray[Any, Any]

# Bytes that one request reads, if chunks are smaller, and bytes of chunks that span several
# samples, which are kept for the next sample.
_REQUEST, _KEPT = 1 << 25, 1 << 28

# Attributes of packed values in the CF conventions.
_PACKED = ("scale_factor", "add_offset", "_FillValue", "missing_value")


class _Opened(NamedTuple):
    """An open array; `chunks` is None if each row can be read alone. `owner` is closed with it."""

    array: Any
    chunks: tuple[int, ...] | None = None
    attributes: Mapping[str, Any] = {}
    owner: Any = None


class _Piece(NamedTuple):
    """Rows that one request reads, the rows of the result, and those to select, if not all."""

    rows: slice | Array
    place: slice
    selected: Array | None
    touched: int


class StoredArray:
    """An array of shape (T, ..., N, ...), with rows along `axis`, read as (T, N, *F).

    Open in one process at a time: after a fork or in another process it is opened again.
    """

    def __init__(self, source: Any, variable: str | None, axis: int) -> None:
        self._open, self.name = _opener(source, variable)
        self._lock, self._pid = threading.Lock(), os.getpid()
        self._opened: _Opened | None = None
        self._kept: tuple[int, tuple[_Piece, ...], Array] | None = None
        opened = self._get()
        shape = tuple(opened.array.shape)
        if not -len(shape) <= axis < len(shape) or axis % len(shape) == 0:
            raise ArgumentError(
                f"{self.name} has shape {shape}. Its first axis counts samples, and axis={axis} "
                "must be another one, that of the rows."
            )
        self._axis = axis % len(shape)
        rest = tuple(size for i, size in enumerate(shape) if i not in (0, self._axis))
        self.shape = (shape[0], shape[self._axis], *rest)
        self._is_mapped = opened.chunks is None
        self.together, self.chunk = 1, 1  # samples and rows that are read together
        if opened.chunks is not None:
            self.together, self.chunk = opened.chunks[0], opened.chunks[self._axis]
        stored = opened.array.dtype
        self._decode = _packing(stored, opened.attributes, self.name)
        try:
            if stored.kind not in "biufc":
                raise TypeError
            self.row = torch.from_numpy(self._decode(np.zeros((0, *rest), stored)))
        except TypeError:
            raise ArgumentError(
                f"{self.name} holds values of type {stored}, which are not numbers of a tensor."
            ) from None
        self._stored = stored.newbyteorder("=")
        self._row_bytes = stored.itemsize * prod(rest)
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_opened": None, "_lock": None, "_kept": None, "_pid": 0}

    def _get(self) -> _Opened:
        if (
            self._pid != os.getpid()
        ):  # the fork may have copied a lock that a thread of the parent held
            self._lock, self._opened, self._kept = threading.Lock(), None, None
            self._pid = os.getpid()
        if self._opened is None:
            try:
                self._opened = self._open()
            except (ArgumentError, MissingPackageError):
                raise
            except Exception as error:  # of any library, for any fault of the file
                reason = str(error).partition("\n")[0] or type(error).__name__
                raise ArgumentError(f"{self.name} cannot be read: {reason}.") from error
        return self._opened

    def close(self) -> None:
        """Close the file; the next read opens it again."""
        opened, self._opened, self._kept = self._opened, None, None
        if opened is not None and opened.owner is not None:
            opened.owner.close()

    def pieces(self, ids: Array) -> tuple[_Piece, ...]:
        """Return the requests that read rows, ascending and each once: no chunk is in two."""
        if len(ids) == 0:
            return ()
        if self._is_mapped:
            is_run = ids[-1] - ids[0] + 1 == len(ids)
            rows = slice(int(ids[0]), int(ids[-1]) + 1) if is_run else ids
            return (_Piece(rows, slice(0, len(ids)), None, len(ids)),)
        chunks = ids // self.chunk
        per_request = max(1, _REQUEST // max(1, self.chunk * self.together * self._row_bytes))
        is_new = (np.diff(chunks) > 1) | (np.diff(chunks // per_request) > 0)
        cuts = [0, *(np.flatnonzero(is_new) + 1).tolist(), len(ids)]
        found = []
        for start, stop in pairwise(cuts):
            first, last = int(ids[start]), int(ids[stop - 1]) + 1
            touched = min(-(-last // self.chunk) * self.chunk, self.shape[1])
            touched -= first // self.chunk * self.chunk
            selected = None if last - first == stop - start else ids[start:stop] - first
            found.append(_Piece(slice(first, last), slice(start, stop), selected, touched))
        return tuple(found)

    def read(self, sample: int, pieces: tuple[_Piece, ...]) -> tuple[Array, int]:
        """Return the rows of a sample, (n, *F), and the bytes of the chunks that were read."""
        self._get()  # after a fork, before the lock
        with self._lock:
            touched = sum(piece.touched for piece in pieces) * self._row_bytes
            first = sample // self.together * self.together
            last = min(first + self.together, self.shape[0])
            touched *= last - first
            if self.together == 1 or touched > _KEPT:
                return self._decode(self._read(slice(sample, sample + 1), pieces)[0]), touched
            if self._kept is None or self._kept[0] != first or self._kept[1] is not pieces:
                self._kept = first, pieces, self._read(slice(first, last), pieces)
            else:
                touched = 0
            return self._decode(self._kept[2][sample - first].copy()), touched

    def _read(self, samples: slice, pieces: tuple[_Piece, ...]) -> Array:
        count = sum(piece.place.stop - piece.place.start for piece in pieces)
        shape = (samples.stop - samples.start, count, *self.shape[2:])
        out = np.empty(shape, self._stored)
        index: list[Any] = [slice(None)] * len(self.shape)
        index[0] = samples
        try:
            array = self._get().array
            for piece in pieces:
                index[self._axis] = piece.rows
                block = np.moveaxis(np.asarray(array[tuple(index)]), self._axis, 1)
                out[:, piece.place] = block if piece.selected is None else block[:, piece.selected]
        except ArgumentError:
            raise
        except Exception as error:  # of a damaged chunk, by the library that decodes it
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise ArgumentError(
                f"{self.name}, sample {samples.start}, cannot be read: {reason}."
            ) from error
        return out


def _opener(source: Any, variable: str | None) -> tuple[Callable[[], _Opened], str]:
    """Return the function that opens an array, for any process, and its name for messages."""
    if isinstance(source, str | os.PathLike):
        path = os.fspath(source)
        name = path if variable is None else f"{path}, variable {variable!r}"
        if "://" in path or Path(path).is_dir():
            return partial(_zarr, path, variable), name
        try:
            with open(path, "rb") as file:
                start = file.read(8)
        except OSError as error:
            raise ArgumentError(f"{path} cannot be read: {error.strerror or error}.") from error
        if start == b"\x89HDF\r\n\x1a\n" or Path(path).suffix in (".h5", ".hdf5"):
            return partial(_hdf5, path, variable), name
        if start[:3] == b"CDF" and start[3] in b"\x01\x02":
            return partial(_netcdf3, path, variable), name
        if start[:6] == b"\x93NUMPY":
            return partial(_numpy, path, variable), name
        raise ArgumentError(
            f"{path} is not a zarr folder, or an HDF5, NetCDF or .npy file. Pass one of these, or "
            "a numpy.memmap of a raw file."
        )
    if type(source).__module__.startswith("h5py"):
        raise ArgumentError("an open HDF5 file serves one process only. Pass its path.")
    if isinstance(source, torch.Tensor):
        source = source.detach().cpu().numpy()
    is_zarr = type(source).__module__.startswith("zarr.") and hasattr(source, "chunks")
    if not is_zarr and not isinstance(source, np.ndarray):
        raise ArgumentError(
            "source must be a path, a zarr.Array, a numpy array or a tensor; got "
            f"{described(source)}."
        )
    if variable is not None:
        raise ArgumentError(f"variable={variable!r} is for files of several arrays; pass None.")
    return partial(_of_zarr if is_zarr else _Opened, source), "the array"


def _chosen(names: list[str], variable: str | None, path: str) -> str:
    if variable is None and len(names) == 1:
        return names[0]
    if variable is None or variable not in names:
        missing = "" if variable is None else f"no variable {variable!r}, but "
        fix = "variable=, one of these names" if names else "another file"
        raise ArgumentError(
            f"{path} has {missing}{names or 'no arrays of samples by rows'}. Pass {fix}."
        )
    return variable


def _zarr(path: str, variable: str | None) -> _Opened:
    zarr = package("zarr", path)
    node = zarr.open(path, mode="r")
    if isinstance(node, zarr.Group):
        try:
            found = node[variable] if variable else None
        except KeyError:
            found = None
        if not isinstance(found, zarr.Array):
            names = [name for name, array in node.arrays() if array.ndim > 1]
            found = node[_chosen(names, variable, path)]
        node = found
    elif variable is not None:
        raise ArgumentError(f"{path} is an array without variables. Pass variable=None.")
    return _of_zarr(node)


def _of_zarr(array: Any) -> _Opened:
    attributes = dict(array.attrs)
    is_packed = "scale_factor" in attributes or "add_offset" in attributes
    # xarray stores _FillValue of zarr v2 as the fill value; that of zarr itself is 0 by default
    has_meaning = "_ARRAY_DIMENSIONS" in attributes or (is_packed and array.fill_value != 0)
    if array.metadata.zarr_format == 2 and array.fill_value is not None and has_meaning:
        attributes.setdefault("_FillValue", array.fill_value)
    return _Opened(array, array.chunks, attributes)


def _hdf5(path: str, variable: str | None) -> _Opened:
    h5py = package("h5py", path)
    file = h5py.File(path, "r", locking=False)  # reading needs no lock, which some systems lack
    try:
        found = file.get(variable) if variable else None
        if not isinstance(found, h5py.Dataset):
            names = [k for k, v in file.items() if isinstance(v, h5py.Dataset) and v.ndim > 1]
            found = file[_chosen(names, variable, path)]
        offset = found.id.get_offset()
        whole = found.chunks or (1, *found.shape[1:])
        opened = _Opened(found, whole, dict(found.attrs), file)
        if offset is None or found.chunks or not found.size or file.userblock_size:
            return opened
        # rows that lie end to end need no library, and no other rows
        array = np.memmap(path, found.dtype, "r", offset, found.shape)
        opened = _Opened(array, None, opened.attributes)
        file.close()
        return opened
    except BaseException:
        file.close()
        raise


def _netcdf3(path: str, variable: str | None) -> _Opened:
    file = package("scipy.io", path).netcdf_file(path, "r", mmap=True)
    names = [name for name, entry in file.variables.items() if len(entry.shape) > 1]
    entry = file.variables[_chosen(names, variable, path)]
    names = [*_PACKED, "_Unsigned"]
    attributes = {key: getattr(entry, key) for key in names if hasattr(entry, key)}
    array = entry.data
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the array keeps the memory map
        file.variables = {}
        file.close()
    return _Opened(array, None, attributes)


def _numpy(path: str, variable: str | None) -> _Opened:
    if variable is not None:
        raise ArgumentError(f"{path} is an array without variables. Pass variable=None.")
    return _Opened(np.load(path, mmap_mode="r", allow_pickle=False))


@dataclass(frozen=True)
class _Packing:
    """Conversion of stored values to numbers, as the CF conventions define packed data."""

    dtype: np.dtype[Any]
    scale: float | None
    offset: float | None
    fills: tuple[Any, ...]

    def __call__(self, values: Array) -> Array:
        out = values.astype(self.dtype, copy=False)
        if self.scale is not None or self.offset is not None:
            wide = values * np.float64(1 if self.scale is None else self.scale)
            out = (wide + np.float64(self.offset or 0)).astype(self.dtype)
        if self.fills:
            out[np.isin(values, self.fills)] = np.nan
        return out


def _packing(stored: np.dtype[Any], attributes: Mapping[str, Any], name: str) -> _Packing:
    if "_Unsigned" in attributes:
        raise ArgumentError(
            f"{name} has the attribute _Unsigned, which Rows does not apply. Store the values in "
            "an unsigned dtype."
        )

    def value(key: str) -> Any:
        given = attributes.get(key)
        if isinstance(given, str):  # as xarray writes a float for zarr
            given = struct.unpack("<d", b64decode(given))[0]
        return None if given is None else np.asarray(given).reshape(-1)[0]

    native = stored.newbyteorder("=")
    try:
        scale, offset, *missing = (value(key) for key in _PACKED)
        # NaN stays as it is
        fills = tuple(native.type(fill) for fill in missing if fill is not None and fill == fill)
    except (ValueError, TypeError, IndexError, OverflowError, struct.error) as error:
        raise ArgumentError(f"{name} has a scale, offset or fill value that is invalid.") from error
    dtype = native
    if native.kind not in "fc" and (fills or scale is not None or offset is not None):
        dtype = np.dtype(np.float32 if native.itemsize <= 2 else np.float64)
    return _Packing(dtype, scale, offset, fills)
