"""``StoredArray``: rows of samples of any array that has slices, read in few requests."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from varcomm.errors import ArgumentError
from varcomm.graph.node_shard import described

__all__ = ["Array", "StoredArray"]

Array = np.ndarray[Any, Any]

_REQUEST = 1 << 25  # bytes that one request reads, if chunks are smaller
_KEPT = 1 << 28  # bytes of chunks of several samples that are kept for the next sample
_GAP = 1 << 14  # bytes that are read between two rows instead of a second request


class _Request(NamedTuple):
    """Rows that one slice reads, their place in the result, and those to select, if not all."""

    rows: slice | Array
    result: slice
    selected: Array | None
    touched: int


class StoredArray:
    """An array of shape (T, ..., N, ...), with rows along `axis`, read as (T, N, *F).

    `source` is an array, or a function that opens the array; each process calls it once.
    """

    def __init__(self, source: Any, axis: int) -> None:
        if isinstance(source, torch.Tensor):
            source = source.detach().cpu().numpy()
        is_array = all(hasattr(source, name) for name in ("shape", "dtype", "__getitem__"))
        if not is_array and not callable(source):
            raise ArgumentError(
                "source must be an array with shape, dtype and slices, or a function that opens "
                f"one, such as lambda: zarr.open_array(path); got {described(source)}."
            )
        self._open: Callable[[], Any] | None = None if is_array else source
        self._opened: Any = source if is_array else None
        self._enter_process()
        array = self._get()
        shape = tuple(int(size) for size in array.shape)
        if not -len(shape) <= axis < len(shape) or axis % len(shape) == 0:
            raise ArgumentError(
                f"the source has shape {shape}. Its first axis counts samples, and axis={axis} "
                "must be another one, that of the rows."
            )
        self._axis = axis % len(shape)
        features = tuple(size for i, size in enumerate(shape) if i not in (0, self._axis))
        self.shape = (shape[0], shape[self._axis], *features)
        chunks = _chunks(array, shape)
        self._is_chunked, self._is_in_memory = chunks is not None, isinstance(array, np.ndarray)
        # samples and rows that are read together
        self.together, self.chunk = (chunks[0], chunks[self._axis]) if chunks else (1, 1)
        stored = np.asarray(array[(slice(0, 0),) * len(shape)]).dtype.newbyteorder("=")
        if stored.kind not in "biufc":
            raise ArgumentError(f"the source holds values of type {stored}, which are not numbers.")
        self.row = torch.from_numpy(np.empty((0, *features), stored))
        self._stored, self._row_bytes = stored, stored.itemsize * prod(features)
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        opened = self._opened if self._open is None else None
        return vars(self) | {"_opened": opened, "_lock": None, "_kept": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._enter_process()

    def _enter_process(self) -> None:
        # after a fork, a thread of the parent may have held the lock
        self._pid, self._lock = os.getpid(), threading.Lock()
        self._kept: tuple[int, tuple[_Request, ...], Array] | None = None

    def _get(self) -> Any:
        if self._pid != os.getpid():
            if self._open is not None:
                self._opened = None
            elif not self._is_in_memory:
                raise ArgumentError(
                    "a forked process must not use an open file of its parent. Pass Rows a "
                    "function that opens the array, such as lambda: zarr.open_array(path)."
                )
            self._enter_process()
        if self._opened is None and self._open is not None:
            self._opened = self._open()
        return self._opened

    def close(self) -> None:
        """Drop an array that a function opened; the next read opens it again."""
        self._kept = None
        if self._open is not None:
            self._opened = None

    def requests(self, ids: Array) -> tuple[_Request, ...]:
        """Return the requests that read rows, ascending and each once: no chunk is in two."""
        if len(ids) == 0:
            return ()
        if self._is_in_memory:
            is_run = ids[-1] - ids[0] + 1 == len(ids)
            rows = slice(int(ids[0]), int(ids[-1]) + 1) if is_run else ids
            return (_Request(rows, slice(0, len(ids)), None, len(ids)),)
        chunks, gap = ids // self.chunk, 1
        if not self._is_chunked:
            gap = max(1, _GAP // max(1, self._row_bytes))
        per_request = max(1, _REQUEST // max(1, self.chunk * self.together * self._row_bytes))
        is_new = (np.diff(chunks) > gap) | (np.diff(chunks // per_request) > 0)
        found = []
        for start, stop in pairwise([0, *(np.flatnonzero(is_new) + 1).tolist(), len(ids)]):
            first, last = int(ids[start]), int(ids[stop - 1]) + 1
            touched = min(-(-last // self.chunk) * self.chunk, self.shape[1])
            touched -= first // self.chunk * self.chunk
            selected = None if last - first == stop - start else ids[start:stop] - first
            found.append(_Request(slice(first, last), slice(start, stop), selected, touched))
        return tuple(found)

    def read(self, sample: int, requests: tuple[_Request, ...]) -> tuple[Array, int]:
        """Return the rows of a sample, (n, *F), and the bytes of the chunks that were read."""
        self._get()  # after a fork, before the lock
        with self._lock:
            first = sample // self.together * self.together
            last = min(first + self.together, self.shape[0])
            touched = sum(each.touched for each in requests) * self._row_bytes * (last - first)
            if self.together == 1 or touched > _KEPT:
                return self._read(slice(sample, sample + 1), requests)[0], touched
            if self._kept is None or self._kept[0] != first or self._kept[1] is not requests:
                self._kept = first, requests, self._read(slice(first, last), requests)
            else:
                touched = 0
            return self._kept[2][sample - first].copy(), touched

    def _read(self, samples: slice, requests: tuple[_Request, ...]) -> Array:
        count = sum(each.result.stop - each.result.start for each in requests)
        out = np.empty((samples.stop - samples.start, count, *self.shape[2:]), self._stored)
        index: list[Any] = [samples, *[slice(None)] * (len(self.shape) - 1)]
        try:
            for each in requests:
                index[self._axis] = each.rows
                block = np.moveaxis(np.asarray(self._get()[tuple(index)]), self._axis, 1)
                out[:, each.result] = block if each.selected is None else block[:, each.selected]
        except Exception as error:  # of a damaged chunk, by the library that decodes it
            error.add_note(f"graph.Rows: sample {samples.start} cannot be read.")
            raise
        return out


def _chunks(array: Any, shape: tuple[int, ...]) -> Sequence[int] | None:
    """Return the sizes of chunks, as tensorstore, zarr, h5py, dask or xarray name them."""
    layout, encoding = getattr(array, "chunk_layout", None), getattr(array, "encoding", {})
    sizes = layout.read_chunk.shape if layout is not None else getattr(array, "chunks", None)
    sizes = sizes or encoding.get("chunksizes") or encoding.get("chunks")
    if not sizes or len(sizes) != len(shape) or None in sizes:  # tensorstore: not known
        return None
    return [max(1, each[0] if isinstance(each, tuple) else each) for each in sizes]
