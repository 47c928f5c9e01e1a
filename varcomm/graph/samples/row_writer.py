"""``RowWriter``: samples written from shards, without a rank that holds all rows."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
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
from varcomm.graph.samples.array_formats import Array
from varcomm.graph.samples.rows import shard_of
from varcomm.ops.digest import require_equal
from varcomm.sizes import ShardSizes
from varcomm.transport.agreement import agree, agree_and_share, share
from varcomm.transport.auxiliary_group import free_lanes, take_lane
from varcomm.transport.group import Group

_WHAT = "graph.RowWriter"
_CHUNK = 1 << 20  # bytes of a chunk, if the caller does not choose its rows


class RowWriter:
    """Write a file of samples, to which each rank passes the rows of its nodes; collective.

    One exchange per sample moves rows, so that each chunk is written by one rank. A block partition
    moves the rows of the chunks at its borders. For other partitions, each rank writes 1/P of the
    chunks.

    The file has its name once :meth:`close` has returned on every rank; until then it is
    ``<path>.part``. All methods are collective, and an error on one rank is raised on all ranks.
    An exception of your own code ends the ``with`` block without communication; the other ranks
    then raise CommunicationError in their next call of the writer, also if you catch it.

    Communication: per sample, the rows whose chunks another rank writes, and two small messages per
    rank to agree on errors.

    In one process: ``array[sample] = x``.

    Parameters
    ----------
    path : path
        A new file, on a file system that all ranks share. The suffix decides its format: ``.zarr``
        (zarr v3) or ``.npy``.
    graph : PartitionedGraph
        The graph whose nodes the rows belong to.
    samples : int
        Number of samples, T.
    features : sequence of int
        Dimensions of a row: ``(C,)`` for an array T x N x C, ``()`` for T x N.
    dtype : torch.dtype
        The dtype of the file and of all tensors.
    variable : str
        The name of the array in the zarr group.
    node_type : str, optional
        The type of nodes, in a graph with several types.
    chunk : int, optional
        Rows per chunk, for zarr. By default, chunks have about 1 MiB.
    shard : int, optional
        Rows per shard file, for zarr, a multiple of `chunk`. By default, each chunk is a file.

    Raises
    ------
    ArgumentError
        On every rank, if the path exists or cannot be written, or an argument is invalid.
    DisagreementError
        On every rank, if arguments differ across ranks.
    MissingPackageError
        On every rank, if zarr is needed and not installed.

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
        self._group, self._closed, self.bytes_written = graph.group, False, 0
        self._written: set[int] = set()

        def check() -> NodeShard:
            nodes = shard_of(graph, node_type)
            self.path = Path(path)
            if self.path.suffix not in (".zarr", ".npy"):
                raise ArgumentError(f"path must end in .zarr or .npy; got {path}.")
            row = tuple(at_least(0, size, "features") for size in features)
            self.shape = (at_least(0, samples, "samples"), nodes.sizes.total, *row)
            try:
                self._row = torch.empty(0, *row, dtype=dtype)
                self.dtype = self._row.numpy().dtype
            except TypeError:
                raise ArgumentError(
                    f"dtype={dtype} has no counterpart in files. Use float32."
                ) from None
            self._chunks = self._unit = 1
            if self.path.suffix == ".zarr":
                default = _CHUNK // max(1, self.dtype.itemsize * prod(row))
                default = min(max(1, nodes.sizes.total), max(1, default))
                self._chunks = default if chunk is None else at_least(1, chunk, "chunk")
                self._unit = self._chunks if shard is None else at_least(1, shard, "shard")
                if self._unit % self._chunks:
                    raise ArgumentError(f"shard={shard} is not a multiple of chunk={self._chunks}.")
            elif chunk is not None or shard is not None:
                raise ArgumentError("chunk and shard are for zarr; .npy has none.")
            return nodes

        def outline(_: NodeShard) -> dict[str, object]:
            return {
                "path": self.path.name,
                "shape": list(self.shape),
                "dtype": str(self.dtype),
                "variable": variable,
                "node_type": node_type,
                "chunk": self._chunks,
                "shard": self._unit,
            }

        nodes, outlines = agree_and_share(_WHAT, check, outline, self._group)
        require_equal(_WHAT, outlines)
        self._part = self.path.with_name(f"{self.path.name}.part")
        self._first, self._last = self._range(nodes)
        self._device = nodes.ids.device
        ids = torch.arange(self._first, self._last, device=self._device)
        directory = Directory.of(nodes.owned_ids, nodes.sizes, self._group)
        self._plan, self._order = directory.fetching(ids)

        def create() -> None:
            if self._group.rank == 0:
                if self.path.exists():
                    raise ArgumentError(f"{self.path} exists. Remove it, or choose another path.")
                with writing(self._part):
                    self._create(variable)

        def attach() -> Any:
            if self.path.suffix == ".npy":
                return None
            with writing(self._part):
                return package("zarr", str(path)).open_group(self._part, mode="r+")[variable]

        def lanes(_: Any) -> dict[str, Any]:
            return free_lanes(self._group)

        agree(_WHAT, create, self._group)
        self._array, offers = agree_and_share(_WHAT, attach, lanes, self._group)
        # a group of the writer alone, which a rank can leave
        self._lane = take_lane(self._group, offers)

    def _create(self, variable: str) -> None:
        """Make an empty array, in place of one that an interrupted writer has left."""
        if (self._part / "zarr.json").exists():
            shutil.rmtree(self._part)
        self._part.unlink(missing_ok=True)
        if self.path.suffix == ".npy":
            np.lib.format.open_memmap(self._part, "w+", self.dtype, self.shape)
            return
        features = [max(1, size) for size in self.shape[2:]]
        package("zarr", str(self.path)).open_group(self._part, mode="w").create_array(
            variable,
            shape=self.shape,
            dtype=self.dtype,
            chunks=(1, self._chunks, *features),
            shards=None if self._unit == self._chunks else (1, self._unit, *features),
            fill_value=np.nan if self.dtype.kind in "fc" else 0,
            dimension_names=["sample", "row", *(f"feature_{i}" for i in range(len(features)))],
        )

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
            if self._closed:
                raise ArgumentError(f"{self.path} is complete, and the writer is closed.")
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

        exact, of_ranks = agree_and_share(what, check, lambda own: {"sample": own}, self._own())
        require_equal(what, of_ranks)
        rows = self._plan(x.detach())[self._order].cpu().numpy()

        def store() -> None:
            if rows.size:
                with writing(self._part):
                    self._store(exact, rows)

        agree(what, store, self._own())
        self.bytes_written += rows.nbytes
        self._written.add(exact)

    def _store(self, sample: int, rows: Array) -> None:
        if self._array is not None:
            self._array[sample, self._first : self._last] = rows
            return
        # no memory map: on a network file system, ranks would write whole pages
        with self._part.open("r+b") as file:
            behind = (self.shape[0] - sample) * self.shape[1] - self._first
            file.seek(-behind * self.dtype.itemsize * prod(self.shape[2:]), os.SEEK_END)
            rows.tofile(file)

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
            if self._array is None:
                with writing(self._part), self._part.open("r+b") as file:
                    os.fsync(file.fileno())

        def rename() -> None:
            if self._group.rank == 0:
                with writing(self.path):
                    self._part.rename(self.path)

        agree(what, finish, self._own())
        agree(what, rename, self._own())
        self._closed = True
        if self._lane is not None:
            self._lane.give_back()

    def _own(self) -> Group:
        return self._group if self._lane is None else self._lane.group()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, BaseException):
            self.close()
        elif self._lane is not None:
            self._lane.leave(error, f"a block of {_WHAT}")
