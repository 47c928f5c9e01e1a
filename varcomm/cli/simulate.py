"""``varcomm simulate``: predict a training step on thousands of ranks."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from varcomm import simulate
from varcomm.cli.arguments import positive, progress, separated
from varcomm.cli.table import aligned
from varcomm.errors import ArgumentError

__all__ = [
    *("DESCRIPTION", "METHOD", "add_arguments", "columns_of", "piece_of", "prepare"),
    *("run", "table", "verdict"),
]

DESCRIPTION = """\
Cut a graph for each number of ranks. Run a training step of MeshGraphNet as a
few of these ranks, on a small piece of the graph. Predict the step on all ranks
of a machine. One process does all of this.

  owned, halo    nodes of a rank, and rows it receives in an exchange
  neighbours     ranks it exchanges rows with
  MB sent        per step; so are messages
  GB             peak memory of tensors
  compute, halo, sums, step
                 ms of the slowest rank, without overlap; sums: the sums of
                 gradients and loss
  efficiency     nodes per second and rank, relative to the first line

Counts and bytes are the maximum over ranks. The graph is a mesh file, or a grid
of latitudes and longitudes, cut along a Hilbert curve.

The last line is the verdict for MeshGraphNet: the largest number of ranks whose
efficiency, relative to the first line, is at least 0.8, and the part of the
step that dominates on more ranks.

example:
  %(prog)s --grid 360x720 --ranks 1,4,16
"""

METHOD = "hilbert"
_EFFICIENT = 0.8  # least efficiency of a run that scales
_PIECE = 1500  # nodes of the piece on which steps run

# Columns of the printed table: name in columns_of, unit and format.
_TABLE = {name: (name, 1, ",.0f") for name in ("ranks", "nodes", "owned", "halo", "neighbours")} | {
    "MB sent": ("sent", 1e6, ".2f"),
    "messages": ("messages", 1, ",.0f"),
    "GB ": ("memory", 1e9, ".2f"),
    "compute ms": ("compute", 1e-3, ".2f"),
    "halo ms": ("halos", 1e-3, ".2f"),
    "sums ms": ("sums", 1e-3, ".2f"),
    "step ms": ("step", 1e-3, ".2f"),
    "efficiency": ("efficiency", 1, ".2f"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    add = parser.add_argument
    graph = parser.add_mutually_exclusive_group()
    graph.add_argument("--mesh", type=Path, help="a file of a mesh, or an OpenFOAM case")
    add("--nodes", choices=("points", "cells"), default="points", help="nodes of the mesh")
    words, grid = "rows x columns; default 180x360", separated(positive, "x")
    graph.add_argument("--grid", type=grid, default="180x360", help=words)
    words, default = "default: 1,2,4,... to 4096", [2**place for place in range(13)]
    add("--ranks", type=separated(positive), default=default, metavar="N,...", help=words)
    known = f"{', '.join(simulate.MACHINES)}; default h100-ndr"
    add("--machine", choices=simulate.MACHINES, default="h100-ndr", metavar="NAME", help=known)
    add("--machines", action="store_true", help="list the machines and the origin of their numbers")
    add("--width", type=positive, default=128, help="features of nodes and edges; default 128")
    add("--blocks", type=positive, default=8, help="layers that exchange halos; default 8")


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Cut, simulate, and print the predictions."""
    if options.machines:
        for each in simulate.MACHINES.values():
            print(f"{each.name}: {each.source}")
        return 0
    machine = simulate.MACHINES[options.machine]
    if options.mesh is None:
        from varcomm.graph.graph_file import globe

        if len(options.grid) != 2 or options.grid[1] < 3:
            raise ArgumentError("--grid must be rows x columns, such as 180x360, with 3 columns.")
        data = globe(*options.grid)
    else:
        from varcomm.graph import read_mesh

        data = read_mesh(options.mesh, options.nodes, torch.float32).data
    model = f"MeshGraphNet of width {options.width} with {options.blocks} blocks"
    print(f"{data.num_nodes:,} nodes, {data.num_edges:,} edges; {model}; {machine.name}")
    ranks, counts = sorted(set(options.ranks)), []
    for size in ranks:
        progress(f"cutting for {size} ranks")
        counts.append(simulate.partition(data, size, METHOD).without_graph())
    progress("running steps")
    step = prepare(options.width, options.blocks)
    sample = simulate.sample(step, piece_of(data), ranks, METHOD)
    progress("")
    columns = columns_of([sample.step(each) for each in counts], machine)
    print(table(columns, machine))
    print(f"\nerror of the linear fit: at most {max(sample.fit.error.values()):.1e}")
    print(verdict(columns))
    return 0


def columns_of(steps: Sequence[simulate.Step], machine: simulate.Machine) -> dict[str, list[float]]:
    """Return numbers by name, one per step; times and counts are the maximum over ranks.

    ``busy`` are the seconds of arithmetic and memory, ``launching`` those of starting operators.
    """
    rows = [_row(step, machine) for step in steps]
    rates = [row["nodes"] / row["step"] / row["ranks"] for row in rows]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return columns | {"efficiency": [rate / rates[0] for rate in rates]}


def _row(step: simulate.Step, machine: simulate.Machine) -> dict[str, float]:
    parts, counts, times = step.parts, step.counts, step.times(machine)
    halo_calls = {call.name for call in step.transfers if call.width is not None}
    halos, sums = torch.zeros(2, parts.size, dtype=torch.float64)
    for name, seconds in times.communication.items():
        (halos if name in halo_calls else sums).add_(seconds)
    operators = (counts[name] for name in ("flops", "matmul_bytes", "other_bytes"))
    of_ranks = {
        **{name: getattr(parts, name) for name in ("owned", "halo", "neighbours")},
        **{name: counts[name] for name in ("sent", "messages", "memory")},
        "busy": machine.busy(*operators),
        "launching": counts["kernels"] * machine.launch,
        **{"compute": times.compute, "halos": halos, "sums": sums, "step": times.total},
    }
    most = {name: values.max().item() for name, values in of_ranks.items()}
    return {"ranks": parts.size, "nodes": int(parts.owned.sum()), **most}


def table(columns: Mapping[str, Sequence[float]], machine: simulate.Machine) -> str:
    """Return the printed table; a star marks more memory than the machine has."""
    is_full = [memory > machine.memory for memory in columns["memory"]]
    lines = [list(_TABLE)]
    for i, full in enumerate(is_full):
        lines.append([format(columns[name][i] / unit, f) for name, unit, f in _TABLE.values()])
        lines[-1][list(_TABLE).index("GB ")] += "*" if full else " "
    note = [f"* more than the {machine.memory / 1e9:.0f} GB of a rank"] * any(is_full)
    return "\n".join([*aligned(lines, left=0), *note])


def verdict(columns: Mapping[str, Sequence[float]]) -> str:
    r"""Return one line: how far a step scales, and its largest part on more ranks.

    >>> columns = {"ranks": [1, 8], "efficiency": [1.0, 0.4], "busy": [8e-3, 1e-3]}
    >>> columns |= {"launching": [1e-3, 2e-3], "halos": [0.0, 1e-4], "sums": [0.0, 1e-4]}
    >>> print(verdict(columns).replace("; ", "\n"))
    verdict, relative to 1 rank: efficient up to 1 rank
    on 8 ranks, starting kernels takes the most time
    """
    scales = [efficiency >= _EFFICIENT for efficiency in columns["efficiency"]]
    place = scales.index(False) if False in scales else len(scales)
    first, last = (
        f"{ranks:.0f} rank{'s' * (ranks != 1)}"
        for ranks in (columns["ranks"][0], columns["ranks"][place - 1])
    )
    found = f"verdict, relative to {first}: efficient up to {last}"
    if place == len(scales):
        return f"{found}, the most that were asked for"
    parts = {
        "arithmetic and memory take": columns["busy"],
        "starting kernels takes": columns["launching"],
        "halo exchanges take": columns["halos"],
        "sums over ranks take": columns["sums"],
    }
    most = max(parts, key=lambda name: parts[name][place])
    return f"{found}; on {int(columns['ranks'][place])} ranks, {most} the most time"


def piece_of(data: Any) -> Any:
    """Return a compact piece of a graph, with the edges inside."""
    from varcomm.graph import assign

    pieces = max(1, data.num_nodes // _PIECE)
    return data.subgraph(assign(data, pieces, METHOD) == pieces // 2)


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
        optimizer = torch.optim.Adam(model.parameters(), foreach=True)  # torch's choice on GPUs
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
