"""Predicted strong and weak scaling of a training step, as a table and a picture.

``python benchmarks/scaling.py --relief etopo5.cdf.xz --plot docs/images/scaling.png`` draws the
figure of the README: MeshGraphNet on the world ocean at 1/12 degree. The file is NOAA's, as for
etopo5.py. Without it, the graph is a grid without land.
"""

import argparse
import sys
from itertools import count, takewhile
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from measuring import arguments
from sea import coarsened, ocean, read_sea

import varcomm as vc
from varcomm import _figures as figures
from varcomm.cli.simulate import METHOD, columns_of, piece_of, prepare, table

sys.path.append(str(Path(__file__).parents[1] / "docs" / "_ext"))
from dark import save

# Columns of a curve, with their names and colours.
LINES = {
    "step": ("a step", figures.INK),
    "busy": ("arithmetic and memory", figures.CURVES[0]),
    "launching": ("kernel launches", figures.CURVES[1]),
    "halos": ("halo exchanges", figures.CURVES[2]),
    "sums": ("sums of gradients and loss", figures.LINES[1]),
}


def draw(curves, machine, path, title):
    """Draw curves one below the other, with their names above."""
    with rc_context(figures.style()):
        figure = Figure((figures.WIDTH, 4.0 * len(curves) + 0.9), layout="constrained")
        figure.suptitle(title, x=0.02, ha="left")
        panels = figure.subplots(len(curves), 1, squeeze=False)[:, 0]
        for axes, (name, columns) in zip(panels, curves.items(), strict=True):
            axes.set_title(name)
            panel(axes, columns, machine.memory)
        # strong scaling comes first, and its legend has all entries
        handles = panels[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower left", ncols=2)
        save(figure, path)


def panel(axes, columns, limit):
    ranks = columns["ranks"]
    points = list(zip(ranks, columns["step"], columns["efficiency"], strict=True))
    axes.set(xscale="log", yscale="log", xlabel="ranks")
    axes.set_ylabel("time of the slowest rank (ms)")
    for name, (words, colour) in LINES.items():
        style = {"linewidth": 3 if name == "step" else 1.8, "markersize": 4, "label": words}
        values = [1e3 * seconds or None for seconds in columns[name]]
        axes.plot(ranks, values, "-o", color=colour, **style)
    ideal = [1e3 * seconds * efficiency for _, seconds, efficiency in points]
    look = {"color": figures.PALE, "linewidth": 1.5, "zorder": 5, "label": "ideal step"}
    axes.plot(ranks, ideal, ":", **look)
    full = [n for n, used in zip(ranks, columns["memory"], strict=True) if used > limit]
    if full:
        words = f"more than the {limit / 1e9:.0f} GB of a rank"
        axes.axvspan(
            ranks[0] / 2, full[-1] * 1.4, color=figures.PALE, alpha=0.2, zorder=0, label=words
        )
    every = slice(None, None, 1 if len(ranks) < 8 else 2)
    at = {"textcoords": "offset points", "xytext": (0, 9), "ha": "center"}
    for number, seconds, efficiency in points[every]:
        axes.annotate(f"{efficiency:.0%}", (number, 1e3 * seconds), **at)
    axes.set_xticks(ranks[every], [f"{number:,}" for number in ranks[every]])
    axes.set_xlim(ranks[0] / 2, ranks[-1] * 2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    axes.grid(color=figures.PALE, alpha=0.25, linewidth=0.7)
    axes.margins(y=0.15)


def cut(cells, size):
    return vc.simulate.partition(ocean(cells), size, METHOD).without_graph()


def grown(cells, counts):
    """Counts of grids that grow with the ranks; the middle one has the given grid.

    Below, the grid is coarser and cut again; above, the parts are taken to be finer.
    """
    middle, found = len(counts) // 2, []
    for place, each in enumerate(counts):
        if place < middle:
            coarse = coarsened(cells, 2 ** (middle - place))
            found.append(cut(coarse, each.size))
        else:
            found.append(each.refined(2 ** (place - middle)))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--relief", type=Path, help="etopo5.cdf, etopo20.cdf or etopo60.cdf, or .xz"
    )
    parser.add_argument("--plot", type=Path, help="draw a picture")
    ranks = [2**place for place in range(13)]
    given = arguments(parser, rows=180, machine="h100-ndr", ranks=ranks, width=128, blocks=8)
    cells = np.ones((given.rows, 2 * given.rows), dtype=bool)
    if given.relief:
        cells = read_sea(given.relief)
    data, machine = ocean(cells), vc.simulate.MACHINES[given.machine]
    # each number of ranks of weak scaling is 4 times the one before
    chain = list(takewhile(given.ranks.__contains__, (given.ranks[0] * 4**n for n in count())))
    counts = [vc.simulate.partition(data, size, METHOD).without_graph() for size in given.ranks]
    step = prepare(given.width, given.blocks)
    sample = vc.simulate.sample(step, piece_of(data), given.ranks, METHOD)
    weak = grown(cells, [each for each in counts if each.size in chain])
    each, middle = int(weak[0].owned.sum()) / chain[0], chain[len(chain) // 2]
    partitions = {
        f"strong: {data.num_nodes:,} nodes": counts,
        f"weak: {each:,.0f} nodes per rank; finer grids, this one on {middle} ranks": weak,
    }
    curves = {
        name: columns_of([sample.step(each) for each in growing], machine)
        for name, growing in partitions.items()
    }
    model = f"MeshGraphNet of width {given.width} with {given.blocks} blocks"
    title = f"A training step of {model}\non {machine.name}, predicted from peak rates"
    print(title)
    for name, columns in curves.items():
        print(name, table(columns, machine), sep="\n")
    print(f"error of the linear fit: at most {max(sample.fit.error.values()):.1e}")
    if given.plot:
        draw(curves, machine, given.plot, title)


if __name__ == "__main__":
    main()
