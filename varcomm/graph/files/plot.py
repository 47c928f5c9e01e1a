"""``plot``: a picture of the owner of each node, and of the nodes with copies."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from varcomm.errors import ArgumentError, MissingPackageError
from varcomm.graph.building.tables import ends
from varcomm.graph.report import Report
from varcomm.ops.gather_v import gather_v
from varcomm.sizes import ShardSizes
from varcomm.transport.agreement import agree, compare

if TYPE_CHECKING:
    from varcomm.graph.partitioned_graph import NodeType, PartitionedGraph

__all__ = ["check_target", "draw", "places", "plot"]

Array = np.ndarray[Any, Any]

_WHAT = "graph.plot"
_MOST = 200_000  # drawn nodes

# Paul Tol's light colours, distinct for every kind of colour vision, also at half brightness.
_PALETTE = (
    *("#77aadd", "#ee8866", "#eedd88", "#44bb99"),
    *("#ffaabb", "#bbcc33", "#99ddff", "#aaaa00"),
)
_DARKER = 0.5
_STYLE: Any = {
    "font.size": 13,
    "axes.facecolor": "#f4f5f6",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "axes.titlesize": 13,
    "grid.color": "white",
}
# In inches of 100 dots: width of the picture, largest height of the axes, and of all else.
_WIDTH, _TALLEST, _AROUND = 12.0, 8.0, 1.8


def plot(graph: PartitionedGraph, path: str | os.PathLike[str], node_type: NodeType = None) -> None:
    """Draw a graph; :meth:`PartitionedGraph.plot`."""
    group = graph.group

    def local() -> torch.Tensor:
        if group.rank == 0:
            check_target(path)
        if node_type not in graph.node_shards:
            raise ArgumentError(
                f"node_type must be one of {list(graph.node_shards)}; got {node_type!r}."
            )
        pos = places(graph.node_shards[node_type].attributes.get("pos"))
        copied = torch.zeros(len(pos), 1, dtype=torch.float64)
        for edge_type, edges in graph.edge_shards.items():
            if ends(edge_type)[0] == node_type:
                copied[edges.plan.send_index.cpu()] = 1
        return torch.cat([pos, copied], dim=1)

    rows = agree(_WHAT, local, group)
    same = {"node_type": node_type, "columns of pos": rows.shape[1] - 1}
    compare(group, {"operation": _WHAT} | same)
    report = Report.of(graph)
    total = graph.node_shards[node_type].sizes.total
    if total > _MOST:
        chance = torch.Generator().manual_seed(group.rank)
        rows = rows[torch.rand(len(rows), generator=chance, dtype=torch.float64) < _MOST / total]
    sizes = ShardSizes.from_local(len(rows), group.process_group)
    rows = gather_v(rows.to(group.device()), sizes, dst=0, group=group.process_group)

    def drawn() -> None:
        if group.rank == 0:
            owner = np.repeat(np.arange(group.size), sizes)
            try:
                draw(Path(path), rows.cpu().numpy(), owner, total, report)
            except OSError as error:
                raise ArgumentError(f"{path} cannot be written: {error}.") from error

    agree(_WHAT, drawn, group)


def places(pos: Any) -> torch.Tensor:
    """Return the coordinates at which nodes are drawn; float64, (n, 2) or (n, 3)."""
    if not isinstance(pos, torch.Tensor):
        raise ArgumentError("the nodes have no positions. Set data.pos of the full graph.")
    if pos.dim() != 2 or pos.shape[1] not in (2, 3) or pos.is_complex():
        raise ArgumentError(
            f"pos must have shape (n, 2) or (n, 3); got {pos.dtype} of shape {tuple(pos.shape)}."
        )
    found: torch.Tensor = pos.detach().cpu().double()
    if not found.isfinite().all():
        raise ArgumentError("pos holds positions that are not finite.")
    return found


def check_target(path: Any) -> None:
    """Raise if no picture can be written to `path`."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackageError("plot needs matplotlib: pip install matplotlib.") from error
    where, known = Path(path), sorted(Figure().canvas.get_supported_filetypes())
    if where.suffix.lower().removeprefix(".") not in known:
        raise ArgumentError(f"the picture {str(where)!r} must end in one of .{', .'.join(known)}.")
    if not where.parent.is_dir():
        raise ArgumentError(f"there is no folder {where.parent}.")


def draw(path: Path, rows: Array, owner: Array, total: int, report: Report) -> None:
    """Draw nodes into a file; `rows` are coordinates, and whether a node has copies."""
    from matplotlib import colormaps, rc_context
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize, to_rgba_array
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    pos, copied, ranks = rows[:, :-1], rows[:, -1] > 0, len(report.owned)
    notes = f"{sum(report.cut):,} edges between ranks ({100 * report.edge_cut:.1f} %)"
    notes += "  ·  darker: nodes with copies on other ranks"
    if len(rows) < total:
        notes += f"  ·  {len(rows):,} nodes are drawn, chosen at random"
    # nodes with copies lie on top; in space, where they are hidden, a second panel has them alone
    panels = {notes: np.argsort(copied, kind="stable")}
    in_space = pos.shape[1] == 3
    if in_space:
        panels["nodes with copies on other ranks"] = np.flatnonzero(copied)
    if ranks <= len(_PALETTE):
        palette = to_rgba_array(_PALETTE[:ranks])[:, :3]
    else:  # hues a golden angle apart
        palette = colormaps["hsv"](np.arange(ranks) * 0.618034 % 1)[:, :3]
    colour = palette[owner] * np.where(copied, _DARKER, 1.0)[:, None]
    extent = np.ptp(pos, axis=0) if len(pos) else np.ones(2)
    wide, tall = np.maximum(extent, extent.max() / 50 or 1)[:2]
    inch = min((_WIDTH - 1) / wide, _TALLEST / tall)
    if in_space:  # by the nodes that are visible from one side
        size = np.clip(6000 / max(len(pos), 1) ** (2 / 3), 0.5, 60)
        inches = 1.5 * _WIDTH, _TALLEST + _AROUND
    else:  # neighbours nearly touch
        size = np.clip(0.8 * wide * tall * (72 * inch) ** 2 / max(len(pos), 1), 0.3, 150)
        inches = _WIDTH, tall * inch + _AROUND
    with rc_context(_STYLE):
        figure = Figure(inches, dpi=100, facecolor="white", layout="constrained")
        title = f"{total:,} nodes on {ranks} rank{'s' * (ranks != 1)} by {report.method}"
        figure.suptitle(title, x=0.03, ha="left", fontsize=21, weight="bold")
        for place, (heading, nodes) in enumerate(panels.items()):
            axes: Any = figure.add_subplot(
                1, len(panels), place + 1, title=heading, projection="3d" if in_space else None
            )
            own: Any = {"c": colour[nodes], "s": size, "linewidths": 0, "rasterized": True}
            axes.scatter(*pos[nodes].T, **own, **({"depthshade": False} if in_space else {}))
            if in_space and len(pos):
                axes.auto_scale_xyz(*pos.T)
            axes.set_aspect("equal")
        of_rank = ScalarMappable(Normalize(-0.5, ranks - 0.5), ListedColormap(palette))
        ticks: Any = MaxNLocator(integer=True)
        figure.colorbar(
            of_rank, ax=figure.axes, location="bottom", aspect=80, ticks=ticks, label="rank"
        )
        figure.savefig(path)
