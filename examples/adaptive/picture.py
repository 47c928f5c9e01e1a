"""Draw the cells and their ranks, the front, and the cells that each adaptation moves."""

import sys
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from varcomm import _figures as figures

sys.path.append(str(Path(__file__).parents[2] / "docs" / "_ext"))
from dark import save


def draw(
    path: Path, cells: np.ndarray, rank: np.ndarray, u: np.ndarray, history: list[dict[str, float]]
) -> None:
    """Save a picture of cells (N, 3), their ranks and u (N,), in the format of the suffix."""
    with rc_context(figures.style()):
        figure = Figure((figures.WIDTH, 7.0), layout="constrained")
        grid = figure.add_gridspec(2, 2, height_ratios=(1.15, 1))
        ranks = int(rank.max()) + 1
        colours = np.array(figures.rank_colours(ranks))
        parts = figure.add_subplot(grid[0, 0])
        squares(parts, cells, colours[rank])
        parts.set_title("Cells by rank")
        marks = [Patch(color=colour, label=str(each)) for each, colour in enumerate(colours)]
        below = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "columnspacing": 1}
        parts.legend(handles=marks, title="rank", ncols=ranks, handlelength=1, **below)
        front = figure.add_subplot(grid[0, 1])
        faces = squares(front, cells, None)
        faces.set(array=u, cmap="viridis", clim=(0, 1))
        front.set_title("Front")
        # a part of the panel, so that both maps have one size
        bar = front.inset_axes((0.15, -0.08, 0.7, 0.03))
        figure.colorbar(faces, cax=bar, orientation="horizontal", label="u")
        numbers = np.arange(len(history))
        column = {name: np.array([row[name] for row in history]) for name in history[0]}
        panel = figure.add_subplot(grid[1, 0])
        panel.plot(numbers, column["before"], color=figures.CURVES[1], label="before rebalance")
        panel.plot(numbers, column["after"], color=figures.CURVES[0], label="after")
        panel.set(xlabel="adaptation", ylabel="largest part / mean part")
        panel.margins(y=0.2)
        panel.legend(loc="upper left")
        share = figure.add_subplot(grid[1, 1])
        share.bar(numbers, 100 * column["moved"] / column["cells"], color=figures.CURVES[0])
        share.set(xlabel="adaptation", ylabel="moved cells (%)")
        for each in (panel, share):
            each.xaxis.set_major_locator(MaxNLocator(integer=True))
        path.parent.mkdir(parents=True, exist_ok=True)
        save(figure, path)


def squares(panel, cells: np.ndarray, colours: np.ndarray | None) -> PolyCollection:
    size = 0.5 ** cells[:, :1]
    corner = cells[:, 1:] * size
    ring = np.array([[0, 0], [1, 0], [1, 1], [0, 1]])
    corners = corner[:, None] + ring * size[:, None]
    line = 0.3 if colours is not None else 0
    drawn = PolyCollection(corners, facecolors=colours, edgecolors="white", linewidths=line)
    panel.add_collection(drawn)
    panel.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", xticks=[], yticks=[])
    return drawn
