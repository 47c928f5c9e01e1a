"""``varcomm simulate``: predict a training step on thousands of ranks."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from varcomm import simulate
from varcomm.cli.arguments import positive, progress, separated
from varcomm.simulate.table import aligned

__all__ = ["DESCRIPTION", "add_arguments", "prepare", "run"]

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
latitudes and longitudes without land, cut along a Hilbert curve.

example:
  %(prog)s --grid 360x720 --ranks 1,8,64 --plot scaling.png
"""

_PIECE = 1500  # nodes of the piece on which steps run
_METHOD = "hilbert"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    add = parser.add_argument
    graph = parser.add_mutually_exclusive_group()
    graph.add_argument("--mesh", type=Path, help="a mesh in any format that meshio reads")
    graph.add_argument("--relief", type=Path, help="etopo5.cdf, etopo20.cdf or etopo60.cdf, or .xz")
    words, grid = "rows x columns; default 180x360", separated(positive, "x")
    graph.add_argument("--grid", type=grid, default="180x360", help=words)
    words, default = "default: 1,2,4,... to 4096", [2**place for place in range(13)]
    add("--ranks", type=separated(positive), default=default, metavar="N,...", help=words)
    machines, named = list(simulate.MACHINES), "a name that --machines lists; default h100-ndr"
    add("--machine", choices=machines, default="h100-ndr", metavar="MACHINE", help=named)
    add("--machines", action="store_true", help="list machines and their numbers")
    add("--width", type=positive, default=128, help="features of nodes and edges; default 128")
    add("--blocks", type=positive, default=8, help="layers that exchange halos; default 8")
    add("--weak", action="store_true", help="also let the grid grow with the ranks; not for meshes")
    add("--plot", type=Path, metavar="FILE", help="draw a picture: .png, .svg or .pdf")


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Cut, simulate, and print the predictions."""
    if options.machines:
        known = [vars(each) for each in simulate.MACHINES.values()]
        *rows, source, _ = ([name, *(str(each[name]) for each in known)] for name in known[0])
        print(*aligned(rows), f"source: {source[1]}", sep="\n")
        return 0
    from varcomm.graph.files.plot import check_target
    from varcomm.simulate.picture import draw

    if options.weak and options.mesh is not None:
        parser.error("--weak coarsens a grid; a mesh cannot be coarsened")
    if options.plot is not None:
        check_target(options.plot)
    machine = simulate.MACHINES[options.machine]
    data, cells = _graph(options)
    model = f"MeshGraphNet of width {options.width} with {options.blocks} blocks"
    print(f"{data.num_nodes:,} nodes, {data.num_edges:,} edges; {model}; {machine.name}")
    strong = f"strong: {data.num_nodes:,} nodes"
    ranks, counts = sorted(set(options.ranks)), []
    for size in ranks:
        progress(f"cutting for {size} ranks")
        counts.append(simulate.partition(data, size, _METHOD).without_graph())
    piece = _piece(data)
    del data
    progress("running steps")
    step = prepare(options.width, options.blocks)
    sample = simulate.sample(step, piece, ranks, _METHOD)
    progress("")
    scalings = {strong: simulate.scaling(sample, counts, machine)}
    print(scalings[strong])
    if options.weak:
        chain = _chain(ranks)
        grown = _grown(cells, [each for each in counts if each.size in chain])
        each, middle = int(grown[0].owned.sum()) / chain[0], chain[len(chain) // 2]
        weak = f"weak: {each:,.0f} nodes per rank; finer grids, this one on {middle} ranks"
        scalings[weak] = simulate.scaling(sample, grown, machine)
        print(f"\n{scalings[weak]}")
    print(f"\nerror of the linear fit: at most {max(sample.fit.error.values()):.1e}")
    if options.plot is not None:
        title = f"A training step of {model} on {machine.name}, predicted from peak rates"
        draw(scalings, options.plot, title)
        print(f"picture: {options.plot}")
    return 0


def _chain(ranks: Sequence[int]) -> list[int]:
    """Return the numbers of ranks of weak scaling, each 4 times the one before."""
    return list(takewhile(ranks.__contains__, (ranks[0] * 4**place for place in count())))


def _graph(options: argparse.Namespace) -> tuple[Any, Any]:
    """Return the graph, and its sea cells if it is a grid."""
    if options.mesh is not None:
        from varcomm.graph import read_mesh

        return read_mesh(options.mesh, dtype=torch.float32).data, None
    relief, grid = options.relief, options.grid
    cells = np.ones(grid, dtype=bool) if relief is None else simulate.read_sea(relief)
    return simulate.ocean(cells), cells


def _piece(data: Any) -> Any:
    """Return a compact piece of a graph, with the edges inside."""
    from varcomm.graph import assign

    pieces = max(1, data.num_nodes // _PIECE)
    return data.subgraph(assign(data, pieces, _METHOD) == pieces // 2)


def prepare(width: int, blocks: int) -> Callable[[Any], Callable[[], None]]:
    """Return a function that prepares a training step on a rank's part of a graph."""
    from torch.nn.functional import mse_loss

    from varcomm.data_parallel import sum_gradients
    from varcomm.graph import distribute
    from varcomm.models import MeshGraphNet

    def prepared(graph: Any) -> Callable[[], None]:
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

    return prepared


def _grown(cells: Any, counts: Sequence[Any]) -> list[Any]:
    """Return counts of grids that grow with the ranks; the middle one has the given grid.

    Below, the grid is coarser and cut again; above, the parts are taken to be finer.
    """
    middle, grown = len(counts) // 2, []
    for place, each in enumerate(counts):
        if place < middle:
            times = 2 ** (middle - place)
            coarse = simulate.ocean(cells[times // 2 :: times, times // 2 :: times])
            grown.append(simulate.partition(coarse, each.size, _METHOD).without_graph())
        else:
            grown.append(each.refined(2 ** (place - middle)))
    return grown
