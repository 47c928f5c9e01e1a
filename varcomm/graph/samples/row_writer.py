"""``RowWriter``: samples written from shards, without a rank that holds all rows."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from varcomm.errors import ArgumentError, at_least, exact_int
from varcomm.graph.directory import Directory
from varcomm.graph.libraries import package, writing
from varcomm.graph.node_shard import NodeShard, described
from varcomm.graph.partitioned_graph import NodeType, PartitionedGraph
from varcomm.graph.samples.rows import shard_of
from varcomm.graph.samples.sources import Array
from varcomm.ops.digest import require_equal
from varcomm.sizes import ShardSizes
from varcomm.transport.agreement import agree, agree_and_share, share

__all__ = ["RowWriter"]

_WHAT = "graph.RowWriter"
_CHUNK = 1 << 20  # bytes of a chunk, if the caller does not choose its rows


class RowWriter:
    """Write a file of samples, to which each rank passes the rows of its nodes; collective.

    One exchange per sample moves rows, so that each chunk is written by one rank. A block partition
    moves at most the rows of the chunks at its borders. For other partitions, each rank writes an
    equal share of the chunks, so a rank holds its own rows and 1/P of all rows.

    The file has its name once :meth:`close` has returned on every rank; until then it is
    ``<path>.part``. All methods are collective, and an error on one rank is raised on all ranks.

    An exception of your own code inside the ``with`` block ends the block without communication,
    and the file stays ``<path>.part``. If the exception ends the process of a rank, the next call
    on the other ranks raises CommunicationError, which names the exception. If the rank catches the
    exception and continues, the other ranks wait for the timeout of the group, or for the timeout
    of :func:`varcomm.debug`.

    Communication: per sample, the rows whose chunks another rank writes, and two small messages per
    rank to agree on errors.

    In one process: ``array[sample] = x``.

    Parameters
    ----------
    path : path
        A new file, on a file system that all ranks share. The suffix decides its format: ``.zarr``
        (zarr v3), ``.h5`` or ``.hdf5`` (HDF5), ``.nc`` (NetCDF-4) or ``.npy``.
    graph : PartitionedGraph
        The graph whose nodes the rows belong to.
    samples : int
        Number of samples, T.
    features : sequence of int
        Dimensions of a row: ``(C,)`` for an array T x N x C, ``()`` for T x N.
    dtype : torch.dtype
        The dtype of the file and of all tensors.
    variable : str
        The name of the array in the file; ``.npy`` has none.
    node_type : str, optional
        The type of nodes, in a graph with several types.
    chunk : int, optional
        Rows per chunk, for zarr; the other formats are contiguous. By default, chunks have about 1
        MiB.
    shard : int, optional
        Rows per shard file, for zarr, a multiple of `chunk`. By default, each chunk is a file.

    Raises
    ------
    ArgumentError
        On every rank, if the path exists or cannot be written, or an argument is invalid.
    DisagreementError
        On every rank, if arguments differ across ranks.
    MissingPackageError
        On every rank, if zarr or h5py is needed and not installed.

    See Also
    --------
    Rows : Read samples in the same way.
    Mesh.write : Write a mesh with the rows that :meth:`PartitionedGraph.gather` collected.

    Examples
    --------
    >>> import tempfile, numpy, torch, varcomm
    >>> from torch_geometric.data import Data
    >>> def fn(rank, path):
    ...     edge_index = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    ...     ring = Data(edge_index=edge_index, num_nodes=4)
    ...     graph = varcomm.graph.partition(ring, method="block")
    ...     with varcomm.graph.RowWriter(path, graph, samples=2, dtype=torch.int64) as out:
    ...         out.write(0, graph.owned_ids)
    ...         out.write(1, graph.owned_ids * 10)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = varcomm.launch(fn, 2, f"{folder}/out.npy")
    ...     print(numpy.load(f"{folder}/out.npy"))
    [[ 0  1  2  3]
     [ 0 10 20 30]]
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        graph: PartitionedGraph,
        samples: int,
        features: Sequence[int] = (),
        dtype: torch.dtype = torch.float32,
        *,
        variable: str = "values",
        node_type: NodeType = None,
        chunk: int | None = None,
        shard: int | None = None,
    ) -> None:
        if not isinstance(graph, PartitionedGraph):
            raise ArgumentError(f"graph must be a PartitionedGraph; got {described(graph)}.")
        self._group = graph.group
        self.bytes_written = 0
        self._written: set[int] = set()
        self._closed = False

        def check() -> NodeShard:
            nodes = shard_of(graph, node_type)
            self.path = Path(path)
            if self.path.suffix not in _FORMATS:
                raise ArgumentError(f"path must end in one of {', '.join(_FORMATS)}; got {path}.")
            row = tuple(at_least(0, size, "features") for size in features)
            self.shape = (at_least(0, samples, "samples"), nodes.sizes.total, *row)
            self.dtype = _checked_dtype(dtype, self.path.suffix)
            self._row = torch.empty(0, *row, dtype=dtype)
            self._unit = self._chunk = 1
            if self.path.suffix == ".zarr":
                row_bytes = max(1, self.dtype.itemsize * prod(row))
                known = min(max(1, nodes.sizes.total), max(1, _CHUNK // row_bytes))
                self._chunk = known if chunk is None else at_least(1, chunk, "chunk")
                self._unit = self._chunk if shard is None else at_least(1, shard, "shard")
                if self._unit % self._chunk:
                    raise ArgumentError(f"shard={shard} is not a multiple of chunk={self._chunk}.")
            elif chunk is not None or shard is not None:
                raise ArgumentError("chunk and shard are for zarr; the other formats have none.")
            return nodes

        def outline(nodes: NodeShard) -> dict[str, object]:
            return {
                "path": self.path.name,
                "shape": list(self.shape),
                "dtype": str(self.dtype),
                "variable": variable,
                "node_type": node_type,
                "chunk": self._chunk,
                "shard": self._unit,
            }

        nodes, outlines = agree_and_share(_WHAT, check, outline, self._group)
        require_equal(_WHAT, outlines)
        self._part = self.path.with_name(f"{self.path.name}.part")
        self._first, self._last = self._range(nodes)
        self._device = nodes.ids.device
        ids = torch.arange(self._first, self._last, device=self._device)
        directory = Directory.of(nodes.owned_ids, nodes.sizes, self._group)
        self._plan, self._place = directory.fetching(ids)
        create = _FORMATS[self.path.suffix]

        def first() -> int | None:
            if self._group.rank != 0:
                return None
            if self.path.exists():
                raise ArgumentError(f"{self.path} exists. Remove it, or choose another path.")
            with writing(self._part):
                _remove(self._part)
                return create(self._part, variable, self.shape, self.dtype, self._chunk, self._unit)

        offsets = share(_WHAT, first, self._group)

        def attach() -> _Flat | _Zarr:
            with writing(self._part):
                if self.path.suffix == ".zarr":
                    return _Zarr(self._part, variable)
                return _Flat(self._part, offsets[0], self.shape[1])

        self._target: _Flat | _Zarr = agree(_WHAT, attach, self._group)

    def _range(self, nodes: NodeShard) -> tuple[int, int]:
        """Return the rows that this rank writes, from the first to behind the last; collective.

        Every rank writes a range of chunks: near its own rows, if these are a block of ids.
        """
        ids, start, rank = nodes.owned_ids, nodes.sizes.offsets[self._group.rank], self._group.rank

        def is_block() -> bool:
            return len(ids) == 0 or int(ids[0]) == start == int(ids[-1]) + 1 - len(ids)

        total, unit = nodes.sizes.total, self._unit
        if all(share(_WHAT, is_block, self._group)):
            cuts = [(offset + unit // 2) // unit * unit for offset in nodes.sizes.offsets]
        else:
            balanced = ShardSizes.balanced(-(-total // unit), self._group.size)
            cuts = [offset * unit for offset in balanced.offsets]
        cuts = [min(cut, total) for cut in cuts] + [total]
        return cuts[rank], cuts[rank + 1]

    def write(self, sample: int, x: torch.Tensor) -> None:
        """Write this rank's rows of a sample, (n, *F) in the order of local ids; collective.

        No gradient flows through a file.
        Communication: rows whose chunks another rank writes.

        Parameters
        ----------
        sample : int
            The sample, 0 ... T - 1; writing it again replaces it.
        x : torch.Tensor
            The owned rows, in the dtype of the file, on the device of the graph.
        """
        what = f"{_WHAT}.write"

        def check() -> int:
            self._check_open()
            exact = exact_int(sample)
            if exact is None or not 0 <= exact < self.shape[0]:
                raise ArgumentError(f"sample must be in 0...{self.shape[0] - 1}; got {sample!r}.")
            expected = (self._plan.num_rows, *self._row.shape[1:])
            if not isinstance(x, torch.Tensor) or (x.shape, x.dtype) != (expected, self._row.dtype):
                raise ArgumentError(
                    f"x must be a tensor of {self._row.dtype} and shape {expected}; got "
                    f"{described(x)}. Pass the owned rows, without the halo."
                )
            if x.device != self._device:
                raise ArgumentError(
                    f"x must be on {self._device}, the device of the graph; got {x.device}. Call "
                    f"x.to({str(self._device)!r})."
                )
            return exact

        exact, of_ranks = agree_and_share(what, check, lambda own: {"sample": own}, self._group)
        require_equal(what, of_ranks)
        rows = self._plan(x.detach())[self._place].cpu().numpy()

        def store() -> None:
            with writing(self._part):
                if rows.size:
                    self._target.store(exact, self._first, np.ascontiguousarray(rows))

        agree(what, store, self._group)
        self.bytes_written += rows.nbytes
        self._written.add(exact)

    def close(self) -> None:
        """Rename the file to its final name, after all samples are written; collective."""
        if self._closed:
            return
        what = f"{_WHAT}.close"

        def finish() -> None:
            missing = sorted(set(range(self.shape[0])) - self._written)
            if missing:
                raise ArgumentError(
                    f"{len(missing)} of {self.shape[0]} samples were not written, such as "
                    f"{missing[0]}; the file stays {self._part}."
                )
            with writing(self._part):
                self._target.close()

        def rename() -> None:
            if self._group.rank == 0:
                with writing(self.path):
                    self._part.rename(self.path)

        agree(what, finish, self._group)
        agree(what, rename, self._group)
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise ArgumentError(f"{self.path} is complete, and the writer is closed.")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._target.close()  # without communication: other ranks may not come


class _Flat:
    """An array that lies end to end from an offset of a file; ranks write disjoint bytes."""

    def __init__(self, path: Path, offset: int | None, rows: int) -> None:
        self._file = path.open("r+b", buffering=0)
        self._offset, self._rows = offset or 0, rows

    def store(self, sample: int, first: int, rows: Array) -> None:
        at = self._offset + (sample * self._rows + first) * (rows.nbytes // len(rows))
        data = memoryview(rows.reshape(-1).view(np.uint8).data)
        while data:  # the system may write a part
            done = os.pwrite(self._file.fileno(), data, at)
            data, at = data[done:], at + done

    def close(self) -> None:
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()


class _Zarr:
    """A zarr array in a group; ranks write disjoint chunks."""

    def __init__(self, path: Path, variable: str) -> None:
        self._array = package("zarr", str(path)).open_group(path, mode="r+")[variable]

    def store(self, sample: int, first: int, rows: Array) -> None:
        self._array[sample, first : first + len(rows)] = rows

    def close(self) -> None:
        pass


def _create_npy(path: Path, _: str, shape: tuple[int, ...], dtype: np.dtype[Any], *__: int) -> int:
    # a memory map of no bytes is an error
    with path.open("wb") as file:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False}
        np.lib.format.write_array_header_2_0(file, header | {"shape": shape})
        offset = file.tell()
        file.truncate(offset + prod(shape) * dtype.itemsize)
    return offset


def _create_hdf5(
    path: Path, variable: str, shape: tuple[int, ...], dtype: np.dtype[Any], *_: int
) -> int | None:
    h5py = package("h5py", str(path))
    layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    layout.set_layout(h5py.h5d.CONTIGUOUS)
    layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    with h5py.File(path, "w") as file:
        array = file.create_dataset(variable, shape, dtype, dcpl=layout)
        if ".nc" in path.suffixes:
            for i, (name, size) in enumerate(zip(_dimensions(shape), shape, strict=True)):
                scale = file.create_dataset(name, (size,), np.float32)
                scale.make_scale(f"This is a netCDF dimension but not a netCDF variable.{size:10}")
                scale.attrs["_Netcdf4Dimid"] = np.int32(i)
                array.dims[i].attach_scale(scale)
        offset: int | None = array.id.get_offset()
    return offset


def _create_zarr(
    path: Path, variable: str, shape: tuple[int, ...], dtype: np.dtype[Any], chunk: int, shard: int
) -> None:
    features = [max(1, size) for size in shape[2:]]
    package("zarr", str(path)).open_group(path, mode="w").create_array(
        variable,
        shape=shape,
        dtype=dtype,
        chunks=(1, chunk, *features),
        shards=None if shard == chunk else (1, shard, *features),
        fill_value=np.nan if dtype.kind in "fc" else 0,
        dimension_names=_dimensions(shape),
    )


def _dimensions(shape: tuple[int, ...]) -> list[str]:
    return ["sample", "row", *(f"feature_{i}" for i in range(len(shape) - 2))]


_FORMATS: dict[str, Callable[..., int | None]] = {
    ".zarr": _create_zarr,
    ".h5": _create_hdf5,
    ".hdf5": _create_hdf5,
    ".nc": _create_hdf5,
    ".npy": _create_npy,
}


def _checked_dtype(dtype: Any, suffix: str) -> np.dtype[Any]:
    try:
        found = torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError:
        raise ArgumentError(f"dtype={dtype} has no counterpart in files. Use float32.") from None
    if suffix == ".nc" and (found.kind not in "iuf" or found == np.float16):
        raise ArgumentError(f"dtype={dtype} does not exist in NetCDF. Use another one, or .h5.")
    return found


def _remove(part: Path) -> None:
    """Remove what an interrupted writer has left."""
    if (part / "zarr.json").exists():
        shutil.rmtree(part)
    part.unlink(missing_ok=True)
