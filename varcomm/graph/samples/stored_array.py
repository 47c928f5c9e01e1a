"""``StoredArray``: rows of samples of any array that has slices, read in few requests."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from functools import partial
from itertools import combinations, pairwise
from math import prod
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from varcomm.errors import ArgumentError, exact_int
from varcomm.graph.samples.array_formats import (
    Array,
    Packing,
    chunks_of,
    names_of,
    opened,
    selected,
)

_REQUEST = 1 << 25  # bytes that one request reads, if chunks are smaller
_KEPT = 1 << 28  # bytes of chunks of several samples that are kept for the next sample
_GAP = 1 << 14  # bytes that are read between two rows instead of a second request


class _Request(NamedTuple):
    """A box of rows that one slice reads, their place in the result, and those to select.

    `selected` are places in the box along each of its axes; None selects all.
    """

    box: tuple[slice, ...]
    rows: int
    result: slice | Array
    selected: tuple[Array, ...] | None
    touched: int


class StoredArray:
    """An array with rows along one axis or several, read as (T, N, *F).

    `source` is an array, a group of arrays, a path, or a function that opens one of them; each
    process opens it once. Rows along several axes are numbered in the order of these axes. Without
    an axis of samples, T is 1.
    """

    def __init__(self, source: Any, variable: str | None, axis: Any, sample_axis: Any) -> None:
        if isinstance(source, torch.Tensor):
            source = source.detach().cpu().numpy()
        if isinstance(source, str | os.PathLike):
            source = partial(opened, os.fspath(source))
        self._reopens = callable(source) and not hasattr(source, "shape")
        self._source, self._variable = source, variable
        self._enter_process()
        array = self._get()
        self._names, self._shape = names_of(array), tuple(int(size) for size in array.shape)
        several = isinstance(axis, Sequence) and not isinstance(axis, str)
        self.axes = tuple(self._place(each, axis) for each in (axis if several else [axis]))
        if len({*self.axes}) < len(self.axes) or not self.axes:
            raise ArgumentError(f"axis={axis!r} must name different axes, and at least one.")
        self.sample_axis = None
        if sample_axis is not None and (place := self._place(sample_axis, axis)) not in self.axes:
            self.sample_axis = place
        used = (self.sample_axis, *self.axes)
        features = tuple(size for i, size in enumerate(self._shape) if i not in used)
        self._grid = np.array([self._shape[i] for i in self.axes])
        samples = 1 if self.sample_axis is None else self._shape[self.sample_axis]
        self.shape = (samples, prod(self._grid.tolist()), *features)
        chunks = chunks_of(array, self._shape)
        self._is_chunked, self._is_in_memory = chunks is not None, isinstance(array, np.ndarray)
        sizes = chunks or [1] * len(self._shape)
        self._chunks = np.array([sizes[i] for i in self.axes])
        self._cut = -(-self._grid // self._chunks)  # chunks along each axis
        # samples and rows that are read together
        self.together = 1 if self.sample_axis is None else sizes[self.sample_axis]
        is_run = self._is_chunked and bool((self._cut[1:] == 1).all())
        self.chunk = prod([int(self._chunks[0]), *self._grid[1:].tolist()]) if is_run else 1
        stored = np.asarray(array[(slice(0, 0),) * len(self._shape)]).dtype.newbyteorder("=")
        if stored.kind not in "biufc":
            raise ArgumentError(f"the source holds values of type {stored}, which are not numbers.")
        self._stored, self._packing = stored, Packing.of(array, stored)
        self.row = torch.from_numpy(np.empty((0, *features), self._packing.dtype))
        self._row_bytes = stored.itemsize * prod(features)
        self.close()

    def __str__(self) -> str:
        names = f" of dimensions ({', '.join(self._names)})" if self._names else ""
        return f"shape {self._shape}{names}"

    def _place(self, axis: Any, given: Any) -> int:
        """Return the place of an axis, or raise ArgumentError."""
        if isinstance(axis, str) and axis in self._names:
            return self._names.index(axis)
        place, count = exact_int(axis), len(self._shape)
        if place is None or not -count <= place < count:
            raise ArgumentError(
                f"axis={given!r}: the source has no axis {axis!r}, but {self}. Its axes are "
                f"integers{' or names' if self._names else '; their names are unknown'}."
            )
        return place % count

    def axes_of(self, rows: int) -> str:
        """Return the argument `axis` for consecutive axes that have `rows` rows, or ""."""
        ends = combinations(range(len(self._shape) + 1), 2)
        for first, last in sorted(ends, key=lambda ends: self.sample_axis in range(*ends)):
            if prod(self._shape[first:last]) == rows:
                return f"axis={self._names[first:last] or tuple(range(first, last))}"
        return ""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_array": None, "_lock": None, "_kept": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._enter_process()

    def _enter_process(self) -> None:
        # after a fork, a thread of the parent may have held the lock
        self._pid, self._lock = os.getpid(), threading.Lock()
        self._array: tuple[Any, Any] | None = None
        self._kept: tuple[int, tuple[_Request, ...], Array] | None = None

    def _get(self) -> Any:
        if self._pid != os.getpid():
            if not self._reopens and not self._is_in_memory:
                raise ArgumentError(
                    "a forked process must not use an open file of its parent. Pass Rows a path, "
                    "or a function that opens the array, such as lambda: zarr.open_array(path)."
                )
            self._enter_process()
        if self._array is None:
            source = self._source() if self._reopens else self._source
            # SciPy closes a file that is dropped
            self._array = selected(source, self._variable), source
        return self._array[0]

    def close(self) -> None:
        """Drop an array that a function opened; the next read opens it again."""
        self._kept = self._array = None

    def requests(self, ids: Array) -> tuple[_Request, ...]:
        """Return the requests that read rows, ascending and each once: no chunk is in two."""
        if len(ids) == 0:
            return ()
        grid, chunks = self._grid[:, None], self._chunks[:, None]
        places = np.stack(np.unravel_index(ids, self._grid.tolist()))
        number = np.ravel_multi_index([*(places // chunks)], self._cut.tolist())
        order, gap = np.argsort(number, kind="stable"), 1
        if not self._is_chunked:
            gap = max(1, _GAP // max(1, self._row_bytes))
        chunk_bytes = prod(self._chunks.tolist()) * self.together * self._row_bytes
        per_request = max(1, _REQUEST // max(1, chunk_bytes))
        number = number[order]
        is_new = (np.diff(number) > gap) | (np.diff(number // per_request) > 0)
        if self._is_chunked:  # the box of two rows of chunks would hold chunks that are not needed
            inner = next((n for n in self._cut[::-1].tolist() if n > 1), 1)
            is_new |= np.diff(number // inner) > 0
        cuts = [] if self._is_in_memory else (np.flatnonzero(is_new) + 1).tolist()
        found = []
        for start, stop in pairwise([0, *cuts, len(ids)]):
            members = np.sort(order[start:stop])
            own = places[:, members]
            first, last = own.min(1, keepdims=True), own.max(1, keepdims=True) + 1
            box = tuple(slice(*ends) for ends in np.hstack([first, last]).tolist())
            is_full = prod((last - first).ravel().tolist()) == len(members)
            read = np.minimum(-(-last // chunks) * chunks, grid) - first // chunks * chunks
            touched = len(ids) if self._is_in_memory else prod(read.ravel().tolist())
            is_run = members[-1] - members[0] + 1 == len(members)
            result = slice(int(members[0]), int(members[-1]) + 1) if is_run else members
            places_in_box = None if is_full else (*(own - first),)
            found.append(_Request(box, len(members), result, places_in_box, touched))
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
        count = sum(each.rows for each in requests)
        out = np.empty((samples.stop - samples.start, count, *self.shape[2:]), self._stored)
        try:
            for each in requests:
                out[:, each.result] = self._block(samples, each)
        except Exception as error:  # of a damaged chunk, by the library that decodes it
            error.add_note(f"graph.Rows: sample {samples.start} cannot be read.")
            raise
        return self._packing.unpacked(out)

    def _block(self, samples: slice, request: _Request) -> Array:
        """Return the rows of one request, (t, rows, *F)."""
        index: list[Any] = [slice(None)] * len(self._shape)
        axes, first = [*self.axes], self.sample_axis
        for axis, part in zip(axes, request.box, strict=True):
            index[axis] = part
        if first is not None:
            index[first] = samples
        block = self._get()[tuple(index)]
        if isinstance(block, np.ma.MaskedArray):  # of netCDF4
            if np.ma.is_masked(block) and block.dtype.kind not in "fc":
                raise ArgumentError(
                    "integers have missing values. Read them as raw numbers: call "
                    "variable.set_auto_mask(False)."
                )
            block = block.filled(np.nan) if np.ma.is_masked(block) else block.data
        block = np.asarray(block)
        if first is None:
            block, axes, first = block[None], [axis + 1 for axis in axes], 0
        block = np.moveaxis(block, [first, *axes], range(len(axes) + 1))
        if request.selected is None:
            return block.reshape(len(block), request.rows, *self.shape[2:])
        rows: Array = block[(slice(None), *cast("Any", request.selected))]
        return rows
