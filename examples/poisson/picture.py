"""Draw a plate: its parts, a right-hand side, its solution, what the network makes of it."""

from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.tri import Triangulation
from mesh import triangles

INK = "#22272b"
PALETTE = ["#3f6fa3", "#e3a446", "#5f9e76", "#b9586c", "#7f70b3", "#4fa9b8", "#a27a55", "#93a04a"]


def draw(
    path: Path,
    pos: np.ndarray,
    rank: np.ndarray,
    f: np.ndarray,
    solutions: np.ndarray,
    predictions: np.ndarray,
) -> None:
    """Save a picture in the format that the suffix of `path` says.

    Of each node: ``pos`` (N, 2); ``rank`` (N,), which owns it; ``f`` (N,), the first of
    the right-hand sides; their ``solutions`` and ``predictions`` (N, fields).
    """
    true, found = solutions[:, 0], predictions[:, 0]
    mesh = Triangulation(*pos.T, triangles(pos))
    error = found - true
    low, high = min(true.min(), found.min()), max(true.max(), found.max())
    of_f, of_error = np.abs(f).max(), np.abs(error).max()
    share = 100 * np.sqrt(np.sum(error**2) / np.sum(true**2))
    with rc_context({"font.size": 11, "text.color": INK, "axes.labelcolor": INK}):
        figure = Figure(figsize=(14, 8.4), dpi=90, facecolor="white", layout="constrained")
        panels = figure.subplots(2, 3).flat
        partition(next(panels), mesh, rank)
        for heading, values, limits, colours, label in (
            ("A right-hand side, held out", f, (-of_f, of_f), "PuOr_r", "f"),
            ("Finite elements", true, (low, high), "viridis", "u"),
            ("The network", found, (low, high), "viridis", "u"),
            (
                f"Its error, {share:.1f} %",
                error,
                (-of_error, of_error),
                "RdBu_r",
                "difference in u",
            ),
        ):
            panel = next(panels)
            image = panel.tricontourf(mesh, values, np.linspace(*limits, 21), cmap=colours)
            ticks = np.linspace(*limits, 5)
            figure.colorbar(image, ax=panel, label=label, shrink=0.8, ticks=ticks, format="%.2g")
            frame(panel, heading)
        compare(next(panels), solutions, predictions)
        figure.savefig(path)


def partition(panel: Axes, mesh: Triangulation, rank: np.ndarray) -> None:
    """The nodes in the colour of their rank, and the mesh."""
    ranks = int(rank.max()) + 1
    panel.triplot(mesh, color="#b9c0c6", linewidth=0.4, zorder=0)
    for owner in range(ranks):
        own = rank == owner
        colour = PALETTE[owner % len(PALETTE)]
        panel.scatter(mesh.x[own], mesh.y[own], s=7, color=colour, label=f"rank {owner}")
    panel.legend(loc="upper right", frameon=False, markerscale=2.5)
    frame(panel, f"The mesh, {len(rank):,} nodes")


def frame(panel: Axes, heading: str) -> None:
    panel.set(aspect="equal", xlabel="x", ylabel="y", xticks=[0, 0.5, 1], yticks=[0, 0.5, 1])
    panel.set_title(heading, loc="left", fontsize=13)
    panel.spines[:].set_visible(False)


def compare(panel: Axes, solutions: np.ndarray, predictions: np.ndarray) -> None:
    """All held-out solutions at all nodes."""
    ends = solutions.min(), solutions.max()
    panel.plot(ends, ends, color=INK, linewidth=0.8, label="equal")
    panel.plot(solutions.ravel(), predictions.ravel(), ",", color=PALETTE[0], alpha=0.3)
    panel.set(xlabel="u of finite elements", ylabel="u of the network")
    panel.set_title(f"{solutions.shape[1]} held-out solutions, all nodes", loc="left", fontsize=13)
    panel.legend(loc="upper left", frameon=False)
    panel.spines[["top", "right"]].set_visible(False)
