"""``plot``: a picture of the owner of each node, and of the nodes with copies."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from varcomm.errors import ArgumentError, MissingPackageError
from varcomm.graph.report import Report
from varcomm.ops.gather_v import gather_v
from varcomm.sizes import ShardSizes, at_least
from varcomm.transport.agreement import agree, compare, share

if TYPE_CHECKING:
    from varcomm.graph.partitioned_graph import NodeType, PartitionedGraph

__all__ = ["check_target", "draw", "places", "plot"]

Array = np.ndarray[Any, Any]
Projection = Literal["sphere", "lonlat", "latlon"] | None

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
    "axes.labelcolor": SOFT,
    "axes.titlecolor": SOFT,
    "axes.titlelocation": "left",
    "axes.titlesize": 13,
    "grid.color": "white",
    "legend.frameon": False,
    "xtick.labelcolor": SOFT,
    "ytick.labelcolor": SOFT,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}
DARKER = 0.5
# In inches of 100 dots: width of the picture, largest height of the axes, and of all else.
WIDTH, TALLEST, AROUND = 12.0, 8.0, 1.6


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
        at_least(1, most, "most")
        if group.rank == 0:
            check_target(path)
        return rows

    rows = agree(_WHAT, local, group)
    same = {"projection": projection, "node_type": node_type, "most": int(most)}
    compare(group, {"operation": _WHAT} | same | {"columns of pos": rows.shape[1] - 1})
    report = Report.of(graph)
    plans = [edges.plan for edges in graph.edge_shards.values()]
    own = sorted({rank for plan in plans for rank in plan.neighbours})
    adjacent = share(_WHAT, lambda: own, group)
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
                draw(Path(path), rows.cpu().numpy(), owner, adjacent, total, report, projection)
            except OSError as error:
                raise ArgumentError(f"{path} cannot be written: {error}.") from error

    agree(_WHAT, drawn, group)


def _rows(graph: PartitionedGraph, projection: Projection, node_type: NodeType) -> torch.Tensor:
    """Return positions, and whether another rank has a copy in the last column; (n, D + 1)."""
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
    """Return the coordinates at which nodes are drawn; float64, (n, D)."""
    if projection not in (None, "sphere", "lonlat", "latlon"):
        raise ArgumentError(
            f'projection must be None, "sphere", "lonlat" or "latlon"; got {projection!r}.'
        )
    if not isinstance(pos, torch.Tensor):
        raise ArgumentError("the nodes have no positions. Set data.pos of the full graph.")
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
            raise ArgumentError("pos holds the centre of the sphere, which has no place on a map.")
        lon, lat = torch.atan2(y, x).rad2deg(), torch.atan2(z, torch.hypot(x, y)).rad2deg()
    else:
        lon, lat = pos.T if projection == "lonlat" else pos.flip(1).T
        if len(lat) and float(lat.abs().max()) > 90:
            low, high = lat.aminmax()
            raise ArgumentError(
                f"by projection={projection!r}, latitudes are {float(low)}...{float(high)}, beyond "
                "the poles. Check the order of the columns of pos."
            )
    return torch.stack([(lon + 180) % 360 - 180, lat], dim=1)


def check_target(path: Any) -> None:
    """Raise if no picture can be written to `path`."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise MissingPackageError('plot needs matplotlib: pip install "varcomm[plot]".') from error
    if not isinstance(path, str | os.PathLike):
        raise ArgumentError(f"path must be the path of a file; got {path!r}.")
    where = Path(path)
    known = sorted(FigureCanvasAgg.get_supported_filetypes())
    if where.suffix.lower().removeprefix(".") not in known:
        raise ArgumentError(f"the picture {str(where)!r} must end in one of .{', .'.join(known)}.")
    if not where.parent.is_dir():
        raise ArgumentError(f"there is no folder {where.parent}.")


def colours(adjacent: Sequence[Sequence[int]]) -> list[int]:
    """Return an index into the palette for each rank, from the ranks that each exchanges with.

    Up to 8 ranks have a colour each. Beyond, each rank has the colour that is rarest among its
    neighbours so far, then among all ranks.
    """
    if len(adjacent) <= len(PALETTE):
        return list(range(len(adjacent)))
    found: list[int] = []
    for rank, neighbours in enumerate(adjacent):
        near = [found[other] for other in neighbours if other < rank]
        found.append(min(range(len(PALETTE)), key=lambda c: (near.count(c), found.count(c))))
    return found


@dataclass(frozen=True)
class _Nodes:
    """Drawn nodes: coordinates (n, D), whether other ranks have copies, owner, colours of ranks."""

    pos: Array
    copied: Array
    owner: Array
    palette: Array

    def chosen(self, chosen: Array) -> _Nodes:
        return _Nodes(self.pos[chosen], self.copied[chosen], self.owner[chosen], self.palette)

    def bounds(self) -> tuple[Array, Array]:
        dims = self.pos.shape[1]
        if not len(self.pos):
            return np.zeros(dims), np.ones(dims)
        return self.pos.min(axis=0), self.pos.max(axis=0)

    def scatter(self, axes: Any, size: float) -> None:
        light = np.where(self.copied, DARKER, 1.0)[:, None]
        last = np.argsort(self.copied, kind="stable")  # nodes with copies lie on top, in the plane
        options = {"depthshade": False} if self.pos.shape[1] == 3 else {}
        colour = (self.palette[self.owner] * light)[last]
        axes.scatter(*self.pos[last].T, c=colour, s=size, linewidths=0, rasterized=True, **options)

    def number(self, axes: Any, place: Array) -> None:
        """Write each rank at its node nearest to its centre, measured by `place`."""
        ranks = len(self.palette)
        if ranks <= len(PALETTE) or not len(place):
            return
        spread = place.var(axis=0).sum()
        for rank in range(ranks):
            own = np.flatnonzero(self.owner == rank)
            # nodes scattered everywhere have no centre
            if len(own) and place[own].var(axis=0).sum() <= 0.8 * spread:
                away = np.square(place[own] - place[own].mean(axis=0)).sum(axis=1)
                axes.text(
                    *self.pos[own[away.argmin()]],
                    str(rank),
                    ha="center",
                    va="center",
                    fontsize=11 if ranks <= 32 else 9,
                    zorder=10,
                    bbox={"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 1.5},
                )


def draw(
    path: Path,
    rows: Array,
    owner: Array,
    adjacent: Sequence[Sequence[int]],
    total: int,
    report: Report,
    projection: str | None,
) -> None:
    """Draw nodes into a file; `rows` are coordinates, and whether a node has copies."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure

    palette = np.array([to_rgb(PALETTE[colour]) for colour in colours(adjacent)])
    nodes, ranks = _Nodes(rows[:, :-1], rows[:, -1] > 0, owner, palette), len(palette)
    notes = f"{sum(report.cut):,} edges between ranks ({100 * report.edge_cut:.1f} %)"
    notes += "  ·  darker: nodes with copies on other ranks"
    if len(rows) < total:
        notes += f"  ·  {len(rows):,} nodes are drawn, chosen at random"
    with rc_context(STYLE):
        figure = Figure(dpi=100, facecolor="white", layout="constrained")
        FigureCanvasAgg(figure)  # needs no screen, and no list of open figures as pyplot's
        title = f"{total:,} nodes on {ranks} rank{'s' * (ranks != 1)} by {report.method}"
        figure.suptitle(title, x=0.03, ha="left", fontsize=21, weight="bold")
        if nodes.pos.shape[1] == 3:
            _space(figure, nodes, notes)
        else:
            _plane(figure, nodes, notes, projection is not None)
        _key(figure, palette)
        figure.savefig(path)


def _key(figure: Any, palette: Array) -> None:
    """Write the colour of each rank, if each rank has a colour."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    if len(palette) > len(PALETTE):
        title = "numbers are ranks, whose colours repeat"
        figure.legend([], [], title=title, loc="outside lower left")
        return
    figure.legend(
        [(Patch(color=colour), Patch(color=colour * DARKER)) for colour in palette],
        [f"rank {rank}" for rank in range(len(palette))],
        loc="outside lower left",
        ncols=len(palette),
        columnspacing=1.5,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
    )


def _plane(figure: Any, nodes: _Nodes, notes: str, is_map: bool) -> None:
    place, stretch = nodes.pos, 1.0
    if is_map:
        nodes, place, stretch = _turned(nodes)
    low, high = nodes.bounds()
    margin = 0.02 * ((high - low).max() or 1)
    low, high = low - margin, high + margin
    wide, tall = (high - low) * (1, stretch)
    inch = min((WIDTH - 1) / wide, TALLEST / tall)
    figure.set_size_inches(WIDTH, tall * inch + AROUND)
    axes = figure.add_subplot(title=notes, aspect=stretch)
    axes.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]))
    if is_map:
        _label_degrees(axes)
    nodes.scatter(axes, _marker(nodes.pos, wide * tall * (72 * inch) ** 2))
    nodes.number(axes, place)


def _turned(nodes: _Nodes) -> tuple[_Nodes, Array, float]:
    """Cut a map at the widest gap in longitude; return also points in space, and its stretch."""
    if not len(nodes.pos):
        return nodes, nodes.pos, 1.0
    lon, lat = nodes.pos.T
    ring = np.sort(lon)
    gaps = np.diff(np.append(ring, ring[0] + 360))
    widest = int(gaps.argmax())
    west = ring[widest] + gaps[widest] / 2 if gaps[widest] > 30 else -180.0
    turned = replace(nodes, pos=np.stack([(lon - west) % 360 + west, lat], axis=1))
    # neighbours may have longitudes at both ends of the map
    east, north = np.deg2rad(nodes.pos.T)
    space = np.cos(north) * np.cos(east), np.cos(north) * np.sin(east), np.sin(north)
    middle = np.deg2rad((lat.min() + lat.max()) / 2)
    return turned, np.stack(space, axis=1), 1 / max(float(np.cos(middle)), 0.2)


def _label_degrees(axes: Any) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    def side(value: float, names: str) -> str:
        value = round((value + 180) % 360 - 180, 6)
        return f"{abs(value):g}°" + (names[int(value < 0)] if value % 180 else "")

    for axis, names in ((axes.xaxis, "EW"), (axes.yaxis, "NS")):
        axis.set_major_locator(MaxNLocator(7, steps=[1, 2, 3, 5, 6, 9, 10]))
        axis.set_major_formatter(FuncFormatter(lambda value, _, names=names: side(value, names)))


def _space(figure: Any, nodes: _Nodes, notes: str) -> None:
    """Draw nodes in space, and beside them the nodes with copies alone."""
    low, high = nodes.bounds()
    extent = np.maximum(high - low, (high - low).max() / 50 or 1)
    limits = np.stack([low + high - extent, low + high + extent]).T / 2
    # by the nodes that are visible from one side
    size = float(np.clip(6000 / max(len(nodes.pos), 1) ** (2 / 3), 0.5, 60))
    figure.set_size_inches(1.5 * WIDTH, TALLEST + AROUND)
    all_nodes = np.full(len(nodes.pos), True)
    headings = (notes, "nodes with copies on other ranks")
    for at, (chosen, heading) in enumerate(zip((all_nodes, nodes.copied), headings, strict=True)):
        axes = figure.add_subplot(1, 2, at + 1, projection="3d", title=heading, facecolor="white")
        axes.set_box_aspect(tuple(extent), zoom=0.95)  # changes an array in place
        axes.locator_params(nbins=5)
        for name, limit in zip("xyz", limits, strict=True):
            axes.set(**{f"{name}lim": limit, f"{name}label": name})
            getattr(axes, f"{name}axis").set_pane_color(GROUND)
        shown = nodes.chosen(chosen)
        shown.scatter(axes, size)
        shown.number(axes, shown.pos)


def _marker(pos: Array, area: float) -> float:
    """Return the size of markers in square points, so that neighbours nearly touch."""
    if not len(pos):
        return 1.0
    # nodes may leave most of the picture empty: count the occupied fields of a raster
    across = max(1, int(np.sqrt(len(pos) / 8)))
    fields, _, _ = np.histogram2d(pos[:, 0], pos[:, 1], bins=across)
    return float(np.clip(0.8 * area * (fields > 0).mean() / len(pos), 0.3, 150))
