"""``plot``: a picture of the owner of each node, and of the nodes with copies."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from varcomm.errors import ArgumentError, MissingPackageError
from varcomm.graph.report import Report
from varcomm.ops.gather_v import gather_v
from varcomm.sizes import ShardSizes, at_least
from varcomm.transport.agreement import agree, compare

if TYPE_CHECKING:
    from varcomm.graph.partitioned_graph import NodeType, PartitionedGraph

__all__ = ["check_target", "draw", "places", "plot"]

Array = np.ndarray[Any, Any]

_WHAT = "graph.plot"

# Paul Tol's light colours, distinct for every kind of colour vision, also at half brightness.
PALETTE = (
    *("#77aadd", "#ee8866", "#eedd88", "#44bb99"),
    *("#ffaabb", "#bbcc33", "#99ddff", "#aaaa00"),
)
INK, SOFT, GROUND, LINE = "#22272b", "#5b6167", "#f4f5f6", "#d3d6d9"
STYLE: Any = {
    "font.size": 13,
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.facecolor": GROUND,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlecolor": SOFT,
    "axes.titlelocation": "left",
    "axes.titlesize": 13,
    "grid.color": "white",
    "legend.frameon": False,
    "xtick.labelcolor": SOFT,
    "ytick.labelcolor": SOFT,
}
DARKER = 0.5
# In inches of 100 dots: width of the picture, largest height of the axes, and of all else.
WIDTH, TALLEST, AROUND = 12.0, 8.0, 1.6


def plot(
    graph: PartitionedGraph,
    path: str | os.PathLike[str],
    node_type: NodeType = None,
    most: int = 200_000,
) -> None:
    """Draw a graph; :meth:`PartitionedGraph.plot`."""
    group = graph.group

    def local() -> torch.Tensor:
        at_least(1, most, "most")
        if group.rank == 0:
            check_target(path)
        if node_type not in graph.node_shards:
            raise ArgumentError(
                f"node_type must be one of {list(graph.node_shards)}; got {node_type!r}."
            )
        pos = places(graph.node_shards[node_type].attributes.get("pos"))
        copied = torch.zeros(len(pos), 1, dtype=torch.float64)
        for edge_type, edges in graph.edge_shards.items():
            if edge_type is None or edge_type[0] == node_type:
                copied[edges.plan.send_index.cpu()] = 1
        return torch.cat([pos, copied], dim=1)

    rows = agree(_WHAT, local, group)
    same = {"node_type": node_type, "most": int(most), "columns of pos": rows.shape[1] - 1}
    compare(group, {"operation": _WHAT} | same)
    report = Report.of(graph)
    total = graph.node_shards[node_type].sizes.total
    if total > most:
        chance = torch.Generator().manual_seed(group.rank)
        rows = rows[torch.rand(len(rows), generator=chance, dtype=torch.float64) < most / total]
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
        raise MissingPackageError('plot needs matplotlib: pip install "varcomm[plot]".') from error
    if not isinstance(path, str | os.PathLike):
        raise ArgumentError(f"path must be the path of a file; got {path!r}.")
    where, known = Path(path), sorted(Figure().canvas.get_supported_filetypes())
    if where.suffix.lower().removeprefix(".") not in known:
        raise ArgumentError(f"the picture {str(where)!r} must end in one of .{', .'.join(known)}.")
    if not where.parent.is_dir():
        raise ArgumentError(f"there is no folder {where.parent}.")


def draw(path: Path, rows: Array, owner: Array, total: int, report: Report) -> None:
    """Draw nodes into a file; `rows` are coordinates, and whether a node has copies."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    pos, copied, palette = rows[:, :-1], rows[:, -1] > 0, _palette(len(report.owned))
    ranks = len(palette)
    notes = f"{sum(report.cut):,} edges between ranks ({100 * report.edge_cut:.1f} %)"
    notes += "  ·  darker: nodes with copies on other ranks"
    if len(rows) < total:
        notes += f"  ·  {len(rows):,} nodes are drawn, chosen at random"
    colour = palette[owner] * np.where(copied, DARKER, 1.0)[:, None]
    in_space = pos.shape[1] == 3
    with rc_context(STYLE):
        figure = Figure(dpi=100, facecolor="white", layout="constrained")
        title = f"{total:,} nodes on {ranks} rank{'s' * (ranks != 1)} by {report.method}"
        figure.suptitle(title, x=0.03, ha="left", fontsize=21, weight="bold")
        panels, size = (_space if in_space else _plane)(figure, pos, notes)
        # nodes with copies lie on top; in space, a second panel has them alone
        chosen = np.argsort(copied, kind="stable"), np.flatnonzero(copied)
        options = {"depthshade": False} if in_space else {}
        for axes, nodes in zip(panels, chosen, strict=False):
            own = {"c": colour[nodes], "s": size, "linewidths": 0, "rasterized": True}
            axes.scatter(*pos[nodes].T, **own, **options)
            if ranks > len(PALETTE):
                _number(axes, pos[nodes], owner[nodes])
        _key(figure, palette)
        figure.savefig(path)


def _palette(ranks: int) -> Array:
    """Return a colour per rank; beyond the palette, hues a golden angle apart."""
    from matplotlib.colors import hsv_to_rgb, to_rgb

    if ranks <= len(PALETTE):
        return np.array([to_rgb(colour) for colour in PALETTE[:ranks]])
    hues = np.arange(ranks) * 0.618034 % 1
    return hsv_to_rgb(np.stack([hues, np.full(ranks, 0.5), np.full(ranks, 0.93)], axis=1))


def _number(axes: Any, pos: Array, owner: Array) -> None:
    """Write each rank at its node nearest to its centre; nodes at random places have none."""
    spread = pos.var(axis=0).sum() if len(pos) else 0.0
    for rank in np.unique(owner):
        own = pos[owner == rank]
        if own.var(axis=0).sum() <= 0.8 * spread:
            middle = own[np.square(own - own.mean(axis=0)).sum(axis=1).argmin()]
            box = {"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 1.5}
            axes.text(*middle, str(rank), ha="center", va="center", fontsize=11, bbox=box)


def _key(figure: Any, palette: Array) -> None:
    """Write the colour of each rank, if numbers in the picture do not."""
    from matplotlib.patches import Patch

    if len(palette) <= len(PALETTE):
        figure.legend(
            [Patch(color=colour) for colour in palette],
            [f"rank {rank}" for rank in range(len(palette))],
            loc="outside lower left",
            ncols=len(palette),
        )


def _bounds(pos: Array) -> tuple[Array, Array]:
    if not len(pos):
        return np.zeros(pos.shape[1]), np.ones(pos.shape[1])
    return pos.min(axis=0), pos.max(axis=0)


def _plane(figure: Any, pos: Array, notes: str) -> tuple[list[Any], float]:
    """Return the axes, and the size of markers in square points: neighbours nearly touch."""
    low, high = _bounds(pos)
    margin = 0.02 * ((high - low).max() or 1)
    low, high = low - margin, high + margin
    wide, tall = high - low
    inch = min((WIDTH - 1) / wide, TALLEST / tall)
    figure.set_size_inches(WIDTH, tall * inch + AROUND)
    axes = figure.add_subplot(title=notes, aspect="equal")
    axes.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]))
    # nodes may leave most of the picture empty: count the occupied fields of a raster
    fields, _, _ = np.histogram2d(pos[:, 0], pos[:, 1], bins=max(1, int(np.sqrt(len(pos) / 8))))
    area = wide * tall * (72 * inch) ** 2 * (fields > 0).mean()
    return [axes], float(np.clip(0.8 * area / max(len(pos), 1), 0.3, 150))


def _space(figure: Any, pos: Array, notes: str) -> tuple[list[Any], float]:
    """Return axes for all nodes and for those with copies, and the size of markers."""
    low, high = _bounds(pos)
    extent = np.maximum(high - low, (high - low).max() / 50 or 1)
    limits = np.stack([low + high - extent, low + high + extent]).T / 2
    figure.set_size_inches(1.5 * WIDTH, TALLEST + AROUND)
    panels = []
    for at, heading in enumerate((notes, "nodes with copies on other ranks")):
        axes = figure.add_subplot(1, 2, at + 1, projection="3d", title=heading, facecolor="white")
        axes.set_box_aspect(tuple(extent), zoom=0.95)  # changes an array in place
        for name, limit in zip("xyz", limits, strict=True):
            axes.set(**{f"{name}lim": limit, f"{name}label": name})
        panels.append(axes)
    # by the nodes that are visible from one side
    return panels, float(np.clip(6000 / max(len(pos), 1) ** (2 / 3), 0.5, 60))
