"""Picture of scaling: time of a step by number of ranks, and its parts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from varcomm.errors import ArgumentError
from varcomm.simulate.scaling import Scaling

__all__ = ["draw"]

# Attributes of a point, their names, and colours for readers who confuse red and green.
_PARTS = (
    ("busy", "arithmetic and memory", "#0072b2"),
    ("launching", "launching kernels", "#56b4e9"),
    ("halo_seconds", "halo exchanges", "#e69f00"),
    ("sum_seconds", "sums of gradients and loss", "#d55e00"),
)
_INK, _PALE = "#222222", "#8a8a8a"
_MARGIN = 1.9  # factor beside the first and the last number of ranks


def draw(scalings: Sequence[Scaling], path: Path, title: str, notes: Sequence[str]) -> None:
    """Draw scalings side by side, with a note above each; needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4 * len(scalings), 5.0), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12, color=_INK)
    panels = figure.subplots(1, len(scalings), squeeze=False)[0]
    for axes, scaling, note in zip(panels, scalings, notes, strict=True):
        axes.set_title(note, fontsize=10, color=_INK)
        _panel(axes, scaling)
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise ArgumentError(f"cannot write the picture: {error}.") from error


def _panel(axes: Any, scaling: Scaling) -> None:
    points, first = scaling.points, scaling.points[0]
    ranks = [point.ranks for point in points]
    total = [1e3 * point.seconds for point in points]
    share = first.seconds * first.ranks / first.nodes
    ideal = [1e3 * share * point.nodes / point.ranks for point in points]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.plot(ranks, total, "-o", color=_INK, linewidth=2.6, markersize=4, zorder=4, label="a step")
    low = min(total)
    for name, words, colour in _PARTS:
        parts = [(point.ranks, 1e3 * getattr(point, name)) for point in points]
        if shown := [(rank, value) for rank, value in parts if value > 0]:
            x, y = zip(*shown, strict=True)
            axes.plot(
                x, y, "-o", color=colour, linewidth=1.4, markersize=2.5, zorder=3, label=words
            )
            low = min(low, *y)
    axes.plot(ranks, ideal, "--", color=_PALE, linewidth=1.2, label="ideal")
    axes.set_ylim(low / 6, max(total + ideal) * 4)
    axes.set_xlim(ranks[0] / _MARGIN, ranks[-1] * _MARGIN)
    _shade_full(axes, scaling)
    every = slice(None, None, 1 if len(ranks) < 8 else 2)
    for point, efficiency in list(zip(points, scaling.efficiency, strict=True))[every]:
        at: Any = {"textcoords": "offset points", "xytext": (0, 9), "ha": "center"}
        place = (point.ranks, 1e3 * point.seconds)
        axes.annotate(f"{efficiency:.0%}", place, fontsize=8, color=_INK, **at)
    axes.set_xticks(ranks[every])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    axes.set_xlabel("ranks")
    axes.set_ylabel("ms per step on the slowest rank; above it, the efficiency")
    axes.grid(which="major", color="#e6e6e6", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper right", fontsize=8.5, frameon=False)


def _shade_full(axes: Any, scaling: Scaling) -> None:
    """Shade the numbers of ranks for which a rank has too little memory."""
    ranks, memory = [point.ranks for point in scaling.points], scaling.machine.memory
    full = [point.ranks for point in scaling.points if point.memory > memory]
    if full:
        after = [rank for rank in ranks if rank > full[-1]]
        edge = (full[-1] * after[0]) ** 0.5 if after else ranks[-1] * _MARGIN
        axes.axvspan(ranks[0] / _MARGIN, edge, color="#f3f0e8", zorder=0)
        place = (ranks[0] / _MARGIN * 1.1, axes.get_ylim()[0] * 1.15)
        words = f"more than the {memory / 1e9:.0f} GB\nof a rank"
        axes.text(*place, words, fontsize=8.5, color=_PALE, va="bottom")
