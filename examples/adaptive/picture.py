"""Draw the cells and their ranks, the front, and what each adaptation moved."""

from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from varcomm import figures

INK = figures.INK
PALETTE = figures.RANKS


def draw(
    path: Path, cells: np.ndarray, rank: np.ndarray, u: np.ndarray, history: list[dict[str, float]]
) -> None:
    """Save a picture of cells (N, 3), their ranks and u (N,), in the format of the suffix."""
    with rc_context({"font.size": 12, "text.color": INK, "axes.labelcolor": INK}):
        figure = Figure(figsize=(13, 4.4), dpi=100, facecolor="white", layout="constrained")
        grid = figure.add_gridspec(2, 3)
        squares(figure.add_subplot(grid[:, 0]), cells, np.array(PALETTE)[rank % len(PALETTE)])
        figure.axes[0].set_title("cells by their rank", loc="left")
        front = figure.add_subplot(grid[:, 1])
        faces = squares(front, cells, None)
        faces.set(array=u, cmap="viridis", clim=(0, 1))
        front.set_title("u", loc="left")
        figure.colorbar(faces, ax=front, shrink=0.5)
        numbers = np.arange(len(history))
        column = {name: np.array([row[name] for row in history]) for name in history[0]}
        panel = figure.add_subplot(grid[0, 2])
        panel.plot(numbers, column["before"], color=PALETTE[3], label="before rebalance")
        panel.plot(numbers, column["after"], color=PALETTE[0], label="after")
        panel.set_ylabel("largest part / mean")
        panel.legend(frameon=False, fontsize=11)
        share = figure.add_subplot(grid[1, 2], sharex=panel)
        share.bar(numbers, 100 * column["moved"] / column["cells"], color=PALETTE[1])
        share.set(xlabel="adaptation", ylabel="moved cells, %")
        share.xaxis.set_major_locator(MaxNLocator(integer=True))
        for each in (panel, share):
            each.spines[["top", "right"]].set_visible(False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


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
