"""Draw docs/images/calls.png: how long calls take beside the fastest bare schedule.

python docs/draw_calls.py

The ratios are those of the table on docs/benchmarks/calls.md.
"""

import re
import sys
from pathlib import Path

from matplotlib import pyplot as plt

from varcomm import _figures as figures

sys.path.append(str(Path(__file__).parent / "_ext"))
from dark import save

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "benchmarks" / "calls.md"
ENGINES = {"gloo": "Gloo", "mpi": "MPI"}
SIZES = {"1K": "1 KB", "16K": "16 KB", "1M": "1 MB", "16M": "16 MB"}


def ratios():
    """Return the engine, call, size and ratio of each line in the table of the page."""
    line = re.compile(r"^\| (\w+): (\w+), (\w+) \|.*\| ([\d.]+) \|$", re.MULTILINE)
    return line.findall(PAGE.read_text())


def draw(found):
    """Draw a panel for each engine, with a row for each call and a point for each size."""
    calls = list(dict.fromkeys(call for _, call, _, _ in found))
    ratio = {tuple(key): float(value) for *key, value in found}
    figure, panels = plt.subplots(1, 2, sharex=True, sharey=True, figsize=(figures.WIDTH, 4.2))
    colours = [figures.RANKS[at] for at in (0, 1, 3, 7)]
    for axes, (engine, name) in zip(panels, ENGINES.items(), strict=True):
        axes.axvline(1, color=figures.PALE, lw=1)
        for at, (size, words) in enumerate(SIZES.items()):
            points = [ratio[engine, call, size] for call in calls]
            places = [row + 0.16 * (at - 1.5) for row in range(len(calls))]
            axes.plot(points, places, "o", ms=6, color=colours[at], label=words)
        axes.set_title(f"{name}, 2 ranks", loc="left")
        axes.set_xscale("log", base=2)
        axes.set_xticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
        axes.set_yticks(range(len(calls)), calls)
        axes.set_ylim(len(calls) - 0.5, -0.5)
        for row in range(1, len(calls)):
            axes.axhline(row - 0.5, color=figures.LAND, lw=0.6)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=4, loc="lower right", handletextpad=0.2)
    figure.text(0.01, 0.035, "time / time of bare calls", color=figures.INK)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    return figure


if __name__ == "__main__":
    with plt.rc_context(figures.style()):
        save(draw(ratios()), ROOT / "docs" / "images" / "calls.png", numbers=ratios())
