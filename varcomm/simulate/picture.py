"""Picture of scaling: time of a step by number of ranks, and its parts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import log10
from pathlib import Path
from typing import Any

from varcomm.errors import ArgumentError, MissingPackageError
from varcomm.simulate.scaling import Scaling

__all__ = ["draw", "figure_types"]

_KINDS = (".png", ".svg", ".pdf")
# Attributes of a point, their names, and colours for readers who confuse red and green.
_PARTS = (
    ("busy", "arithmetic and memory", "#0072b2"),
    ("launching", "launching kernels", "#56b4e9"),
    ("halo_seconds", "halo exchanges", "#e69f00"),
    ("sum_seconds", "sums of gradients and loss", "#d55e00"),
)
_INK, _PALE = "#222222", "#8a8a8a"
_MARGIN = 1.9  # factor beside the first and the last number of ranks


def figure_types(path: str | os.PathLike[str]) -> Any:
    """Return matplotlib's figure and canvas, before anything is computed.

    Raises
    ------
    ArgumentError
        If the suffix of the file is not one of a picture.
    MissingPackageError
        If matplotlib is not installed.
    """
    if Path(path).suffix not in _KINDS:
        raise ArgumentError(f"{path}: name a picture that ends in {', '.join(_KINDS)}.")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackageError(
            'a picture needs matplotlib: pip install "varcomm[plot]".'
        ) from error
    return Figure, FigureCanvasAgg


def draw(
    scalings: Sequence[Scaling], path: str | os.PathLike[str], title: str, notes: Sequence[str]
) -> None:
    """Draw scalings side by side.

    Parameters
    ----------
    scalings : sequence of Scaling
        One panel each.
    path : path
        A PNG, SVG or PDF.
    title : str
        Title of the picture.
    notes : sequence of str
        Title of each panel.

    Raises
    ------
    ArgumentError
        If there is nothing to draw, or the file cannot be written.
    MissingPackageError
        If matplotlib is not installed.
    """
    figure_type, canvas_type = figure_types(path)
    if not scalings:
        raise ArgumentError("there are no scalings to draw.")
    figure = figure_type(figsize=(6.4 * len(scalings), 5.0), layout="constrained")
    canvas_type(figure)
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
    axes.plot(ranks, ideal, "--", color=_PALE, linewidth=1.2)
    axes.plot(ranks, total, "-o", color=_INK, zorder=4, linewidth=2.6, markersize=4)
    ends, low = [(ideal[-1], "ideal", _PALE), (total[-1], "a step", _INK)], min(total)
    for name, words, colour in _PARTS:
        parts = [(point.ranks, 1e3 * getattr(point, name)) for point in points]
        if shown := [(rank, value) for rank, value in parts if value > 0]:
            x, y = zip(*shown, strict=True)
            axes.plot(x, y, "-o", color=colour, zorder=3, linewidth=1.4, markersize=2.5)
            ends.append((y[-1], words, colour))
            low = min(low, *y)
    axes.set_ylim(low / 6, max(total + ideal) * 4)
    axes.set_xlim(ranks[0] / _MARGIN, ranks[-1] * _MARGIN)
    every = 1 if len(ranks) < 8 else 2
    _label_ends(axes, ends)
    _shade_full(axes, scaling)
    for rank, value, efficiency in list(zip(ranks, total, scaling.efficiency, strict=True))[
        ::every
    ]:
        where: Any = {"textcoords": "offset points", "xytext": (0, 9), "ha": "center"}
        axes.annotate(f"{efficiency:.0%}", (rank, value), fontsize=8, color=_INK, **where)
    axes.set_xticks(ranks[::every])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    axes.set_xlabel("ranks")
    axes.set_ylabel("ms per step on the slowest rank; above it, the efficiency")
    axes.grid(which="major", color="#e6e6e6", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)


def _label_ends(axes: Any, ends: list[tuple[float, str, str]]) -> None:
    """Write the name of each line beside its end, without overlap."""
    low, high = (log10(limit) for limit in axes.get_ylim())
    step, ends = 0.052, sorted(ends)
    at = [(log10(value) - low) / (high - low) for value, *_ in ends]
    for i in range(1, len(at)):
        at[i] = max(at[i], at[i - 1] + step)
    at[-1] = min(at[-1], 1.0)
    for i in range(len(at) - 2, -1, -1):
        at[i] = min(at[i], at[i + 1] - step)
    for height, (_, words, colour) in zip(at, ends, strict=True):
        place: Any = {"xycoords": "axes fraction", "va": "center", "annotation_clip": False}
        weight = "bold" if colour == _INK else "normal"
        axes.annotate(words, (1.01, height), color=colour, fontsize=8.5, fontweight=weight, **place)


def _shade_full(axes: Any, scaling: Scaling) -> None:
    """Shade the numbers of ranks for which a rank has too little memory."""
    ranks, room = [point.ranks for point in scaling.points], scaling.machine.memory
    full = [point.ranks for point in scaling.points if point.memory > room]
    if full:
        after = [rank for rank in ranks if rank > full[-1]]
        edge = (full[-1] * after[0]) ** 0.5 if after else ranks[-1] * _MARGIN
        axes.axvspan(ranks[0] / _MARGIN, edge, color="#f3f0e8", zorder=0)
        place = (ranks[0] / _MARGIN * 1.1, axes.get_ylim()[0] * 1.15)
        words = f"more than the {room / 1e9:.0f} GB\nof a rank"
        axes.text(*place, words, fontsize=8.5, color=_PALE, va="bottom")
