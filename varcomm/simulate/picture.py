"""Picture of scaling: time of a step by number of ranks, and its parts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from varcomm.simulate.scaling import Scaling

__all__ = ["draw"]

# Columns of a scaling, their names, and colours for readers who confuse red and green.
_LINES = {
    "step": ("a step", "#222222"),
    "busy": ("arithmetic and memory", "#0072b2"),
    "launching": ("launching kernels", "#56b4e9"),
    "halos": ("halo exchanges", "#e69f00"),
    "sums": ("sums of gradients and loss", "#d55e00"),
}


def draw(scalings: Mapping[str, Scaling], path: Path, title: str) -> None:
    """Draw scalings side by side, with their names above; needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4 * len(scalings), 5.0), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12)
    panels = figure.subplots(1, len(scalings), squeeze=False)[0]
    for axes, (name, scaling) in zip(panels, scalings.items(), strict=True):
        axes.set_title(name, fontsize=10)
        _panel(axes, scaling)
    shown = [zip(*axes.get_legend_handles_labels(), strict=True) for axes in panels]
    entries = {label: handle for each in shown for handle, label in each}
    figure.legend(entries.values(), entries, loc="outside lower center", ncols=4, fontsize=8.5)
    figure.savefig(path, dpi=110)


def _panel(axes: Any, scaling: Scaling) -> None:
    columns, ranks = scaling.columns, scaling.columns["ranks"]
    points = list(zip(ranks, columns["step"], columns["efficiency"], strict=True))
    ideal = [1e3 * seconds * efficiency for _, seconds, efficiency in points]
    axes.set(xscale="log", yscale="log", xlabel="ranks")
    axes.set_ylabel("ms per step on the slowest rank; above it, the efficiency")
    for name, (words, colour) in _LINES.items():
        style = {"linewidth": 2.6 if name == "step" else 1.4, "markersize": 3, "label": words}
        values = [1e3 * seconds or None for seconds in columns[name]]
        axes.plot(ranks, values, "-o", color=colour, **style)
    axes.plot(ranks, ideal, "--", color="#8a8a8a", linewidth=1.2, label="ideal")
    full = [n for n, m in zip(ranks, columns["memory"], strict=True) if m > scaling.machine.memory]
    if full:
        words = f"more than the {scaling.machine.memory / 1e9:.0f} GB of a rank"
        axes.axvspan(ranks[0] / 2, full[-1] * 1.4, color="#f3f0e8", zorder=0, label=words)
    every = slice(None, None, 1 if len(ranks) < 8 else 2)
    at: Any = {"textcoords": "offset points", "xytext": (0, 9), "ha": "center", "fontsize": 8}
    for number, seconds, efficiency in points[every]:
        axes.annotate(f"{efficiency:.0%}", (number, 1e3 * seconds), **at)
    axes.set_xticks(ranks[every], [f"{number:,}" for number in ranks[every]])
    axes.set_xlim(ranks[0] / 2, ranks[-1] * 2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    axes.grid(color="#e6e6e6", linewidth=0.7)
    axes.margins(y=0.12)
