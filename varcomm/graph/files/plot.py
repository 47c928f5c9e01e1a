"""``plot``: a picture of who owns which node, and of which nodes others have copies."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from varcomm.errors import ArgumentError, DisagreementError, MissingPackageError
from varcomm.graph.files.picture import draw
from varcomm.graph.report import Report
from varcomm.ops.gather_v import gather_v
from varcomm.sizes import ShardSizes
from varcomm.transport.agreement import agree, share

if TYPE_CHECKING:
    from varcomm.graph.partitioned_graph import NodeType, PartitionedGraph

__all__ = ["check_target", "places", "plot"]

Projection = Literal["sphere", "lonlat", "latlon"] | None

_WHAT = "graph.plot"


def plot(
    graph: PartitionedGraph,
    path: str | os.PathLike[str],
    projection: Projection = None,
    node_type: NodeType = None,
    most: int = 200_000,
) -> None:
    """Draw a graph; :meth:`PartitionedGraph.plot`."""
    group = graph.group

    def local() -> torch.Tensor:
        rows = _rows(graph, projection, node_type)
        _check_most(most)
        if group.rank == 0:
            check_target(path)
        return rows

    rows = agree(_WHAT, local, group)
    given = share(_WHAT, lambda: (projection, node_type, most, rows.shape[1]), group)
    if any(other != given[0] for other in given):
        raise DisagreementError(
            f"{_WHAT}: ranks disagree on projection, node_type, most or the columns of pos: "
            + "; ".join(f"rank {rank} has {one}" for rank, one in enumerate(given))
            + "."
        )
    report = Report.of(graph)
    adjacent = share(_WHAT, lambda: _neighbours(graph), group)
    total = graph.node_shards[node_type].sizes.total
    if total > most:
        chance = torch.Generator().manual_seed(group.rank)
        kept = torch.rand(len(rows), generator=chance, dtype=torch.float64) < most / total
        rows = rows[kept]
    sizes = ShardSizes.from_local(len(rows), group.process_group)
    rows = gather_v(rows.to(group.device()), sizes, dst=0, group=group.process_group)

    def drawn() -> None:
        if group.rank == 0:
            owner = np.repeat(np.arange(group.size), sizes)
            try:
                draw(Path(path), rows.cpu().numpy(), owner, adjacent, total, report, projection)
            except OSError as error:
                raise ArgumentError(f"{path} cannot be written: {error}.") from error

    agree(_WHAT, drawn, group)


def _rows(graph: PartitionedGraph, projection: Projection, node_type: NodeType) -> torch.Tensor:
    """Return positions and, in the last column, whether another rank has a copy; (n, D + 1)."""
    if node_type not in graph.node_shards:
        raise ArgumentError(
            f"node_type must be one of {list(graph.node_shards)}; got {node_type!r}."
        )
    pos = places(graph.node_shards[node_type].attributes.get("pos"), projection)
    copied = torch.zeros(len(pos), 1, dtype=torch.float64)
    for edge_type, edges in graph.edge_shards.items():
        if edge_type is None or edge_type[0] == node_type:
            copied[edges.plan.send_index.cpu()] = 1
    return torch.cat([pos, copied], dim=1)


def places(pos: Any, projection: Projection) -> torch.Tensor:
    """Return where nodes with these positions are drawn; float64, (n, D)."""
    if projection not in (None, "sphere", "lonlat", "latlon"):
        raise ArgumentError(
            f'projection must be None, "sphere", "lonlat" or "latlon"; got {projection!r}.'
        )
    if not isinstance(pos, torch.Tensor):
        raise ArgumentError("the nodes have no positions. Give the whole graph a data.pos.")
    columns = {None: (2, 3), "sphere": (3,)}.get(projection, (2,))
    if pos.dim() != 2 or pos.shape[1] not in columns or pos.is_complex():
        wanted = " or ".join(f"(n, {count})" for count in columns)
        raise ArgumentError(
            f"projection={projection!r} needs pos of shape {wanted}; got {pos.dtype} of shape "
            f"{tuple(pos.shape)}."
        )
    pos = pos.detach().cpu().double()
    if not pos.isfinite().all():
        raise ArgumentError("pos holds positions that are not finite.")
    return pos if projection is None else _in_degrees(pos, projection)


def _in_degrees(pos: torch.Tensor, projection: str) -> torch.Tensor:
    """Return longitudes from -180 to 180 and latitudes, (n, 2)."""
    if projection == "sphere":
        x, y, z = pos.T
        if not (pos.norm(dim=1) > 0).all():
            raise ArgumentError("pos holds the centre of the sphere, which is nowhere on a map.")
        lon, lat = torch.atan2(y, x).rad2deg(), torch.atan2(z, torch.hypot(x, y)).rad2deg()
    else:
        lon, lat = pos.T if projection == "lonlat" else pos.flip(1).T
        if len(lat) and float(lat.abs().max()) > 90:
            low, high = lat.aminmax()
            raise ArgumentError(
                f"by projection={projection!r}, latitudes are {float(low)}...{float(high)}, beyond "
                "the poles. In which order are the columns of pos?"
            )
    return torch.stack([(lon + 180) % 360 - 180, lat], dim=1)


def _check_most(most: int) -> None:
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise ArgumentError(f"most must be a positive integer; got {most!r}.")


def check_target(path: Any) -> None:
    """Raise if no picture can be written there."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise MissingPackageError('plot needs matplotlib: pip install "varcomm[plot]".') from error
    if not isinstance(path, str | os.PathLike):
        raise ArgumentError(f"path must be one of a file; got {path!r}.")
    where = Path(path)
    known = sorted(FigureCanvasAgg.get_supported_filetypes())
    if where.suffix.lower().removeprefix(".") not in known:
        raise ArgumentError(f"the picture {str(where)!r} must end in one of .{', .'.join(known)}.")
    if not where.parent.is_dir():
        raise ArgumentError(f"there is no folder {where.parent}.")


def _neighbours(graph: PartitionedGraph) -> Sequence[int]:
    return sorted({rank for e in graph.edge_shards.values() for rank in e.plan.neighbours})
