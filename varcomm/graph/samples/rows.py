"""``Rows``: samples of an array of which each rank reads the rows of its nodes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Subset, get_worker_info

from varcomm.errors import ArgumentError, at_least, exact_int
from varcomm.graph.edge_shard import EdgeShard
from varcomm.graph.node_shard import NodeShard, described
from varcomm.graph.partitioned_graph import EdgeType, NodeType, PartitionedGraph
from varcomm.graph.samples.stored_array import StoredArray
from varcomm.ops.digest import digest, require_equal
from varcomm.plan.checks import checked_index
from varcomm.transport.agreement import agree, agree_and_share, compare, debugging
from varcomm.transport.group import Group

_WHAT = "graph.Rows"


class Rows(Dataset[torch.Tensor]):
    """Samples of a stored array; each rank reads the rows of its nodes.

    ``rows[t]`` is a tensor (n, *F), the owned rows of sample t in the order of local ids. A dataset
    for :class:`torch.utils.data.DataLoader`, whose batches are (B, n, *F). The constructor is
    collective, and an error on one rank is raised on all ranks. Reading is not collective.

    Each rank reads the chunks that hold its rows, each chunk once per sample. One request reads
    neighbouring chunks. A chunk of several samples is read once for consecutive samples. To keep
    chunks on one rank, see the argument `chunk` of :func:`partition`.

    Communication: the constructor sends a description of a few hundred bytes per rank, and the
    halo's entries of `rows`. Reading sends nothing.

    In one process: ``torch.from_numpy(array[t])``.

    Parameters
    ----------
    source : array, path or callable
        An array of shape (T, N, *F) with ``shape`` and slices, such as ``numpy.memmap``, a
        zarr.Array, an h5py.Dataset, an xarray.DataArray, or a TensorStore. Or the path of a NetCDF,
        HDF5, zarr or ``.npy`` file, or a function without arguments that opens the array.
    graph : PartitionedGraph
        The graph whose nodes the rows belong to.
    node_type : str, optional
        The type of nodes, in a graph with several types.
    halo : {"read"}, optional
        Also read the rows of the halo, (n + h, *F). By default, only owned rows are returned;
        ``graph.with_halo(rows[t])`` exchanges the halo.
    edge_type : tuple of str, optional
        The type of edges that has the halo, in a graph with several types.
    variable : str, optional
        The name of the array, if `source` holds several.
    axis : int, str, or sequence of int or str
        The axis of the rows, such as -1 for (T, C, N). Several axes are a grid:
        ``("lat", "lon")`` or ``(1, 2)`` for (T, lat, lon); the node of a grid point is
        ``lat * len(lon) + lon``. Names come from NetCDF, xarray, zarr or HDF5.
    sample_axis : int or str, optional
        The axis that counts samples. None, or an axis of the rows, means one sample, such as a
        field without time.
    rows : torch.Tensor, optional
        The row of the source for each owned node, (n,), of integers. By default, the ids of the
        nodes. Pass `rows` if the source has additional rows, such as cells of land, or another
        order.
    dtype : torch.dtype, optional
        The dtype of the tensors; None keeps the dtype of the source.

    Attributes
    ----------
    shape : tuple of int
        (T, N, *F), as if one rank read all rows.
    chunk : int
        Rows that are stored together, for :func:`partition`; 1 if each row can be read alone, or
        if one chunk holds all rows.
    bytes_read : int
        Uncompressed bytes of the chunks that this process has read.

    Raises
    ------
    ArgumentError
        On every rank, if a source cannot be read or does not hold numbers, or if `rows` is invalid.
        Without `rows`, it is also raised if the source does not have one row per node of the graph.
    DisagreementError
        On every rank, if the sources of ranks have different shapes or dtypes.

    See Also
    --------
    RowWriter : Write samples from shards.
    partition : The argument `chunk` keeps chunks together.

    Notes
    -----
    Values are unpacked by the CF conventions: ``scale_factor`` and ``add_offset`` are applied, and
    values equal to ``_FillValue`` or ``missing_value`` become NaN.

    A worker process of a DataLoader opens a path again, or calls the function `source`, and returns
    tensors on the CPU. Elsewhere tensors are on the device of the graph. A forked process refuses
    an array that its parent opened, except a NumPy array.

    Examples
    --------
    >>> import numpy, torch, varcomm
    >>> from torch_geometric.data import Data
    >>> def fn(rank):
    ...     edge_index = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    ...     ring = Data(edge_index=edge_index, num_nodes=4)
    ...     graph = varcomm.graph.partition(ring, method="block")
    ...     rows = varcomm.graph.Rows(numpy.arange(8).reshape(2, 4), graph)
    ...     return [x.tolist() for x in rows.samples([1, 0])], rows.bytes_read
    >>> varcomm.launch(fn, 2)
    [([[4, 5], [0, 1]], 32), ([[6, 7], [2, 3]], 32)]
    """

    def __init__(
        self,
        source: Any,
        graph: PartitionedGraph,
        *,
        node_type: NodeType = None,
        halo: Literal["read"] | None = None,
        edge_type: EdgeType = None,
        variable: str | None = None,
        axis: int | str | Sequence[int | str] = 1,
        sample_axis: int | str | None = 0,
        rows: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not isinstance(graph, PartitionedGraph):
            raise ArgumentError(f"graph must be a PartitionedGraph; got {described(graph)}.")
        self._group: Group | None = graph.group
        self.bytes_read = 0

        def check() -> tuple[NodeShard, EdgeShard | None]:
            shard = shard_of(graph, node_type if edge_type is None else edge_type[0])
            if halo not in (None, "read"):
                raise ArgumentError(
                    f'halo must be "read" or None; got {halo!r}. graph.with_halo(rows[t]) '
                    "exchanges the halo."
                )
            if halo and edge_type not in graph.edge_shards:
                raise ArgumentError(f"edge_type must be one of {graph.edge_types}.")
            self._array = StoredArray(source, variable, axis, sample_axis)
            self._row = self._array.row if dtype is None else self._array.row.to(dtype)
            samples, stored = self._array.shape[:2]
            if rows is not None:
                chosen = checked_index(rows, stored, "rows", "rows of the source")
                if len(chosen) != shard.num_owned:
                    raise ArgumentError(
                        f"rows must have the row of each of the {shard.num_owned} owned nodes; "
                        f"got {len(chosen)}."
                    )
            elif stored != shard.sizes.total:
                nodes = shard.sizes.total
                raise ArgumentError(
                    f"the source has {self._array} and {stored} rows along axis={axis!r}, and the "
                    f"graph has {nodes} nodes. Pass {self._array.axes_of(nodes) or 'their axis'}, "
                    "another source, or rows=."
                )
            self.shape: tuple[int, ...] = (samples, shard.sizes.total, *self._row.shape[1:])
            return shard, graph.edge_shards[edge_type] if halo else None

        def outline(_: object) -> dict[str, object]:
            return {
                "shape": list(self.shape),
                "rows of the source": self._array.shape[1],
                "variable": variable,
                "axis": list(self._array.axes),
                "sample_axis": self._array.sample_axis,
                "rows=": rows is not None,
                "dtype": str(self._row.dtype),
                "halo": halo,
            }

        (shard, edges), outlines = agree_and_share(_WHAT, check, outline, graph.group)
        require_equal(_WHAT, outlines)
        # a chunk of all rows must not place all nodes on one rank
        is_cut = rows is None and self._array.chunk < self._array.shape[1]
        self.chunk = self._array.chunk if is_cut else 1
        self._device = shard.ids.device
        ids = shard.owned_ids if rows is None else rows.to(self._device, torch.int64)
        if edges is not None:
            ids = torch.cat([ids, edges.halo_ids if rows is None else edges.halo(ids)])
        needed, order = ids.cpu().unique(return_inverse=True)
        is_ordered = bool((order == torch.arange(len(order))).all())
        self._order, self._count = None if is_ordered else order, len(ids)
        self._requests = self._array.requests(needed.numpy())

    def __len__(self) -> int:
        """Return the number of samples, T."""
        return self.shape[0]

    def __getitem__(self, sample: int | slice) -> torch.Tensor:
        """Return this rank's rows of a sample, (n, *F), or of a slice of samples, (k, n, *F)."""
        if isinstance(sample, slice):
            chosen = range(*sample.indices(len(self)))
            if not chosen:
                return self._row.new_empty(0, self._count, *self.shape[2:])
            return torch.stack([self[i] for i in chosen])
        return self._delivered(self._read(sample))

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Iterate over all samples in order; see :meth:`samples`."""
        return self.samples()

    def samples(
        self, order: Iterable[int] | None = None, *, ahead: int = 2
    ) -> Iterator[torch.Tensor]:
        """Iterate over samples, which a thread reads ahead.

        Every rank passes the same order; :func:`varcomm.debug` compares it. An error of the thread
        is raised here. The thread ends with the iterator: at the last sample, at an error, or if
        the iterator is closed or dropped.

        Parameters
        ----------
        order : iterable of int, optional
            Samples to read, which may repeat; None means all of them in order.
        ahead : int
            Samples that may be read ahead and kept in memory.

        Yields
        ------
        torch.Tensor
            This rank's rows of each sample, as ``rows[t]``.
        """
        ahead = at_least(1, ahead, "ahead")
        return self._samples(range(len(self)) if order is None else order, ahead)

    def _samples(self, order: Iterable[int], ahead: int) -> Iterator[torch.Tensor]:
        pending: deque[tuple[int, Future[torch.Tensor]]] = deque()
        thread = ThreadPoolExecutor(1, "varcomm.graph.Rows")

        def first() -> torch.Tensor:
            sample, future = pending.popleft()
            if debugging() and self._group is not None:
                compare(self._group, {"operation": _WHAT, "sample": sample})
            return self._delivered(future.result())

        try:
            for sample in order:
                pending.append((sample, thread.submit(self._read, sample)))
                if len(pending) > ahead:
                    yield first()
            while pending:
                yield first()
        finally:
            thread.shutdown(wait=True, cancel_futures=True)

    def loader(
        self,
        batch_size: int = 1,
        samples: Sequence[int] | None = None,
        *,
        shuffle: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> DataLoader[torch.Tensor]:
        """Return a DataLoader that draws the same samples on every rank; collective.

        All ranks of the graph compute on the same samples, so a DistributedSampler is refused,
        because its samples differ between ranks. For several graphs in data parallelism, pass each
        group its own `samples`.

        Parameters
        ----------
        batch_size : int
            Samples per batch; a batch is (B, n, *F).
        samples : sequence of int, optional
            The samples to draw from, such as those for training; None means all.
        shuffle : bool
            Draw in a random order, which differs in each epoch.
        seed : int
            Seed of the orders of all epochs.
        **options
            Passed to :class:`torch.utils.data.DataLoader`, such as `num_workers`.

        Raises
        ------
        ArgumentError
            On every rank, for an invalid batch size or seed, a sampler, a generator, or a sample
            out of range.
        DisagreementError
            On every rank, if arguments differ across ranks.
        """
        what = f"{_WHAT}.loader"
        if self._group is None:
            raise ArgumentError(f"{what}: call it in the process that made the Rows.")

        def check() -> list[int]:
            at_least(1, batch_size, "batch_size")
            if exact_int(seed) is None:
                raise ArgumentError(f"seed must be an integer; got {seed!r}.")
            for name in ("sampler", "batch_sampler", "generator"):
                if options.get(name) is not None:
                    raise ArgumentError(
                        f"{name} would draw other samples on each rank. Use shuffle= and seed=, "
                        "or pass samples= in an order of your own."
                    )
            return [self._checked(i) for i in (range(len(self)) if samples is None else samples)]

        chosen = agree(what, check, self._group)
        same = {"batch_size": batch_size, "shuffle": shuffle, "seed": seed}
        drawn = {"samples": digest(np.array(chosen)), "drop_last": options.get("drop_last")}
        compare(self._group, {"operation": what, **same, **drawn})
        generator = torch.Generator().manual_seed(seed)
        subset = Subset(self, chosen)
        return DataLoader(subset, batch_size, shuffle, generator=generator, **options)

    def close(self) -> None:
        """Drop an array that the function `source` opened; a later read opens it again."""
        self._array.close()

    def _checked(self, sample: Any) -> int:
        exact = exact_int(sample)
        if exact is None:
            raise ArgumentError(f"{_WHAT}: a sample must be an integer; got {sample!r}.")
        if not -len(self) <= exact < len(self):
            raise IndexError(f"{_WHAT}: sample {exact} is out of range for {len(self)} samples.")
        return exact % len(self)

    def _read(self, sample: int) -> torch.Tensor:
        """Return the rows of a sample on the CPU; in any thread or process."""
        values, touched = self._array.read(self._checked(sample), self._requests)
        self.bytes_read += touched
        rows = torch.from_numpy(values).to(self._row.dtype)
        rows = rows if self._order is None else rows[self._order]
        is_here = self._device.type == "cuda" and get_worker_info() is None
        return rows.pin_memory() if is_here else rows

    def _delivered(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows on the graph's device; workers of a DataLoader return them on the CPU."""
        return rows if get_worker_info() else rows.to(self._device, non_blocking=True)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_group": None}


def shard_of(graph: PartitionedGraph, node_type: NodeType) -> NodeShard:
    """Return the nodes of a type, or raise ArgumentError."""
    if node_type not in graph.node_shards:
        raise ArgumentError(f"node_type must be one of {graph.node_types}; got {node_type!r}.")
    return graph.node_shards[node_type]
