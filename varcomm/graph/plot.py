"""``plot``: a picture of the owner of each node, and of the nodes with copies."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from varcomm._figures import DARKER, WIDTH, rank_colours, style
from varcomm.errors import ArgumentError
from varcomm.graph.build.pyg_data import ends
from varcomm.graph.libraries import package
from varcomm.graph.mesh.cell_lists import CellLists
from varcomm.graph.mesh.mesh import Mesh, cell_lists
from varcomm.graph.partitioned_graph import NodeType, PartitionedGraph
from varcomm.graph.ragged import Array, Ragged
from varcomm.graph.report import Report
from varcomm.ops.gather_v import gather_v
from varcomm.sizes import ShardSizes
from varcomm.transport.agreement import agree, agree_and_share, compare

_WHAT = "graph.plot"
_MOST = 200_000  # drawn nodes
_EDGE = (1.0, 1.0, 1.0, 0.6)  # of cells
_TALLEST, _AROUND = 5.0, 1.3  # inches of the axes at most, and of all else


def plot(
    graph: PartitionedGraph,
    path: str | os.PathLike[str],
    node_type: NodeType = None,
    mesh: object = None,
) -> None:
    """Draw each node in the colour of its owner, darker if another rank has a copy.

    Collective: rank 0 draws with matplotlib. With ``mesh``, the picture shows cells: the cells
    that are nodes, or for each point the nearest part of its cells. Volumes are drawn by their
    outer faces, with a second picture of the cells between ranks. Without ``mesh``, the picture
    shows nodes as dots at the attribute ``pos``, (n, 2) or (n, 3). If there are more than
    200,000 nodes, each rank draws the same random share of its nodes.
    Communication: at most 32 bytes per drawn node.

    Parameters
    ----------
    path : path
        File that rank 0 writes or replaces, in the format of its suffix: .png, .pdf, .svg, ...
    node_type : str, optional
        The type of nodes to draw, in a graph with several types.
    mesh : Mesh, optional
        The mesh of the graph, which only rank 0 needs.

    Raises
    ------
    ArgumentError
        On every rank, if positions are missing or invalid, `mesh` has another number of nodes,
        or rank 0 cannot write the file.
    DisagreementError
        On every rank, if `node_type` differs across ranks; the `path` of rank 0 counts.
    MissingPackageError
        On every rank, if matplotlib is not installed on rank 0.
    """
    group = graph.group

    def local() -> tuple[CellLists | None, torch.Tensor]:
        if group.rank == 0:
            check_target(path)
        if node_type not in graph.node_shards:
            raise ArgumentError(
                f"node_type must be one of {list(graph.node_shards)}; got {node_type!r}."
            )
        nodes = graph.node_shards[node_type]
        lists = lists_to_draw(mesh, nodes.sizes.total) if group.rank == 0 else None
        copied = torch.zeros(nodes.num_owned, 1, dtype=torch.float64)
        for edge_type, edges in graph.edge_shards.items():
            if ends(edge_type)[0] == node_type:
                copied[edges.plan.send_index.cpu()] = 1
        return lists, copied

    (lists, copied), by_cells = agree_and_share(_WHAT, local, lambda own: own[0] is not None, group)
    compare(group, {"operation": _WHAT, "node_type": node_type})
    nodes = graph.node_shards[node_type]
    total, device, report = nodes.sizes.total, group.device(), graph.report()
    if by_cells[0]:
        copied = nodes.gather(copied.to(device), dst=0).cpu()
        mine = torch.full((nodes.num_owned,), group.rank, device=device)
        owner = nodes.gather(mine, dst=0).cpu().numpy()
        rows = copied
    else:
        pos = agree(_WHAT, lambda: places(nodes.attributes.get("pos")), group)
        compare(group, {"operation": _WHAT, "columns of pos": pos.shape[1]})
        rows = torch.cat([pos, copied], dim=1)
        if total > _MOST:
            chance = torch.Generator().manual_seed(group.rank)
            drawn = torch.rand(len(rows), generator=chance, dtype=torch.float64) < _MOST / total
            rows = rows[drawn]
        sizes = ShardSizes.from_local(len(rows), group.process_group)
        rows = gather_v(rows.to(device), sizes, dst=0, group=group.process_group).cpu()
        owner = np.repeat(np.arange(group.size), sizes)

    def drawn_by_first() -> None:
        if group.rank == 0:
            try:
                if lists is None:
                    draw(Path(path), rows.numpy(), owner, total, report)
                else:
                    of_cells = isinstance(mesh, Mesh) and mesh.nodes == "cells"
                    draw_cells(Path(path), lists, of_cells, copied.numpy()[:, 0] > 0, owner, report)
            except OSError as error:
                raise ArgumentError(f"{path} cannot be written: {error}.") from error

    agree(_WHAT, drawn_by_first, group)


def lists_to_draw(mesh: Any, nodes: int) -> CellLists | None:
    """Return the cells to draw; None without a mesh, or for a mesh of lines."""
    if mesh is None:
        return None
    if not isinstance(mesh, Mesh) or mesh.data.num_nodes != nodes:
        got = f"one of {mesh.data.num_nodes}" if isinstance(mesh, Mesh) else repr(mesh)
        raise ArgumentError(f"mesh must be the mesh of the graph, with {nodes} nodes; got {got}.")
    lists = cell_lists(mesh)
    return lists if lists.dim > 1 else None


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
    figure = package("matplotlib.figure", "plot").Figure()
    where, known = Path(path), sorted(figure.canvas.get_supported_filetypes())
    if where.suffix.lower().removeprefix(".") not in known:
        raise ArgumentError(f"the picture {str(where)!r} must end in one of .{', .'.join(known)}.")
    if not where.parent.is_dir():
        raise ArgumentError(f"there is no folder {where.parent}. Create it or pass another path.")


def draw(path: Path, rows: Array, owner: Array, total: int, report: Report) -> None:
    """Draw nodes into a file; `rows` are coordinates, and whether a node has copies."""
    pos, copied = rows[:, :-1], rows[:, -1] > 0
    note = f"{len(rows):,} nodes are drawn, chosen at random" if len(rows) < total else ""
    colour = _shades(owner, copied, report)
    # nodes with copies lie on top; in space, where they are hidden, a second panel has them alone
    panels = {"": np.argsort(copied, kind="stable")}
    if pos.shape[1] == 3:
        panels["nodes with copies"] = np.flatnonzero(copied)

    def fill(axes: Any, heading: str, inch: float) -> None:
        nodes = panels[heading]
        if pos.shape[1] == 3:  # by the nodes that are visible from one side
            size = np.clip(2500 / max(len(pos), 1) ** (2 / 3), 0.5, 40)
        else:  # neighbours nearly touch
            area = np.prod(_extent(pos)[:2]) * (72 * inch) ** 2
            size = np.clip(0.8 * area / max(len(pos), 1), 0.3, 150)
        own: Any = {"c": colour[nodes], "s": size, "linewidths": 0, "rasterized": True}
        more = {"depthshade": False} if pos.shape[1] == 3 else {}
        axes.scatter(*pos[nodes].T, **own, **more)

    _picture(path, pos, list(panels), fill, note, report)


def draw_cells(
    path: Path, lists: CellLists, of_cells: bool, copied: Array, owner: Array, report: Report
) -> None:
    """Draw cells into a file, or the share of each cell that is nearest to each of its points.

    `copied` and `owner` have an entry per node, by id.
    """
    from matplotlib.collections import PolyCollection
    from mpl_toolkits.mplot3d.art3d import Poly3DCollection

    colour = _shades(owner, copied, report)
    in_space = bool(lists.points[:, 2].any())
    if of_cells:
        with_copies = copied
    else:  # cells with points of several ranks
        of_corner = owner[lists.corners.values]
        starts = lists.corners.ends - lists.corners.counts
        with_copies = np.minimum.reduceat(of_corner, starts) != np.maximum.reduceat(
            of_corner, starts
        )
    panels = {"": np.ones(len(lists.types), bool)}
    if in_space and lists.dim == 3:
        noun = "cells with copies" if of_cells else "cells between ranks"
        panels[noun] = with_copies
    points = lists.points if in_space else lists.points[:, :2]

    def fill(axes: Any, heading: str, inch: float) -> None:
        polygons, cell = lists.surface(panels[heading])
        # lines between cells, thin beside the small ones among them
        small = np.quantile(_sides(points, polygons), 0.1) * 72 * inch if len(cell) else 0
        line = min(0.3, 0.05 * small) if small > 1 else 0.0
        for count in np.unique(polygons.counts):
            same = np.flatnonzero(polygons.counts == count)
            ids = polygons.chosen(same).values.reshape(-1, count)
            shape = points[ids]
            if of_cells:
                faces = colour[cell[same]]
            else:  # each corner has the part that is nearest to it
                middle = (shape + np.roll(shape, -1, axis=1)) / 2
                centre = np.broadcast_to(shape.mean(axis=1, keepdims=True), shape.shape)
                kites = np.stack([shape, middle, centre, np.roll(middle, 1, axis=1)], axis=2)
                shape, faces = kites.reshape(-1, 4, points.shape[1]), colour[ids.reshape(-1)]
            kind: Any = Poly3DCollection if in_space else PolyCollection
            edge: Any = _EDGE if of_cells and line else faces
            drawn = kind(shape, facecolors=faces, edgecolors=edge, linewidths=line or 0.1)
            drawn.set_rasterized(True)
            (axes.add_collection3d if in_space else axes.add_collection)(drawn)
            if not of_cells and not in_space and line:
                around: Any = points[ids]
                outline = PolyCollection(
                    around, facecolors="none", edgecolors=_EDGE, linewidths=line
                )
                axes.add_collection(outline)
        axes.autoscale_view()

    _picture(path, points, list(panels), fill, "", report)


def _sides(points: Array, polygons: Ragged) -> Array:
    """Return the length of the first side of each polygon."""
    first = polygons.ends - polygons.counts
    sides: Array = np.linalg.norm(
        points[polygons.values[first + 1]] - points[polygons.values[first]], axis=1
    )
    return sides


def _shades(owner: Array, copied: Array, report: Report) -> Array:
    palette = np.array(rank_colours(len(report.owned)))
    shades: Array = palette[owner] * np.where(copied, DARKER, 1.0)[:, None]
    return shades


def _extent(pos: Array) -> Array:
    extent = np.ptp(pos, axis=0) if len(pos) else np.ones(2)
    wide: Array = np.maximum(extent, extent.max() / 50 or 1)
    return wide


def _picture(
    path: Path,
    pos: Array,
    panels: Sequence[str],
    fill: Callable[[Any, str, float], None],
    note: str,
    report: Report,
) -> None:
    """Write a picture of panels, which `fill` draws, with a heading and the ranks below."""
    from matplotlib import rc_context
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    ranks, in_space = len(report.owned), pos.shape[1] == 3
    wide, tall = _extent(pos)[:2]
    inch = min((WIDTH - 0.7) / wide, _TALLEST / tall)
    height = 0.5 * WIDTH + _AROUND if in_space else tall * inch + _AROUND
    lines = [
        f"{sum(report.cut):,} edges between ranks ({100 * report.edge_cut:.1f} %)",
        *([note] if note else []),
    ]
    with rc_context(style()):
        figure = Figure((WIDTH, height), layout="constrained")
        nodes = f"{sum(report.owned):,} nodes on {ranks} rank{'s' * (ranks != 1)}"
        figure.suptitle(f"{nodes} by {report.method}", x=0.02, ha="left")
        for place, heading in enumerate(panels):
            axes: Any = figure.add_subplot(
                1, len(panels), place + 1, projection="3d" if in_space else None
            )
            axes.set_title(heading or "\n".join(lines))
            fill(axes, heading, inch)
            if in_space:
                if len(pos):
                    axes.auto_scale_xyz(*pos.T)
                axes.tick_params(labelsize=8)
            axes.set_aspect("equal")
        palette = ListedColormap(rank_colours(ranks))
        of_rank, ticks = ScalarMappable(Normalize(-0.5, ranks - 0.5), palette), MaxNLocator
        figure.colorbar(
            of_rank,
            ax=figure.axes,
            location="bottom",
            aspect=60,
            ticks=ticks(integer=True),
            label="rank; darker: copied to other ranks",
        )
        figure.savefig(path)
