"""``MeshWriter``: results on a mesh, written by every rank for the nodes that it owns."""

from __future__ import annotations

import io
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from varcomm.errors import ArgumentError
from varcomm.graph.libraries import writing
from varcomm.graph.mesh.cell_lists import CellLists
from varcomm.graph.mesh.mesh import Mesh, cell_lists
from varcomm.graph.mesh.vtu import Piece, Step, VtuSeries, stored
from varcomm.graph.mesh.xdmf import XdmfSeries, check_field, check_series
from varcomm.graph.node_shard import described
from varcomm.graph.partitioned_graph import PartitionedGraph
from varcomm.graph.ragged import Array, Ragged
from varcomm.ops.gather_v import scatter_v
from varcomm.plan.exchange_plan import ExchangePlan
from varcomm.transport.agreement import agree, agree_and_share, compare

_MAKE, _WRITE = "MeshWriter", "MeshWriter.write"

_FORMATS: dict[str, type[VtuSeries] | type[XdmfSeries]] = {
    ".pvd": VtuSeries,
    ".xdmf": XdmfSeries,
}


class MeshWriter:
    """Write results for ParaView as a series in time; every rank writes its own piece.

    Collective, like :meth:`write`. No rank collects values of other ranks.

    Parameters
    ----------
    path : path
        The file of the series, which ParaView opens; its folder must exist. A folder of the same
        name in the same place contains the pieces of all ranks with cells:

        - ``.pvd``: ``00000_<rank>.vtu`` per step, and an index ``00000.pvtu``.
        - ``.xdmf``: ``00000_<rank>.h5`` per step with the fields, and ``mesh_<rank>.h5``, which has
          the cells once.

        The files ``.pvd``, ``.pvtu`` and ``.xdmf`` of an earlier series at `path` are removed.
    graph : PartitionedGraph
        The partitioned ``mesh.data``.
    mesh : Mesh, optional
        The mesh. Only the mesh of rank 0 is read, and other ranks may pass None.

    Raises
    ------
    ArgumentError
        On every rank, if `path` has another suffix or cannot be written, or `mesh` has another
        number of nodes than `graph`.
    DisagreementError
        On every rank, if the name of `path` differs across ranks.
    MissingPackageError
        On every rank, if h5py is needed and not installed.

    See Also
    --------
    read_mesh, Mesh.write

    Notes
    -----
    The file contains cells and their corners, and no other points. If points are the nodes, the
    owner of a cell's first corner writes the cell, and receives the values of its other corners.

    Communication: rank 0 sends each rank its cells and their points once. Each :meth:`write` sends
    the values of points that cells of two ranks share, and nothing if cells are the nodes.
    In one process: ``mesh.write(path, **fields)``.

    Examples
    --------
    >>> import meshio, tempfile, varcomm as vc
    >>> def fn(rank, folder):
    ...     mesh = vc.graph.read_mesh(f"{folder}/square.vtu", nodes="cells")
    ...     graph = vc.graph.partition(mesh.data, method="block")
    ...     writer = vc.graph.MeshWriter(f"{folder}/heat.pvd", graph, mesh)
    ...     writer.write(0.5, heat=graph.volume)
    >>> square = meshio.Mesh([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]],
    ...     {"triangle": [[0, 1, 2], [0, 2, 3]]})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     square.write(f"{folder}/square.vtu")
    ...     _ = vc.launch(fn, 2, folder)
    ...     meshio.read(f"{folder}/heat/00000_1.vtu").cell_data["heat"]
    [array([0.5])]
    """

    def __init__(
        self, path: str | os.PathLike[str], graph: PartitionedGraph, mesh: Mesh | None = None
    ) -> None:
        if not isinstance(graph, PartitionedGraph):
            raise ArgumentError(f"graph must be a PartitionedGraph; got {described(graph)}.")
        self._graph, self._count, group = graph, 0, graph.group
        pg, ranks, device = group.process_group, group.size, group.device()
        nodes, where = agree(_MAKE, lambda: (graph.nodes, _checked_path(path)), group)
        compare(group, {"operation": _MAKE, "path": where.name})
        make = _FORMATS[where.suffix.lower()]
        mine = torch.full((nodes.num_owned,), group.rank, device=device)
        owner = graph.gather(mine, dst=0).cpu().numpy()

        def cut() -> tuple[list[int], bool, list[Array]]:
            if group.rank:
                return [], False, []
            if not isinstance(mesh, Mesh) or mesh.data.num_nodes != graph.num_nodes:
                got = f"a mesh of {mesh.data.num_nodes}" if isinstance(mesh, Mesh) else repr(mesh)
                raise ArgumentError(
                    f"rank 0 must pass the mesh of the graph, which has {graph.num_nodes} nodes; "
                    f"got {got}."
                )
            with writing(where):
                if not where.parent.is_dir():
                    raise ArgumentError(
                        f"there is no folder {where.parent}. Create it or pass another path."
                    )
                where.with_suffix("").mkdir(exist_ok=True)
                make.remove(where)
            of_cells = mesh.nodes == "cells"
            lists = cell_lists(mesh)
            order = None if of_cells else np.argsort(owner, kind="stable")
            pieces = [_packed(lists, owner, rank, order) for rank in range(ranks)]
            return [len(piece) for piece in pieces], of_cells, pieces

        found, shared = agree_and_share(_MAKE, cut, lambda value: [*value[:2]], group)
        lengths, self._of_cells = shared[0]
        whole = torch.from_numpy(np.concatenate(found[2])).to(device) if found[2] else None
        del found
        piece, needed = _unpacked(scatter_v(whole, lengths, src=0, group=pg).cpu().numpy())
        self._plan: ExchangePlan | None = None
        if not self._of_cells:
            rows = torch.from_numpy(needed).to(device)
            self._plan = ExchangePlan.from_needed(rows, graph.node_sizes, pg)
        self._series, self._outlines = agree_and_share(
            _MAKE, lambda: make(where, group.rank, piece), lambda series: series.outline, group
        )
        self._where = where

    def write(self, time: float | None = None, /, **fields: Any) -> None:
        """Write the fields of one time step; collective.

        Parameters
        ----------
        time : float, optional
            The time of the step, equal on all ranks; None means the number of the step.
        **fields : torch.Tensor or numpy.ndarray
            Values of the owned nodes, (n, *F), by name. Further dimensions are flattened.

        Raises
        ------
        ArgumentError
            On every rank, if a field is not of real numbers with a row per owned node, or if a file
            cannot be written.
        DisagreementError
            On every rank, if `time`, or the names, dtypes or shapes of fields differ across ranks.
        """
        group = self._graph.group

        def check() -> tuple[float, dict[str, Array]]:
            at = float(self._count if time is None else time)
            if not math.isfinite(at):
                raise ArgumentError(f"time must be finite; got {time!r}.")
            return at, {name: self._checked(name, value) for name, value in fields.items()}

        at, values = agree(_WRITE, check, group)
        kinds = {name: f"{each.dtype} {[*each.shape[1:]]}" for name, each in values.items()}
        compare(group, {"operation": _WRITE, "time": at, "fields": str(sorted(kinds.items()))})
        if self._plan is not None:
            for name in sorted(values):
                own = torch.from_numpy(values[name]).to(group.device())
                values[name] = self._plan(own).cpu().numpy()
        at_points, at_cells = ({}, values) if self._of_cells else (values, {})
        step = Step(self._count, at, at_points, at_cells)

        def piece() -> None:
            with writing(self._where):
                self._series.write(step)

        def index() -> None:
            if group.rank == 0:
                with writing(self._where):
                    self._series.index(self._outlines, step)

        agree(_WRITE, piece, group)
        agree(_WRITE, index, group)
        self._count += 1

    def _checked(self, name: str, value: Any) -> Array:
        rows, owned = stored(value), self._graph.num_owned
        if rows is None or len(rows) != owned:
            raise ArgumentError(
                f"{name} must be real numbers, one row for each of the {owned} owned nodes; got "
                f"{described(value)}."
            )
        if not name.isprintable():
            raise ArgumentError(f"{name!r} cannot be the name of a field. Pass a printable name.")
        if isinstance(self._series, XdmfSeries):
            check_field(name, rows)
        return rows


def _checked_path(path: str | os.PathLike[str]) -> Path:
    where = Path(path)
    if where.suffix.lower() not in _FORMATS:
        raise ArgumentError(f"path must end in .pvd or .xdmf; got {os.fspath(path)!r}.")
    if _FORMATS[where.suffix.lower()] is XdmfSeries:
        check_series(where)
    return where


def _packed(lists: CellLists, owner: Array, rank: int, order: Array | None) -> Array:
    """Return the piece of a rank, and the numbers of its points, as bytes.

    If points are the nodes, `order` has their ids by owner; a number is the place of a point in it.
    """
    needed = np.zeros(0, np.int64)
    if order is None:
        rows = np.flatnonzero(owner == rank)
        points = np.unique(lists.corners.chosen(rows).values)
    else:
        first = lists.corners.values[lists.corners.ends - lists.corners.counts]
        rows = np.flatnonzero(owner[first] == rank)
        number = np.empty_like(order)
        number[order] = np.arange(len(order))
        needed = np.unique(number[lists.corners.chosen(rows).values])
        points = order[needed]
    piece = Piece.of(lists, rows, points)
    arrays: dict[str, Any] = {"needed": needed, "points": piece.points, "types": piece.types}
    arrays |= {"ends": piece.corners.ends, "corners": piece.corners.values}
    if piece.faces is not None:
        arrays |= {"face_ends": piece.faces.ends, "faces": piece.faces.values}
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return np.frombuffer(stream.getvalue(), np.uint8)


def _unpacked(data: Array) -> tuple[Piece, Array]:
    """Return the piece, and the numbers of its points."""
    arrays = np.load(io.BytesIO(data.tobytes()))
    corners = Ragged(arrays["ends"], arrays["corners"])
    faces = Ragged(arrays["face_ends"], arrays["faces"]) if "faces" in arrays else None
    return Piece(arrays["points"], arrays["types"], corners, faces), arrays["needed"]
