"""Draw docs/images/benchmarks/*.png: one chart for each page of benchmarks.

python docs/draw_benchmarks.py [PAGE ...]

Each number is a cell of a table on its page. A test compares the numbers of pictures and pages.
"""

import re
import sys
import textwrap
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from matplotlib import pyplot as plt

from varcomm import _figures as figures

sys.path.append(str(Path(__file__).parent / "_ext"))
from dark import save

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "benchmarks"
IMAGES = ROOT / "docs" / "images" / "benchmarks"
COLOURS = *figures.CURVES, figures.LINES[2]
CELL = re.compile(r"([\d,.]+)(?: \(([\d.]+)-([\d.]+)\))?")
ROW, EDGES = 0.3, 0.85  # inches of a row, and of a panel's title and axis


@dataclass
class Panel:
    """Cells of a table: a bar for each number, or a dot with its range at ticks of an axis."""

    title: str
    label: str
    rows: list
    series: dict
    ticks: tuple = ()

    def numbers(self):
        """Return the cells with their places, as the picture keeps them."""
        return [
            [self.title, name, *pair]
            for name, cells in self.series.items()
            for pair in zip(self.rows, cells, strict=True)
        ]


def table(page, first, after=""):
    """Return the rows of the table whose header begins with these words, after others."""
    text = (PAGES / f"{page}.md").read_text()
    start = text.index(f"\n| {first} |", text.index(after)) + 1
    lines = text[start:].partition("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip().replace("`", "") for cell in line[1:-1].split("|")] for line in lines]
    for above, row in pairwise(rows):
        row[0] = row[0] or above[0]  # a first cell holds for the rows below it
    return rows


def pivot(rows):
    """Return the rows and the series of (row, series, cell)."""
    cells = {(row, name): cell for row, name, cell in rows}
    labels, names = (list(dict.fromkeys(each)) for each in list(zip(*rows, strict=True))[:2])
    return labels, {name: [cells.get((row, name), "") for row in labels] for name in names}


def column(rows, place, name=""):
    """Return the first cells of rows, and one column as a series."""
    return [row[0] for row in rows], {name: [row[place] for row in rows]}


def calls():
    units = {"1K": "1 KB", "16K": "16 KB", "1M": "1 MB", "16M": "16 MB"}
    found = [
        [*re.match(r"(\w+): (\w+), (\w+)", row[0]).groups(), row[-1]]
        for row in table("calls", "call")
        if row[-1]
    ]
    for engine, name in (("gloo", "Gloo"), ("mpi", "MPI")):
        rows = [(call, units[size], cell) for of, call, size, cell in found if of == engine]
        yield Panel(
            f"{name}, 2 ranks", "time / time of bare calls", *pivot(rows), (0.5, 1, 2, 4, 8)
        )


def engines():
    names = "2 ranks, 1 MB", "2 ranks, 16 MB", "3 ranks, 1 MB", "3 ranks, 16 MB"
    rows = [
        (f"{shards} shards".replace("empty shards", "shard empty"), name, cell)
        for shards, *cells in table("engines", "shards | 2 ranks, 1 MB")
        for name, cell in zip(names, cells, strict=True)
    ]
    label = "time of the padded gather / time of all_gather_v"
    yield Panel("", label, *pivot(rows), (0.5, 1, 2, 4, 8))


def debug():
    rows = [
        (
            f"{size} B" if size.isdigit() else f"{size}B",
            f"{ranks} ranks",
            f"{ratio} ({least}-{largest})",
        )
        for ranks, size, ratio, least, largest, _ in table("debug", "ranks")
    ]
    yield Panel(
        "A call inside debug()",
        "time / time outside debug(): median, least and largest",
        *pivot(rows),
        (0, 1, 2, 3, 4),
    )
    rows = [row for row in table("debug", "call") if row[-1]]
    label = "time / time without comparison: median and quartiles"
    yield Panel("Comparison at sums, 2 ranks", label, *column(rows, 3), (0, 0.5, 1, 1.5))


def gradients():
    rows = table("gradients", "method")
    yield Panel("Bytes sent", "bytes / fewest possible", *column(rows, 2))
    yield Panel("Peak memory", "memory / model", *column(rows, 4))


def graphs():
    one, two = table("graphs", "ranks | s per step")
    rows = [["MeshGraphNet, ocean", f"{float(one[1]) / float(two[1]):.2f}"]]
    rows += [[row[0], row[3]] for row in table("graphs", "network")]
    yield Panel(
        "2 ranks", "times as fast as one process", *column(rows, 1), (0, 0.5, 1, 1.5, 2, 2.5)
    )
    rows = [
        pair
        for name, _, small, _, large in table("graphs", "layer")
        for pair in ((name, "500 nodes", small), (name, "5,000 nodes", large))
    ]
    label = "time / time of the plain layer: median and quartiles"
    yield Panel("Layers on one rank", label, *pivot(rows), (0.5, 0.75, 1, 1.25))


def grids():
    rows = table("grids", "| ms")
    yield Panel("Speed", "times as fast as one process", *column(rows, 2), (0, 0.5, 1, 1.5, 2, 2.5))
    yield Panel("Memory", "MB of tensors at the peak", *column(rows, 3))


def tensor_parallel():
    names = {"operators": "operators", 'save="input", with a second gather': "second gather"}
    rows = [
        (linear, names.get(name, "layer"), ratio)
        for linear, name, _, ratio in table("tensor_parallel", "linear | | ms")
        if ratio
    ]
    label = "time / time of the floor: median and quartiles"
    yield Panel("Linears", label, *pivot(rows), (0.75, 1, 1.25, 1.5))
    rows = [
        [row[0].replace("a linear head of width 256", "linear head"), row[4]]
        for row in table("tensor_parallel", "| ms forward")
    ]
    yield Panel("Cross entropy", "MB in addition to logits and gradient", *column(rows, 1))


def checkpoints():
    rows = [row for row in table("checkpoints", "| seconds") if "varcomm" in row[0]]
    rows = [[row[0].removesuffix(", varcomm"), row[-1]] for row in rows]
    label = "time / time of torch.distributed.checkpoint: median and quartiles"
    yield Panel("", label, *column(rows, 1), (0, 0.5, 1, 1.5, 2))


def simulate():
    rows = [
        (f"{row[0]} nodes, {row[1]} ranks", name, row[-1])
        for name in ("first machine", "second machine")
        for row in table("simulate", "nodes", f"The {name} has")
    ]
    yield Panel("", "predicted / measured time of a step", *pivot(rows), (0.5, 1, 2, 4))


def gpu():
    names = {"distributed": "distributed", "captured": "captured in a CUDA graph"}
    rows = [
        (f"{model}, {edges:,} edges", names[step], ratio)
        for model in ("MeshGraphNet", "GraphSAGE", "GAT")
        for edges in (100_000, 1_000_000, 5_000_000)
        for step, _, ratio, _ in table("gpu/fast", "step", f"## {model}, {edges} edges")
        if step in names
    ]
    yield Panel("One H200", "time / time of the plain step", *pivot(rows), (0.25, 0.5, 1, 2, 4))


CHARTS = {
    chart.__name__: chart
    for chart in (
        *(calls, engines, debug, gradients, graphs, grids, tensor_parallel, checkpoints),
        *(simulate, gpu),
    )
}


def wrapped(label):
    """Return the label of a row in lines that leave room for the marks."""
    return textwrap.fill(label, 29, break_long_words=False)


def draw_panel(axes, panel, labels):
    """Draw the bars or dots of one panel, the first row on top."""
    axes.set_title(panel.title)
    axes.set_xlabel(panel.label, loc="left")
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    for at, (name, cells) in enumerate(panel.series.items()):
        colour = COLOURS[at]
        for row, cell in enumerate(cells):
            if not cell:
                continue
            value, *ends = (
                end and float(end.replace(",", "")) for end in CELL.match(cell).groups()
            )
            y = row + 0.17 * (at - (len(panel.series) - 1) / 2)
            if not panel.ticks:
                axes.barh(y, value, 0.6, color=colour)
                axes.text(value, y, f" {CELL.match(cell)[1]}", va="center", color=figures.INK)
                continue
            ends = [end or value for end in ends]
            assert panel.ticks[0] <= min(ends) <= max(ends) <= panel.ticks[-1], cell
            axes.plot(value, y, "o", ms=6, color=colour, label=name)
            axes.plot(ends, (y, y), color=colour, lw=2, solid_capstyle="butt")
    if not panel.ticks:
        axes.spines["bottom"].set_visible(False)
        axes.set_xticks([])
        axes.set_xmargin(0.2)  # for the last number
        return
    if panel.ticks[-1] >= 4 * panel.ticks[0] > 0:
        axes.set_xscale("log", base=2)
    axes.set_xticks(panel.ticks, [f"{tick:g}" for tick in panel.ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlim(panel.ticks[0], panel.ticks[-1])
    axes.axvline(1, color=figures.PALE, lw=1, zorder=0)
    for row in range(1, len(labels)):
        axes.axhline(row - 0.5, color=figures.LAND, lw=0.6, zorder=0)


def draw(panels):
    """Draw panels of the same rows side by side, and others one below the other."""
    shared = all(panel.rows == panels[0].rows for panel in panels)
    labels = [[wrapped(row) for row in panel.rows] for panel in panels]
    heights = [
        EDGES + sum(max(ROW, 0.14 * len(panel.series), 0.2 * (1 + row.count("\n"))) for row in rows)
        for panel, rows in zip(panels, labels, strict=True)
    ]
    shape = (1, len(panels)) if shared else (len(panels), 1)
    figure, grid = plt.subplots(
        *shape,
        sharey=shared,
        squeeze=False,
        height_ratios=None if shared else heights,
        figsize=(figures.WIDTH, heights[0] + 0.3 if shared else sum(heights)),
        layout="constrained",
    )
    for axes, panel, rows in zip(grid.flat, panels, labels, strict=True):
        draw_panel(axes, panel, rows)
        handles = dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
        if len(panel.series) > 1 and not shared:
            place = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0}
            axes.legend(
                handles.values(), handles, ncols=4, handletextpad=0.1, columnspacing=1.2, **place
            )
    if shared and len(panels[0].series) > 1:
        place = {
            "loc": "outside lower right",
            "ncols": 4,
            "handletextpad": 0.1,
            "columnspacing": 1.2,
        }
        figure.legend(handles.values(), handles, **place)
    return figure


def numbers(page):
    """Return the numbers of a page's chart, as its picture keeps them."""
    return [line for panel in CHARTS[page]() for line in panel.numbers()]


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    with plt.rc_context(figures.style()):
        for page in sys.argv[1:] or CHARTS:
            path = IMAGES / f"{page}.png"
            save(draw(list(CHARTS[page]())), path, numbers=numbers(page), colours=64)
