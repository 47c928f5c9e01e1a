"""A picture of scaling: what a step takes, and which part of it limits."""

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

# Colours that are told apart without red and green, and what they stand for.
_PARTS = (
    ("busy", "arithmetic and memory", "#0072b2"),
    ("launching", "launching kernels", "#56b4e9"),
    ("halo_seconds", "halo exchanges", "#e69f00"),
    ("sum_seconds", "sums of gradients and loss", "#d55e00"),
)
_INK, _PALE = "#222222", "#8a8a8a"

# Beside the first and the last number of ranks.
_MARGIN = 1.9


def figure_types(path: str | os.PathLike[str]) -> Any:
    """Return matplotlib's figure and its canvas, before anything is computed.

    Raises
    ------
    ArgumentError
        If the file's name does not end in a format that can be written.
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
        A panel each.
    path : path
        A PNG, SVG or PDF.
    title : str
        Above all.
    notes : sequence of str
        A line above each panel.

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
        _panel(axes, scaling, note)
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise ArgumentError(f"cannot write the picture: {error}.") from error


def _panel(axes: Any, scaling: Scaling, note: str) -> None:
    points = scaling.points
    ranks = [point.ranks for point in points]
    total = [1e3 * point.seconds for point in points]
    first = points[0]
    ideal = [
        1e3 * first.seconds * point.nodes / first.nodes * first.ranks / point.ranks
        for point in points
    ]
    axes.set_title(note, fontsize=10, color=_INK)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.plot(ranks, ideal, "--", color=_PALE, linewidth=1.2)
    ends = [(ideal[-1], "ideal", _PALE)]
    lines = [(total, "a step", _INK)]
    for name, words, colour in _PARTS:
        values = [1e3 * getattr(point, name) for point in points]
        lines.append((values, words, colour))
    low = min(v for values, *_ in lines for v in values if v > 0)
    for values, words, colour in lines:
        is_step = colour == _INK
        shown = [(rank, v) for rank, v in zip(ranks, values, strict=True) if v > 0]
        if shown:
            axes.plot(
                *zip(*shown, strict=True),
                "-o",
                color=colour,
                zorder=4 if is_step else 3,
                linewidth=2.6 if is_step else 1.4,
                markersize=4 if is_step else 2.5,
            )
            ends.append((shown[-1][1], words, colour))
    axes.set_ylim(low / 6, max(total + ideal) * 4)
    axes.set_xlim(ranks[0] / _MARGIN, ranks[-1] * _MARGIN)
    _label_ends(axes, ends)
    _memory(axes, scaling)
    _efficiencies(axes, scaling, total)
    axes.set_xticks(ranks[:: 1 if len(ranks) < 8 else 2])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    axes.set_xlabel("ranks")
    axes.set_ylabel("ms a step on the slowest rank; above it, the efficiency")
    axes.grid(which="major", color="#e6e6e6", linewidth=0.7)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _label_ends(axes: Any, ends: list[tuple[float, str, str]]) -> None:
    """Write each line's name beside its end, so that no two names overlap."""
    low, high = (log10(limit) for limit in axes.get_ylim())
    step = 0.052
    places = sorted((log10(value), words, colour) for value, words, colour in ends)
    at = [(height - low) / (high - low) for height, *_ in places]
    for i in range(1, len(at)):
        at[i] = max(at[i], at[i - 1] + step)
    if at and at[-1] > 1.0:  # push down what does not fit
        at[-1] = 1.0
        for i in range(len(at) - 2, -1, -1):
            at[i] = min(at[i], at[i + 1] - step)
    for height, (_, words, colour) in zip(at, places, strict=True):
        axes.annotate(
            words,
            (1.01, height),
            xycoords="axes fraction",
            color=colour,
            fontsize=8.5,
            va="center",
            fontweight="bold" if colour == _INK else "normal",
            annotation_clip=False,
        )


def _memory(axes: Any, scaling: Scaling) -> None:
    """Shade numbers of ranks for which a rank has too little memory."""
    ranks = [point.ranks for point in scaling.points]
    full = [point.ranks for point in scaling.points if point.memory > scaling.machine.memory]
    if not full:
        return
    after = [rank for rank in ranks if rank > full[-1]]
    edge = (full[-1] * after[0]) ** 0.5 if after else ranks[-1] * _MARGIN
    axes.axvspan(ranks[0] / _MARGIN, edge, color="#f3f0e8", zorder=0)
    axes.text(
        ranks[0] / _MARGIN * 1.1,
        axes.get_ylim()[0] * 1.15,
        f"more than the {scaling.machine.memory / 1e9:.0f} GB\nof a rank",
        fontsize=8.5,
        color=_PALE,
        va="bottom",
    )


def _efficiencies(axes: Any, scaling: Scaling, total: list[float]) -> None:
    """Write the efficiency above the points of the step."""
    every = 1 if len(total) < 8 else 2
    for i, efficiency in enumerate(scaling.efficiency):
        if i % every == 0:
            axes.annotate(
                f"{efficiency:.0%}",
                (scaling.points[i].ranks, total[i]),
                textcoords="offset points",
                xytext=(0, 9),
                ha="center",
                fontsize=8,
                color=_INK,
            )
