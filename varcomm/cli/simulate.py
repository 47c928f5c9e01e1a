"""``varcomm simulate``: predict a training step on thousands of ranks."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from varcomm import simulate
from varcomm.cli.arguments import comma_separated, number_of, positive, progress
from varcomm.cli.partition import METHODS

__all__ = ["DESCRIPTION", "add_arguments", "run"]

DESCRIPTION = """\
Cut a graph for each number of ranks, run a training step of MeshGraphNet as a
few of these ranks on a small piece of the graph, and predict the step on all
ranks of a machine. One process does all of this.

  owned, halo    nodes of a rank, and rows it receives in an exchange
  neighbours     ranks it exchanges rows with
  MB sent        per step; so are messages
  GB             peak memory of tensors
  compute, halo, sums, step
                 ms of the slowest rank, without overlap; sums are those of
                 gradients and loss
  efficiency     nodes per second and rank, relative to the first line

Counts and bytes are the maximum over ranks. The graph is a mesh file, NOAA's
relief of the Earth (etopo5.cdf: the ocean at 1/12 degree), or a grid of
latitudes and longitudes without land.

example:
  %(prog)s --grid 360x720 --ranks 1,8,64 --plot scaling.png
"""

_PIECE = 1500  # nodes of the piece on which steps run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    add = parser.add_argument
    graph = parser.add_mutually_exclusive_group()
    graph.add_argument("--mesh", type=Path, help="a mesh in any format that meshio reads")
    graph.add_argument("--relief", type=Path, help="etopo5.cdf, etopo20.cdf or etopo60.cdf, or .xz")
    graph.add_argument(
        "--grid", type=_grid, default="180x360", help="rows x columns; default 180x360"
    )
    ranks = "ascending, separated by commas; default: 1,2,4,... to 4096"
    default = [2**place for place in range(13)]
    add("--ranks", type=comma_separated(positive), default=default, help=ranks)
    machines, named = list(simulate.MACHINES), "a name that --machines lists; default h100-ndr"
    add("--machine", choices=machines, default="h100-ndr", metavar="MACHINE", help=named)
    add("--machines", action="store_true", help="list machines and the sources of their numbers")
    add("--width", type=positive, default=128, help="features of nodes and edges; default 128")
    add("--blocks", type=positive, default=8, help="layers that exchange halos; default 8")
    method = f"how to cut the graph: {', '.join(METHODS)}; default hilbert"
    add("--method", choices=METHODS, default="hilbert", metavar="METHOD", help=method)
    add("--weak", action="store_true", help="also let the grid grow with the ranks; not for meshes")
    add("--plot", type=Path, metavar="FILE", help="draw a picture: .png, .svg or .pdf")


def _grid(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9]+)x([0-9]+)", text)
    if found is None or int(found[1]) < 1 or int(found[2]) < 3:
        raise argparse.ArgumentTypeError(f"{text!r}: give rows x columns, as 180x360")
    return int(found[1]), int(found[2])


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Cut, simulate, and print the predictions."""
    if options.machines:
        for machine in simulate.MACHINES.values():
            print(f"{machine.name}: {machine.source}\n")
        return 0
    from varcomm.graph.files.plot import check_target
    from varcomm.simulate.picture import draw

    sizes, plot, method = options.ranks, options.plot, options.method
    chain = _checked(options, parser)
    if plot is not None:
        check_target(plot)
    machine = simulate.MACHINES[options.machine]
    data, cells, name = _graph(options)
    blocks = number_of(options.blocks, "block")
    model = f"MeshGraphNet of width {options.width} with {blocks}"
    print(f"{data.num_nodes:,} nodes, {data.num_edges:,} edges; {model}; {machine.name}")
    counts = []
    for size in sizes:
        progress(f"cutting for {size} ranks")
        counts.append(simulate.partition(data, size, method).without_graph())
    piece = _piece(data, method)
    del data
    progress("running steps")
    sample = simulate.sample(_prepare(options.width, options.blocks), piece, sizes, method)
    progress("")
    scalings = [simulate.scaling(sample, counts, machine)]
    print(scalings[0])
    notes = [f"strong: {name}, {scalings[0].points[0].nodes:,} nodes"]
    if options.weak:
        grown = _grown(cells, [each for each in counts if each.size in chain], method)
        scalings.append(simulate.scaling(sample, grown, machine, weak=True))
        print(f"\n{scalings[1]}")
        first, middle = scalings[1].points[0], grown[len(grown) // 2].size
        each = first.nodes / first.ranks
        notes.append(f"weak: {each:,.0f} nodes per rank; finer grids, this one on {middle} ranks")
    errors = ", ".join(f"{name} {error:.1e}" for name, error in sample.fit.error.items())
    print(f"\nerrors of the linear fit: {errors}. {machine.source}")
    if plot is not None:
        title = f"A training step of {model} on {machine.name}, predicted from peak rates"
        draw(scalings, plot, title, notes)
        print(f"picture: {plot}")
    return 0


def _checked(options: argparse.Namespace, parser: argparse.ArgumentParser) -> list[int]:
    """Return the numbers of ranks of weak scaling; refuse options that do not go together."""
    sizes = options.ranks
    if sorted(set(sizes)) != sizes:
        parser.error("--ranks: give ascending positive integers and commas")
    if options.weak and options.mesh is not None:
        parser.error("--weak coarsens a grid; a mesh cannot be coarsened")
    chains = [
        list(takewhile(lambda size: size in sizes, (first * 4**place for place in count())))
        for first in sizes
    ]
    chain = max(chains, key=len)
    if options.weak and len(chain) < 2:
        parser.error("--weak needs numbers of ranks that are 4 times each other: 1,4,16,64")
    if options.plot is not None and not options.plot.absolute().parent.is_dir():
        parser.error(f"--plot {options.plot}: there is no folder {options.plot.parent}")
    return chain


def _graph(options: argparse.Namespace) -> tuple[Any, Any, str]:
    """Return the graph, its sea cells if it is a grid, and its name."""
    if options.mesh is not None:
        from varcomm.graph import read_mesh

        return read_mesh(options.mesh, dtype=torch.float32).data, None, options.mesh.name
    if options.relief is not None:
        cells = simulate.read_sea(options.relief)
        name = f"the ocean at 1/{cells.shape[1] / 360:g} degree"
    else:
        cells = np.ones(options.grid, dtype=bool)
        name = "a grid of {}x{}".format(*options.grid)
    return simulate.ocean(cells), cells, name


def _piece(data: Any, method: str) -> Any:
    """Return a compact piece of a graph, with the edges inside."""
    from varcomm.graph import assign

    pieces = max(1, data.num_nodes // _PIECE)
    return data.subgraph(assign(data, pieces, method) == pieces // 2)


def _prepare(width: int, blocks: int) -> Callable[[Any], Callable[[], None]]:
    """Return a function that prepares a training step on a rank's part of a graph."""
    from torch.nn.functional import mse_loss

    from varcomm.data_parallel import sum_gradients
    from varcomm.graph import distribute
    from varcomm.models import MeshGraphNet

    def prepare(graph: Any) -> Callable[[], None]:
        torch.manual_seed(0)
        model = MeshGraphNet(6, 3, 1, hidden_channels=width, num_blocks=blocks)
        model = distribute(model, graph)
        optimizer = torch.optim.Adam(model.parameters())
        x, edge_attr = torch.rand(graph.num_owned, 6), torch.rand(graph.edges.num_owned, 3)
        y = torch.rand(graph.num_owned, 1)

        def step() -> None:
            optimizer.zero_grad()
            prediction = model(x, graph.edge_index, edge_attr)
            graph.mean(mse_loss(prediction, y, reduction="none")).backward()
            sum_gradients(model)
            optimizer.step()

        return step

    return prepare


def _grown(cells: Any, counts: Sequence[Any], method: str) -> list[Any]:
    """Return counts of grids that grow with the ranks.

    Each number of ranks is 4 times the number before, and the middle one has the given grid. Below,
    the grid is coarser and cut again; above, the parts are taken to be finer.
    """
    middle, grown = len(counts) // 2, []
    for place, each in enumerate(counts):
        if place < middle:
            coarse = simulate.ocean(simulate.coarsened(cells, 2 ** (middle - place)))
            grown.append(simulate.partition(coarse, each.size, method).without_graph())
        else:
            grown.append(each.refined(2 ** (place - middle)))
    return grown
