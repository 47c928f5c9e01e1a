"""Draw a plate: its ranks, a right-hand side, its solution and prediction, all errors."""

import sys
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from matplotlib.tri import Triangulation
from mesh import triangles

from varcomm import _figures as figures

sys.path.append(str(Path(__file__).parents[2] / "docs" / "_ext"))
from dark import save


def draw(
    path: Path,
    pos: np.ndarray,
    rank: np.ndarray,
    f: np.ndarray,
    solutions: np.ndarray,
    predictions: np.ndarray,
) -> None:
    """Save a picture in the format of the suffix of `path`.

    ``pos`` (N, 2) is the place of each node, ``rank`` (N,) its owner, and ``f`` (N,) the first
    right-hand side. ``solutions`` and ``predictions`` are (N, fields).
    """
    true, found = solutions[:, 0], predictions[:, 0]
    mesh = Triangulation(*pos.T, triangles(pos))
    error = found - true
    low, high = min(true.min(), found.min()), max(true.max(), found.max())
    of_f, of_error = np.abs(f).max(), np.abs(error).max()
    share = 100 * np.sqrt(np.sum(error**2) / np.sum(true**2))
    with rc_context(figures.style()):
        figure = Figure((figures.WIDTH, 8.6), layout="constrained")
        panels = figure.subplots(3, 2).flat
        partition(next(panels), mesh, rank)
        for heading, values, limits, colours, label in (
            ("Right-hand side", f, (-of_f, of_f), "PuOr_r", "f"),
            ("Finite elements", true, (low, high), "viridis", "u"),
            ("Network", found, (low, high), "viridis", "u"),
            (f"Error: {share:.1f} %", error, (-of_error, of_error), "RdBu_r", "error"),
        ):
            panel = next(panels)
            image = panel.tricontourf(mesh, values, np.linspace(*limits, 21), cmap=colours)
            bar = figure.colorbar(image, cax=panel.inset_axes((1.05, 0, 0.06, 1)))
            bar.ax.set_title(label)
            bar.locator = MaxNLocator(4)
            bar.update_ticks()
            frame(panel, heading)
        compare(next(panels), solutions, predictions)
        save(figure, path)


def partition(panel: Axes, mesh: Triangulation, rank: np.ndarray) -> None:
    """Draw cells in the colour of their corners' rank; cells between ranks have no colour."""
    ranks = int(rank.max()) + 1
    corners = rank[mesh.triangles]
    owner = np.where((corners == corners[:, :1]).all(axis=1), corners[:, 0], ranks)
    colours = ListedColormap([*figures.rank_colours(ranks), (1.0, 1.0, 1.0)])
    look = {"edgecolors": figures.PALE, "linewidth": 0.15, "vmin": 0, "vmax": ranks}
    panel.tripcolor(mesh, facecolors=owner, cmap=colours, **look)
    marks = [Patch(color=figures.RANKS[owner % 8], label=f"rank {owner}") for owner in range(ranks)]
    # beside the notch
    panel.legend(handles=marks, loc="lower left", bbox_to_anchor=(0.6, 0.6), handlelength=1)
    frame(panel, f"Mesh of {len(rank):,} nodes")


def frame(panel: Axes, heading: str) -> None:
    panel.set(aspect="equal", xlabel="x", ylabel="y", xticks=[0, 0.5, 1], yticks=[0, 0.5, 1])
    panel.set(xlim=(0, 1), ylim=(0, 1))
    panel.set_title(heading)
    panel.spines[:].set_visible(False)


def compare(panel: Axes, solutions: np.ndarray, predictions: np.ndarray) -> None:
    """Draw the error of each held-out solution, and of all."""
    square = ((predictions - solutions) ** 2).sum(axis=0)
    errors = 100 * np.sqrt(square / (solutions**2).sum(axis=0))
    panel.bar(np.arange(1, len(errors) + 1), np.sort(errors), color=figures.CURVES[0])
    everything = 100 * np.sqrt(square.sum() / (solutions**2).sum())
    panel.axhline(everything, color=figures.INK, linewidth=1, linestyle="--")
    panel.set(xticks=[1, len(errors) // 2, len(errors)], box_aspect=1)
    panel.set(xlabel="held-out solution, sorted", ylabel="relative error (%)")
    panel.set_title(f"{len(errors)} solutions: {everything:.1f} % (dashed)")
