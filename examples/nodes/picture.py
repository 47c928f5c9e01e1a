"""Draw a graph without coordinates: who owns its nodes, their parts, what was guessed of them."""

from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

INK = "#22272b"
PALETTE = ["#3f6fa3", "#e3a446", "#5f9e76", "#b9586c", "#7f70b3", "#4fa9b8", "#a27a55", "#93a04a"]
DRAWN = 12_000  # nodes at most


def draw(
    path: Path,
    place: np.ndarray,
    rank: np.ndarray,
    part: np.ndarray,
    guess: np.ndarray,
    curves: dict[str, list[float]],
    simple: dict[str, float],
) -> None:
    """Save a picture in the format that the suffix of `path` says.

    Of each node: ``place`` (N, 2) to draw it at; ``rank`` (N,), which owns it; ``part`` (N,), and
    ``guess`` (N,) of the last model. ``curves`` has the accuracies of each model at each step,
    ``simple`` those of what needs no network.
    """
    with rc_context({"font.size": 11, "text.color": INK, "axes.labelcolor": INK}):
        figure = Figure(figsize=(13, 9.5), dpi=85, facecolor="white", layout="constrained")
        panels = figure.subplots(2, 2)
        drawn = np.random.default_rng(0).permutation(len(place))[:DRAWN]
        last = list(curves)[-1]
        for panel, values, kind, heading in (
            (panels[0, 0], rank, "rank", f"{len(place):,} nodes, and who owns them"),
            (panels[0, 1], part, "part", "Parts of METIS"),
            (panels[1, 0], guess, "part", f"Parts by {last}; wrong in black"),
        ):
            cloud(panel, place[drawn], values[drawn], kind)
            panel.set_title(heading, loc="left", fontsize=13)
        wrong = drawn[guess[drawn] != part[drawn]]
        panels[1, 0].plot(*place[wrong].T, ".", markersize=1.5, markeredgewidth=0, color="black")
        compare(panels[1, 1], curves, simple)
        figure.savefig(path)


def cloud(panel: Axes, place: np.ndarray, values: np.ndarray, kind: str) -> None:
    colours = np.array(PALETTE)[values % len(PALETTE)]
    panel.scatter(*place.T, s=1, c=colours, linewidths=0)
    marks = [
        Line2D([], [], marker="o", linestyle="", color=PALETTE[value % len(PALETTE)])
        for value in range(values.max() + 1)
    ]
    names = [f"{kind} {value}" for value in range(values.max() + 1)]
    panel.legend(
        marks, names, frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5)
    )
    panel.set(xlabel="first component of the distances", ylabel="second component")
    panel.set(xticks=[], yticks=[], aspect="equal")
    panel.spines[["top", "right"]].set_visible(False)


def compare(panel: Axes, curves: dict[str, list[float]], simple: dict[str, float]) -> None:
    """Accuracies over the steps, and those of what needs no training as lines."""
    for (name, shares), colour in zip(curves.items(), PALETTE, strict=False):
        panel.plot(100 * np.array(shares), color=colour, linewidth=2, label=name)
    for (name, share), style in zip(simple.items(), (":", "--", "-."), strict=True):
        panel.axhline(100 * share, color=INK, linewidth=1, linestyle=style, label=name)
    panel.set(xlabel="step", ylabel="right of the nodes not known, in %", ylim=(0, 100))
    panel.set_title("Accuracy", loc="left", fontsize=13)
    panel.legend(frameon=False, loc="upper right", bbox_to_anchor=(1, 0.75))
    panel.spines[["top", "right"]].set_visible(False)
