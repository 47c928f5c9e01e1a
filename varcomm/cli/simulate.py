"""``python -m varcomm simulate``: a training step on thousands of ranks, predicted on this one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from varcomm.cli.partition import METHODS

__all__ = ["DESCRIPTION", "HELP", "add_arguments", "run"]

HELP = "predict a training step on many ranks"
DESCRIPTION = """\
Cut a graph for each number of ranks, run a training step of MeshGraphNet as a
few of those ranks on a small piece of the graph, and predict the step on all
ranks of a machine. No other rank is needed.

  owned, halo    nodes of a rank, and rows it receives in an exchange
  neighbours     ranks it exchanges with; these three are the most of any rank
  MB sent        in a step, the most of any rank; so are messages
  GB             tensors alive at the worst moment
  compute, halo, sums, step
                 ms of the slowest rank, nothing overlapped; sums are those of
                 gradients and loss
  efficiency     nodes a second and a rank, over those of the first line

The graph is a mesh file, NOAA's relief of the Earth (etopo5.cdf: the ocean at
1/12 degree), or a grid of latitudes and longitudes that is sea everywhere.

example:
  %(prog)s --grid 360x720 --ranks 1,8,64 --plot scaling.png
"""

# Nodes of the piece on which steps are run.
_PIECE = 1500


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    add = parser.add_argument
    graph = parser.add_mutually_exclusive_group()
    graph.add_argument("--mesh", type=Path, help="a mesh in any format that meshio reads")
    graph.add_argument("--relief", type=Path, help="etopo5.cdf, etopo20.cdf or etopo60.cdf, or .xz")
    graph.add_argument("--grid", default="180x360", help="rows x columns; default 180x360")
    ranks = ",".join(str(2**place) for place in range(13))
    add("--ranks", default=ranks, help="ascending, a comma between; default: 1,2,4,8,... to 4096")
    machine = "one of those that --machines lists; default h100-ndr"
    add("--machine", default="h100-ndr", help=machine)
    add("--machines", action="store_true", help="list machines and where their numbers come from")
    add("--width", type=int, default=128, help="features of nodes and edges; default 128")
    add("--blocks", type=int, default=8, help="layers that exchange halos; default 8")
    method = f"how the graph is cut: {', '.join(METHODS)}; default hilbert"
    add("--method", choices=METHODS, default="hilbert", metavar="METHOD", help=method)
    add("--weak", action="store_true", help="also grow the grid with the ranks; not for meshes")
    add("--plot", type=Path, metavar="FILE", help="a picture, as .png, .svg or .pdf")


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run the command."""
    from varcomm import simulate
    from varcomm.simulate.picture import draw, figure_types

    if options.machines:
        for machine in simulate.MACHINES.values():
            print(f"{machine.name}: {machine.source}\n")
        return 0
    if options.machine not in simulate.MACHINES:
        parser.error(f"--machine {options.machine}: choose one of {', '.join(simulate.MACHINES)}")
    sizes = _sizes(options.ranks, parser)
    for name in ("width", "blocks"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be positive")
    if options.weak and options.mesh is not None:
        parser.error("--weak coarsens a grid; a mesh cannot be coarsened")
    chain = _chain(sizes)
    if options.weak and len(chain) < 2:
        parser.error("--weak needs numbers of ranks that are 4 times each other: 1,4,16,64")
    if options.plot is not None:  # before the work
        figure_types(options.plot)
        if not options.plot.absolute().parent.is_dir():
            parser.error(f"--plot {options.plot}: there is no folder {options.plot.parent}")
    machine = simulate.MACHINES[options.machine]
    whole, cells, name = _graph(options, parser)
    data = whole()
    blocks = "1 block" if options.blocks == 1 else f"{options.blocks} blocks"
    model = f"MeshGraphNet of width {options.width} with {blocks}"
    print(f"{data.num_nodes:,} nodes, {data.num_edges:,} edges; {model}; {machine.name}")
    counts = []
    for size in sizes:
        _progress(f"cutting for {size} ranks")
        counts.append(simulate.partition(data, size, options.method).without_graph())
    piece = _piece(data, options.method)
    del data
    _progress("running steps")
    sample = simulate.sample(_prepare(options.width, options.blocks), piece, sizes, options.method)
    _progress("")
    strong = simulate.scaling(sample, counts, machine)
    print(strong)
    scalings, notes = [strong], [f"strong: {name}, {strong.points[0].nodes:,} nodes"]
    if options.weak:
        chosen = [each for each in counts if each.size in chain]
        grown, middle = _grown(cells, chosen, options.method)
        weak = simulate.scaling(sample, grown, machine, weak=True)
        print(f"\n{weak}")
        scalings.append(weak)
        each = weak.points[0].nodes / weak.points[0].ranks
        notes.append(f"weak: {each:,.0f} nodes a rank; finer grids, this one on {middle} ranks")
    errors = ", ".join(f"{name} {error:.1e}" for name, error in sample.fit.error.items())
    print(f"\nlinear in rows, but for: {errors}. {machine.source}")
    if options.plot is not None:
        title = f"A training step of {model} on {machine.name}: predicted, by peak rates"
        draw(scalings, options.plot, title, notes)
        print(f"picture: {options.plot}")
    return 0


def _progress(words: str) -> None:
    """Say what is being done, to whoever looks on."""
    if sys.stderr.isatty():
        print(f"\r{words:<40}\r", end="", file=sys.stderr, flush=True)


def _sizes(text: str, parser: argparse.ArgumentParser) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1 or sorted(set(sizes)) != sizes:
        parser.error(f"--ranks {text}: give ascending positive integers with commas between")
    return sizes


def _graph(
    options: argparse.Namespace, parser: argparse.ArgumentParser
) -> tuple[Callable[[], Any], Any, str]:
    """Return what makes the graph, the table of sea cells if it is a grid, and its name."""
    from varcomm import simulate

    if options.mesh is not None:
        from varcomm.graph import read_mesh

        return lambda: read_mesh(options.mesh, dtype=torch.float32).data, None, options.mesh.name
    if options.relief is not None:
        cells = simulate.read_sea(options.relief)
        name = f"the ocean at 1/{cells.shape[1] / 360:g} degree"
    else:
        rows, _, columns = options.grid.partition("x")
        if not (rows.isdecimal() and columns.isdecimal() and int(rows) > 0 and int(columns) > 2):
            parser.error(f"--grid {options.grid}: give rows x columns, as 180x360")
        cells, name = np.ones((int(rows), int(columns)), dtype=bool), f"a grid of {options.grid}"
    return lambda: simulate.ocean(cells), cells, name


def _piece(data: Any, method: str) -> Any:
    """Return a compact piece of a graph, with the edges within it."""
    from varcomm.graph import assign

    pieces = max(1, data.num_nodes // _PIECE)
    return data.subgraph(assign(data, pieces, method) == pieces // 2)


def _prepare(width: int, blocks: int) -> Callable[[Any], Callable[[], None]]:
    """Return what prepares a training step of the model on a rank's part of a graph."""
    from torch.nn.functional import mse_loss

    from varcomm.data_parallel import sum_gradients
    from varcomm.graph import distribute
    from varcomm.models import MeshGraphNet

    def prepare(graph: Any) -> Callable[[], None]:
        torch.manual_seed(0)
        model = MeshGraphNet(6, 3, 1, hidden_channels=width, num_blocks=blocks)
        model = distribute(model, graph)
        optimizer = torch.optim.Adam(model.parameters())
        x, edge_attr = torch.rand(graph.num_owned, 6), torch.rand(graph.num_edges, 3)
        y = torch.rand(graph.num_owned, 1)

        def step() -> None:
            optimizer.zero_grad()
            prediction = model(x, graph.edge_index, edge_attr)
            graph.mean(mse_loss(prediction, y, reduction="none")).backward()
            sum_gradients(model)
            optimizer.step()

        return step

    return prepare


def _chain(sizes: Sequence[int]) -> list[int]:
    """Return the most of these numbers that are 4 times each other."""
    chains = [
        list(takewhile(lambda size: size in sizes, (first * 4**place for place in count())))
        for first in sizes
    ]
    return max(chains, key=len)


def _grown(cells: Any, counts: Sequence[Any], method: str) -> tuple[list[Any], int]:
    """Return counts of grids that grow with the ranks, and which number has the grid itself.

    The numbers are 4 times each other, and the grid is that of the middle one. Below it, the grid
    is coarser and cut anew; above, its parts are taken to be finer.
    """
    from varcomm import simulate

    middle = len(counts) // 2
    grown = []
    for place, each in enumerate(counts):
        if place < middle:
            coarse = simulate.ocean(simulate.coarsened(cells, 2 ** (middle - place)))
            grown.append(simulate.partition(coarse, each.size, method).without_graph())
        else:
            grown.append(each.refined(2 ** (place - middle)))
    return grown, counts[middle].size
