"""Draw the ocean: its mesh by rank, a disturbance, sea levels after a step, and all errors."""

import sys
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.tri import Triangulation
from mesh import RADIUS, Ocean
from torch import Tensor
from torch_geometric.data import Data

from varcomm import _figures as figures

sys.path.append(str(Path(__file__).parents[2] / "docs" / "_ext"))
from dark import save

WEST = 20  # the maps begin at this meridian, in Africa, which leaves each ocean in one piece
COLOURS = dict(zip(("MeshGraphNet", "Transolver"), figures.CURVES, strict=False))


def draw(
    path: Path,
    ocean: Ocean,
    rank: np.ndarray,
    data: Data,
    errors: dict[tuple[float, str], float],
    found: dict[str, Tensor],
) -> None:
    """Save a picture of the first held-out field after the last of the steps."""
    lat = np.rad2deg(np.arcsin(ocean.pos[:, 2] / RADIUS))
    lon = (np.rad2deg(np.arctan2(ocean.pos[:, 1], ocean.pos[:, 0])) - WEST) % 360 + WEST
    around = np.ptp(lon[ocean.triangle], axis=1) > 180  # over the edge of the map
    mesh = Triangulation(lon, lat, ocean.triangle[~around])
    hours = [*errors][-1][0]
    before, true = data.disturbance[:, 0].numpy(), data.level[:, 0, -1].numpy()
    with rc_context(figures.style()):
        figure = Figure((figures.WIDTH, 7.2))
        panels = figure.subplots(3, 2)
        figure.subplots_adjust(0.01, 0.08, 0.99, 0.96, wspace=0.05, hspace=0.5)
        partition(panels[0, 0], mesh, rank)
        world_map(panels[0, 1], mesh, before, np.abs(before).max(), "Disturbance, held out")
        maps = {f"Exact, after {hours:g} hours": true}
        maps |= {name: field.numpy() for name, field in found.items()}
        for panel, (title, values) in zip(panels.flat[2:], maps.items(), strict=False):
            world_map(panel, mesh, values, np.abs(true).max(), title)
        for panel in panels.flat[2 + len(maps) :]:
            panel.axis("off")
        bars(panels[2, 1].inset_axes((0.17, -0.05, 0.83, 0.95)), errors)
        save(figure, path)


def frame(panel: Axes, title: str) -> None:
    panel.set(xlim=(WEST, WEST + 360), ylim=(-80, 90), aspect="equal", xticks=[], yticks=[])
    panel.set_facecolor(figures.LAND)
    panel.spines[:].set_visible(False)
    panel.set_title(title)


def world_map(panel: Axes, mesh: Triangulation, values: np.ndarray, limit: float, title: str):
    look = {"shading": "gouraud", "cmap": "RdBu_r", "vmin": -limit, "vmax": limit}
    image = panel.tripcolor(mesh, values, rasterized=True, **look)
    frame(panel, title)
    place = panel.inset_axes((0.07, -0.1, 0.45, 0.05))
    bar = panel.figure.colorbar(image, cax=place, orientation="horizontal", format="%.2g")
    bar.set_ticks([-limit, 0, limit])
    bar.outline.set_visible(False)
    panel.text(0.57, -0.08, "sea level (m)", transform=panel.transAxes, va="center")


def partition(panel: Axes, mesh: Triangulation, rank: np.ndarray) -> None:
    """The sides of the triangles in the colour of their end's rank."""
    ranks = int(rank.max()) + 1
    colours = [figures.LINES[each % len(figures.LINES)] for each in range(ranks)]
    ends = np.stack([mesh.x, mesh.y], axis=1)[mesh.edges]
    sides = [colours[each] for each in rank[mesh.edges[:, 0]]]
    panel.add_collection(LineCollection(ends, colors=sides, linewidths=0.3))
    frame(panel, f"Mesh of {len(rank):,} nodes")
    marks = [Patch(color=colour, label=f"rank {each}") for each, colour in enumerate(colours)]
    below = {"loc": "upper left", "bbox_to_anchor": (0, 0), "handlelength": 1, "borderpad": 0}
    panel.legend(handles=marks, ncols=min(ranks, 4), **below)


def bars(panel: Axes, errors: dict[tuple[float, str], float]) -> None:
    """The relative error of each model for each step."""
    hours = list(dict.fromkeys(step for step, _ in errors))
    models = list(dict.fromkeys(name for _, name in errors))
    for place, name in enumerate(models):
        left = np.arange(len(hours)) + (place - (len(models) - 1) / 2) * 0.4
        drawn = panel.bar(
            left, [100 * errors[step, name] for step in hours], 0.38, color=COLOURS[name]
        )
        panel.bar_label(drawn, fmt="%.1f", padding=1)
    panel.set_xticks(np.arange(len(hours)), [f"{step:g} h" for step in hours])
    panel.set(xlabel="time step", ylabel="relative error (%)")
    panel.margins(y=0.2)
    marks = [Patch(color=COLOURS[name], label=name) for name in models]
    above = {"loc": "lower center", "bbox_to_anchor": (0.45, 0.97), "columnspacing": 1}
    panel.legend(handles=marks, ncols=2, handlelength=1, **above)
