"""``varcomm partition``: cut a graph in a file into parts, in one process."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from varcomm.cli.arguments import one_of, positive, progress
from varcomm.errors import ArgumentError

__all__ = ["DESCRIPTION", "METHODS", "add_arguments", "run"]

DESCRIPTION = """\
Cut a graph into parts in one process, report their quality, and write them into
a folder. varcomm.graph.PartitionedGraph.load reads it on any number of ranks.

FILE is one of
  a mesh          a file that read_mesh reads: .vtu, .msh, .stl, ...; or the
                  folder of an OpenFOAM case; --nodes selects points or cells
  .pt, .pth       a Data or a HeteroData of tensors, torch.save(data, path), or
                  a dict of tensors, torch.save(data.to_dict(), path); nothing
                  else is unpickled
  .npz            NumPy arrays: edge_index (2, E) or edges (E, 2), and
                  attributes by name

example:
  %(prog)s wing.vtu --parts 8 --out wing-8 --plot wing-8.png
"""

_LEGEND = """\
  owned       nodes of the rank
  halo        nodes of other ranks that it receives in each layer
  edges, cut  edges into its nodes, and how many of them start in the halo
  sent        rows that the rank sends in each layer
  neighbours  number of ranks that receive these rows
  imbalance   the largest part divided by the mean; 1.00 is even
"""

METHODS = ("metis", "rcb", "hilbert", "block", "random")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    add = parser.add_argument
    add("file", type=Path, metavar="FILE", help="a mesh or a graph")
    add("--parts", type=positive, required=True, metavar="N", help="number of ranks")
    method = (
        f"{', '.join(METHODS)}; default: metis if pymetis is installed, else rcb if the graph has "
        "positions, else block. metis needs several parts and more nodes than parts; "
        "else block is used. Or a file with the rank of each node: an integer per line, as "
        "gpmetis writes, .npy or .pt"
    )
    add("--method", type=method_or_file, metavar="M", help=method)
    add("--nodes", choices=("points", "cells"), default="points", help="nodes of a mesh")
    add("--out", type=Path, metavar="FOLDER", help="write the parts; replaces an earlier partition")
    add(
        "--plot",
        type=picture,
        metavar="PNG",
        help="draw the parts: .png, .svg or .pdf (matplotlib)",
    )
    add("--json", action="store_true", help="print the report as JSON")


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Check the targets, cut, write and report."""
    from varcomm import simulate
    from varcomm.graph.graph_file import read_graph_and_mesh, read_owners
    from varcomm.graph.plot import check_target
    from varcomm.graph.saved_partition import check_place

    if options.plot is not None:
        check_target(options.plot)
    if options.out is not None:
        check_place(options.out)
    data, mesh = read_graph_and_mesh(options.file, options.nodes)
    method = options.method
    if isinstance(method, Path):
        method = read_owners(method)
    try:
        parts = simulate.partition(data, options.parts, method)
    except ArgumentError as error:
        raise ArgumentError(f"{options.file}: {error}") from error
    if options.plot is not None:  # first: it refuses nodes without positions
        parts.plot(options.plot, mesh)
    if options.out is not None:
        total = options.parts
        parts.save(options.out, lambda rank: progress(f"writing parts: {rank + 1} of {total}"))
        progress("")
    if options.json:
        print(json.dumps(parts.report().to_dict(), indent=1))
        return 0
    print(parts.report(), _LEGEND, sep="\n\n")
    for name, path in (("parts", options.out), ("picture", options.plot)):
        if path is not None:
            print(f"{name}: {path}")
    if options.out is None:
        print("next: write the parts with --out FOLDER")
    else:
        print(f"next: varcomm.graph.PartitionedGraph.load({str(options.out)!r}) on each rank")
    return 0


def method_or_file(text: str) -> str | Path:
    """Read the name of a method, or of a file of owners."""
    is_file = text not in METHODS and Path(text).is_file()
    return Path(text) if is_file else one_of(METHODS, "a method or a file")(text)


def picture(text: str) -> Path:
    """Read the name of a picture."""
    path = Path(text)
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"{text!r} must end in .png, .svg or .pdf")
    return path
