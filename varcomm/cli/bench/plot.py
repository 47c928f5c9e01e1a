"""The picture: bandwidth against bytes, a line a schedule, a panel an operation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from varcomm.cli.bench.case import COPY, FLOOR, OURS, PEER, Result
from varcomm.cli.bench.text import short_bytes
from varcomm.errors import ArgumentError, MissingPackageError

__all__ = ["checked_figure", "plot"]

_KINDS = ("png", "svg", "pdf")
_ACROSS = 4
# Colours that are told apart without red and green; varcomm's is drawn last, and thick.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c6d31", "#5e3c99")
_STYLES = {FLOOR: "--", PEER: "-.", COPY: ":"}


def checked_figure(path: Path) -> Any:
    """Return matplotlib's figure and its canvas, before anything is measured.

    Raises
    ------
    ArgumentError
        If the file's name does not end in a format that can be written.
    MissingPackageError
        If matplotlib is not installed.
    """
    if path.suffix.removeprefix(".") not in _KINDS:
        raise ArgumentError(f"--plot {path}: name a file that ends in {', '.join(_KINDS)}.")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackageError(
            '--plot needs matplotlib: pip install "varcomm[plot]".'
        ) from error
    return Figure, FigureCanvasAgg


def plot(results: Sequence[Result], path: Path) -> None:
    """Draw results into a file.

    All panels are of one engine, number of ranks, dtype and kind of shards: those of the result
    with the most uneven shards. A picture of all would be none.

    Raises
    ------
    ArgumentError
        If there are no results.
    """
    if not results:
        raise ArgumentError(f"--plot {path}: there are no results to draw.")
    figure_type, canvas_type = checked_figure(path)
    chosen = _chosen(results)
    panels: dict[tuple[str, str], list[Result]] = {}
    for result in chosen:
        key = result.case.operation, result.case.direction
        panels.setdefault(key, []).append(result)
    across = min(_ACROSS, len(panels))
    down = -(-len(panels) // across)
    figure = figure_type(figsize=(4.2 * across + 0.6, 3.1 * down + 1.4), layout="constrained")
    canvas_type(figure)
    grid = figure.subplots(down, across, squeeze=False, sharex=True)
    names = _names(chosen)
    for axes, (key, members) in zip(grid.flat, panels.items(), strict=False):
        _panel(axes, f"{key[0]}, {key[1]}", members, names)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel("bus bandwidth, GB/s")
    for column in range(across):
        last = (len(panels) - 1 - column) // across
        axes = grid[last, column]
        axes.set_xlabel("bytes")
        axes.tick_params(labelbottom=True)
    case = chosen[0].case
    shards = "one shard empty" if case.skew == "empty" else f"shards {case.skew}"
    figure.suptitle(f"{case.engine}, {case.world} ranks, {case.dtype}, {shards}")
    lines = {line.get_label(): line for axes in grid.flat for line in axes.get_lines()}
    drawn = [name for name in names if name in lines]
    figure.legend(
        [lines[name] for name in drawn],
        drawn,
        loc="outside lower center",
        ncols=max(1, min(len(drawn), 3 * across)),
        frameon=False,
    )
    figure.savefig(path, dpi=130)


def _chosen(results: Sequence[Result]) -> list[Result]:
    """Return those of one number of ranks, dtype and kind of shards: the most uneven."""
    most = max(results, key=lambda result: result.skew).case
    same = most.engine, most.world, most.dtype, most.skew
    cases = ((r.case.engine, r.case.world, r.case.dtype, r.case.skew) for r in results)
    return [result for result, case in zip(results, cases, strict=True) if case == same]


def _names(results: Sequence[Result]) -> dict[str, dict[str, Any]]:
    """Return how each contender is drawn, varcomm first."""
    found = {timing.name: timing.kind for result in results for timing in result.timings}
    order = (OURS, FLOOR, PEER, COPY)
    kinds = dict(sorted(found.items(), key=lambda pair: order.index(pair[1])))
    styles: dict[str, dict[str, Any]] = {}
    colours = iter(_COLOURS * len(kinds))
    for name, kind in kinds.items():
        if kind == OURS:
            styles[name] = {"color": "black", "linewidth": 2.2, "marker": "o", "zorder": 3}
        elif kind == COPY:
            styles[name] = {"color": "0.6", "linestyle": _STYLES[kind]}
        else:
            styles[name] = {
                "color": next(colours),
                "linestyle": _STYLES[kind],
                "linewidth": 1.4,
                "marker": "." if kind == FLOOR else "x",
                "markersize": 5,
            }
    return styles


def _panel(
    axes: Any, title: str, members: Sequence[Result], styles: dict[str, dict[str, Any]]
) -> None:
    """Draw a line for each contender."""
    points: dict[str, list[tuple[int, float]]] = {}
    for result in members:
        for timing in result.timings:
            if result.bus_bytes:
                rate = result.bus_bytes / timing.seconds / 1e9
                points.setdefault(timing.name, []).append((result.nbytes, rate))
    for name in styles:
        if name in points:
            axes.plot(*zip(*sorted(points[name]), strict=True), label=name, **styles[name])
    axes.set(title=title, xscale="log", yscale="log")
    ticks = sorted({result.nbytes for result in members})
    axes.set_xticks(ticks, [short_bytes(result) for result in ticks], minor=False)
    axes.set_xticks([], minor=True)
    axes.grid(alpha=0.3)
    axes.title.set_fontsize(10)
