"""Draw a forecast: how grid and mesh are split, the truth, the forecast, the error."""

import sys
from pathlib import Path

import numpy as np
from climate import read
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Circle, Patch
from mesh import on_sphere
from sea_months import MONTHS
from split import Owner
from torch_geometric.data import HeteroData

from varcomm import _figures as figures

sys.path.append(str(Path(__file__).parents[2] / "docs" / "_ext"))
from dark import save

WEST, STEP = 20, 2  # where the grid begins, in Africa, and its spacing, in degrees


def draw(path: Path, data: HeteroData, owner: Owner, change: np.ndarray, start: int) -> None:
    """Save a globe and three maps of the forecast that starts at a month, of `change` (12, G)."""
    sst = read(["sst"])["sst"]
    truth = sst[(start + 1) % 12] - sst[start]
    error = change[start] - truth
    rmse = np.sqrt(np.average(error**2, weights=data["grid"].area[:, 0]))
    lat, lon = places(data)
    month, following = MONTHS[start], MONTHS[(start + 1) % 12]
    limit = np.percentile(np.abs(truth), 99)
    image = ScalarMappable(Normalize(-limit, limit), "RdBu_r")

    with rc_context(figures.style()):
        figure = Figure((figures.WIDTH, 4.8), layout="constrained")
        panels = figure.subplots(2, 2)
        globe(panels[0, 0], data, owner)
        maps = {
            f"Truth: change from {month} to {following}": truth,
            f"Forecast ({following} is held out)": change[start],
            f"Error: RMSE {rmse:.2f} °C": error,
        }
        for ax, (title, values) in zip(panels.flat[1:], maps.items(), strict=True):
            cells = np.full((180 // STEP, 360 // STEP), np.nan)
            cells[((lat + 90) // STEP).astype(int), ((lon - WEST) % 360 // STEP).astype(int)] = (
                values
            )
            world_map(ax, cells, image)
            ax.set_title(title)
        below = {"location": "bottom", "shrink": 0.7, "aspect": 40, "extend": "both"}
        label = "change of the sea surface temperature in a month (°C)"
        figure.colorbar(image, ax=panels, label=label, **below)
        save(figure, path)


def places(data: HeteroData) -> tuple[np.ndarray, np.ndarray]:
    """Latitude and longitude (G,) of the cells, in degrees."""
    x, y, z = data["grid"].pos.numpy().T
    return np.rad2deg(np.arcsin(z)), np.rad2deg(np.arctan2(y, x))


def world_map(ax: Axes, cells: np.ndarray, image: ScalarMappable) -> None:
    ax.set_facecolor(figures.LAND)
    extent = (WEST, WEST + 360, -90, 90)
    place = {"origin": "lower", "extent": extent, "interpolation": "nearest"}
    ax.imshow(cells, cmap=image.cmap, norm=image.norm, **place)
    ax.set_ylim(-80, 84)
    ax.set_xticks([60, 180, 300], ["60°E", "180°", "60°W"])
    ax.set_yticks([-60, 0, 60], ["60°S", "0°", "60°N"])


def view(data: HeteroData, owner: Owner) -> np.ndarray:
    """Turn positions (..., 3) so that edges between ranks are in front: right, up, to the eye."""
    edges = data["mesh", "to", "grid"].edge_index
    between = owner["mesh"][edges[0]] != owner["grid"][edges[1]]
    places = data["grid"].pos[edges[1, between]].numpy()
    towards = on_sphere(np.full(36, 15), np.arange(0, 360, 10))
    eye = towards[(towards @ places.T).clip(0).sum(axis=1).argmax()]
    right = np.array([-eye[1], eye[0], 0]) / np.hypot(*eye[:2])
    return np.stack([right, np.cross(eye, right), eye], axis=1)


def globe(ax: Axes, data: HeteroData, owner: Owner) -> None:
    """Cells of the grid, pale, and the mesh's shortest edges, in the colours of their ranks."""
    turn = view(data, owner)
    lat, lon = places(data)
    square = [(-1, -1), (-1, 1), (1, 1), (1, -1)]
    corners = np.stack([on_sphere(lat + n, lon + e) for n, e in square], axis=1) @ turn
    ranks = owner["grid"].numpy()
    colours = np.array(figures.rank_colours(int(ranks.max()) + 1))
    front = corners[:, :, 2].min(axis=1) > 0
    ax.add_patch(Circle((0, 0), 1, color=figures.LAND))
    pale = 0.5 * colours[ranks[front]] + 0.5
    ax.add_collection(PolyCollection(corners[front, :, :2], facecolors=pale))

    ends = data["mesh", "to", "mesh"].edge_index.numpy()
    lines = (data["mesh"].pos.numpy() @ turn)[ends.T]
    length = np.linalg.norm(lines[:, 0] - lines[:, 1], axis=1)
    shown = (lines[:, :, 2].min(axis=1) > 0) & (ends[0] < ends[1]) & (length < 1.5 * length.min())
    colour = colours[owner["mesh"].numpy()[ends[1, shown]]]
    ax.add_collection(LineCollection(lines[shown, :, :2], colors=colour, linewidths=0.7))
    ax.set(xlim=(-1.02, 3.6), ylim=(-1.02, 1.02), aspect="equal", anchor="W")
    ax.axis("off")
    ax.set_title("Grid and mesh by rank")
    legend = [Patch(color=colour, label=f"rank {rank}") for rank, colour in enumerate(colours)]
    legend += [
        Patch(color=figures.PALE, alpha=0.4, label="pale: grid"),
        Line2D([], [], color=figures.PALE, linewidth=1, label="lines: mesh"),
    ]
    ax.legend(handles=legend, loc="center right", bbox_to_anchor=(1.02, 0.5), handlelength=1)
