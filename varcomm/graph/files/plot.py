"""``plot``: a picture of the owner of each node, and of the nodes with copies."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from varcomm.errors import ArgumentError, DisagreementError, MissingPackageError
from varcomm.graph.report import Report
from varcomm.ops.gather_v import gather_v
from varcomm.sizes import ShardSizes, exact_int
from varcomm.transport.agreement import agree, share

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
DARKER = 0.5
# In inches of 100 dots: widths of the picture, largest height of the axes, and their margins.
WIDTH, NARROWEST, TALLEST, TOP, BOTTOM, LEFT = 12.0, 9.0, 8.0, 1.15, 1.15, 0.36


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
        if isinstance(most, bool) or exact_int(most) is None or most < 1:
            raise ArgumentError(f"most must be a positive integer; got {most!r}.")
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
    plans = [edges.plan for edges in graph.edge_shards.values()]
    own = sorted({rank for plan in plans for rank in plan.neighbours})
    adjacent = share(_WHAT, lambda: own, group)
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

    pos, copied = rows[:, :-1], rows[:, -1] > 0
    palette = _rgb(colours(adjacent))
    style: Any = {
        "font.size": 13,
        "text.color": INK,
        "axes.edgecolor": LINE,
        "axes.labelcolor": SOFT,
        "xtick.labelcolor": SOFT,
        "ytick.labelcolor": SOFT,
        "grid.color": LINE,
    }
    with rc_context(style):
        if pos.shape[1] == 3:
            figure = _space(pos, copied, owner, palette)
        else:
            figure = _plane(pos, copied, owner, palette, projection is not None)
        _headings(figure, len(pos), total, report)
        _key(figure, len(adjacent), palette)
        figure.savefig(path)


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=100, facecolor="white")
    FigureCanvasAgg(figure)  # needs no screen, and no list of open figures as pyplot's
    return figure


def _place(figure: Any, left: float, bottom: float, width: float, height: float) -> Any:
    """Return a place in fractions of the figure, from inches."""
    across, up = figure.get_size_inches()
    return left / across, bottom / up, width / across, height / up


def _headings(figure: Any, shown: int, total: int, report: Report) -> None:
    ranks, top = len(report.owned), figure.get_figheight()
    title = f"{total:,} nodes on {ranks} rank{'s' * (ranks != 1)} by {report.method}"
    edges = f"{sum(report.cut):,} edges between ranks ({100 * report.edge_cut:.1f} %)"
    for text, down, style in (
        (title, 0.5, {"fontsize": 21, "weight": "bold"}),
        (f"{edges}  ·  darker: nodes with copies on other ranks", 0.85, {"color": SOFT}),
    ):
        x, y, *_ = _place(figure, LEFT, top - down, 0, 0)
        figure.text(x, y, text, **style)
    if shown < total:
        x, y, *_ = _place(figure, LEFT, 0.36, 0, 0)
        note = f"{shown:,} nodes are drawn, chosen at random"
        figure.text(1 - x, y, note, ha="right", va="center", color=SOFT)


def _key(figure: Any, ranks: int, palette: Array) -> None:
    """Write the colour of each rank, if each rank has a colour."""
    from matplotlib.patches import Rectangle

    def write(text: str, left: float) -> None:
        x, y, *_ = _place(figure, left, 0.36, 0, 0)
        figure.text(x, y, text, va="center")

    if ranks > len(PALETTE):
        write("numbers are ranks, whose colours repeat", LEFT)
        return
    write("rank", LEFT)
    for rank in range(ranks):
        left = 1.05 + 0.7 * rank
        for step, light in enumerate((1.0, DARKER)):
            x, y, width, height = _place(figure, left + 0.17 * step, 0.275, 0.17, 0.17)
            patch = Rectangle((x, y), width, height, facecolor=palette[rank] * light)
            figure.add_artist(patch)
        write(str(rank), left + 0.41)


def _plane(pos: Array, copied: Array, owner: Array, palette: Array, is_map: bool) -> Any:
    stretch = 1.0
    if is_map:
        pos, stretch = _turned(pos)
    low, high = (pos.min(axis=0), pos.max(axis=0)) if len(pos) else (np.zeros(2), np.ones(2))
    margin = 0.02 * ((high - low).max() or 1)
    low, high = low - margin, high + margin
    wide, tall = (high - low) * (1, stretch)
    inch = min((WIDTH - 1.2) / wide, TALLEST / tall)
    figure = _figure(max(wide * inch + 1.2, NARROWEST), TOP + tall * inch + BOTTOM)
    axes = figure.add_axes(_place(figure, 0.84, BOTTOM, wide * inch, tall * inch))
    axes.set_xlim(low[0], high[0])
    axes.set_ylim(low[1], high[1])
    axes.set_facecolor(GROUND)
    axes.tick_params(length=0)
    axes.set_axisbelow(True)
    axes.grid(color="white")
    if is_map:
        _degrees(axes)
    size = _marker(pos, wide * tall * (72 * inch) ** 2)
    _scatter(axes, pos, copied, owner, palette, size)
    _labels(axes, pos, owner, len(palette), _on_sphere(pos) if is_map else None)
    return figure


def _on_sphere(pos: Array) -> Array:
    """Return unit vectors: neighbours may have longitudes at both ends of the map."""
    lon, lat = np.deg2rad(pos.T)
    return np.stack([np.cos(lat) * np.cos(lon), np.cos(lat) * np.sin(lon), np.sin(lat)], axis=1)


def _turned(pos: Array) -> tuple[Array, float]:
    """Cut the map at the widest gap in longitude; return also its vertical stretch."""
    if not len(pos):
        return pos, 1.0
    lon, lat = pos.T
    ring = np.sort(lon)
    gaps = np.diff(np.append(ring, ring[0] + 360))
    widest = int(gaps.argmax())
    west = ring[widest] + gaps[widest] / 2 if gaps[widest] > 30 else -180.0
    lon = (lon - west) % 360 + west
    middle = np.deg2rad((lat.min() + lat.max()) / 2)
    return np.stack([lon, lat], axis=1), 1 / max(float(np.cos(middle)), 0.2)


def _degrees(axes: Any) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    def side(value: float, names: str) -> str:
        value = round((value + 180) % 360 - 180, 6)
        return f"{abs(value):g}°" + (names[int(value < 0)] if value % 180 else "")

    for axis, names in ((axes.xaxis, "EW"), (axes.yaxis, "NS")):
        axis.set_major_locator(MaxNLocator(7, steps=[1, 2, 3, 5, 6, 9, 10]))
        axis.set_major_formatter(FuncFormatter(lambda value, _, names=names: side(value, names)))


def _space(pos: Array, copied: Array, owner: Array, palette: Array) -> Any:
    low, high = (pos.min(axis=0), pos.max(axis=0)) if len(pos) else (np.zeros(3), np.ones(3))
    extent = np.maximum(high - low, (high - low).max() / 50 or 1)
    # by the nodes that are visible from one side
    size = float(np.clip(6000 / max(len(pos), 1) ** (2 / 3), 0.5, 60))
    figure = _figure(1.5 * WIDTH, TOP + 7.4 + 0.75)
    for left, chosen, heading in (
        (0.0, np.full(len(pos), True), "all"),
        (0.75 * WIDTH, copied, "nodes with copies on other ranks"),
    ):
        place = _place(figure, left, 0.6, 0.75 * WIDTH, 7.4)
        axes = figure.add_axes(place, projection="3d")
        axes.set_box_aspect(tuple(extent), zoom=0.95)  # changes an array in place
        axes.locator_params(nbins=5)
        x, y, *_ = _place(figure, left + LEFT, figure.get_figheight() - 1.4, 0, 0)
        figure.text(x, y, heading, fontsize=15)
        for name, start, end in zip("xyz", low, high, strict=True):
            middle, half = (start + end) / 2, extent["xyz".index(name)] / 2
            axes.set(**{f"{name}lim": (middle - half, middle + half), f"{name}label": name})
            getattr(axes, f"{name}axis").set_pane_color(GROUND)
        _scatter(axes, pos[chosen], copied[chosen], owner[chosen], palette, size)
        _labels(axes, pos[chosen], owner[chosen], len(palette))
    return figure


def _marker(pos: Array, area: float) -> float:
    """Return the size of markers in square points, so that neighbours nearly touch."""
    if not len(pos):
        return 1.0
    low, extent = pos.min(axis=0), np.ptp(pos, axis=0)
    extent[extent == 0] = 1
    # nodes may leave most of the picture empty: count the occupied fields of a raster
    across = max(1, int(np.sqrt(len(pos) / 8)))
    field = np.minimum(((pos - low) / extent * across).astype(int), across - 1)
    taken = len(np.unique(field[:, 0] * across + field[:, 1])) / across**2
    return float(np.clip(0.8 * area * taken / len(pos), 0.3, 150))


def _scatter(
    axes: Any, pos: Array, copied: Array, owner: Array, palette: Array, size: float
) -> None:
    light = np.where(copied, DARKER, 1.0)[:, None]
    last = np.argsort(copied, kind="stable")  # nodes with copies lie on top, in the plane
    options = {"depthshade": False} if pos.shape[1] == 3 else {}
    colour = (palette[owner] * light)[last]
    axes.scatter(*pos[last].T, c=colour, s=size, linewidths=0, rasterized=True, **options)


def _labels(axes: Any, pos: Array, owner: Array, ranks: int, place: Array | None = None) -> None:
    """Write each rank at its node nearest to its centre, measured by `place`."""
    place = pos if place is None else place
    if ranks <= len(PALETTE) or not len(pos):
        return
    spread = place.var(axis=0).sum()
    for rank in range(ranks):
        own = np.flatnonzero(owner == rank)
        # nodes scattered everywhere have no centre
        if len(own) and place[own].var(axis=0).sum() <= 0.8 * spread:
            away = np.square(place[own] - place[own].mean(axis=0)).sum(axis=1)
            axes.text(
                *pos[own[away.argmin()]],
                str(rank),
                ha="center",
                va="center",
                fontsize=11 if ranks <= 32 else 9,
                zorder=10,
                bbox={"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 1.5},
            )


def _rgb(numbers: Sequence[int]) -> Array:
    """Return colours of the palette as (P, 3), from 0 to 1."""
    hexes = [PALETTE[number].removeprefix("#") for number in numbers]
    return np.array([[int(h[i : i + 2], 16) / 255 for i in (0, 2, 4)] for h in hexes])
