"""``varcomm partition``: a graph in a file, cut into the parts of many ranks by one process."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from varcomm.errors import ArgumentError

__all__ = ["DESCRIPTION", "HELP", "METHODS", "add_arguments", "run"]

_MOST = 1_000_000  # parts: a count for each of them is held

HELP = "cut a graph or mesh into parts for ranks to load"
DESCRIPTION = """\
Cut a graph into parts in this one process, report how good they are, and write
them into a folder, which varcomm.graph.PartitionedGraph.load reads on as many
ranks, on more, or on fewer.

FILE is one of
  a mesh          in any format that meshio reads: .vtu, .msh, .stl, ...;
                  its points are the nodes
  .graph, .metis  METIS's format, with or without weights
  .pt, .pth       a dict of tensors with edge_index (2, E), and others as x or
                  pos, as torch.save(data.to_dict(), path) writes it of a Data;
                  nothing else is unpickled
  .npz            NumPy's arrays: edge_index (2, E) or edges (E, 2), and
                  attributes by their names

example:
  %(prog)s wing.vtu --parts 8 --out wing-8 --plot wing-8.png
"""

METHODS = ("metis", "kahip", "rcb", "hilbert", "block", "random")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    add = parser.add_argument
    add("file", type=Path, metavar="FILE", help="a mesh or a graph")
    add("--parts", type=_positive, required=True, metavar="N", help="how many ranks")
    add(
        "--method",
        choices=METHODS,
        metavar="M",
        help=f"{', '.join(METHODS)}; default: metis where pymetis is installed, else rcb where "
        "there are positions, else block. metis and kahip need more nodes than parts, and more "
        "than one part: else it is block",
    )
    add("--out", type=Path, metavar="FOLDER", help="write the parts; an earlier one is replaced")
    add("--plot", type=Path, metavar="PNG", help="draw the parts: .png, .svg or .pdf (matplotlib)")
    add("--json", action="store_true", help="print the report as JSON")


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run the command."""
    from varcomm import simulate
    from varcomm.graph.files.graph_file import read_graph
    from varcomm.graph.files.plot import check_target, places
    from varcomm.graph.files.staging import check_place

    if options.plot is not None:  # before the work
        check_target(options.plot)
    if options.out is not None:
        check_place(options.out)
    data = read_graph(options.file)
    if options.plot is not None:
        places(data.pos, None)
    try:
        parts = simulate.partition(data, options.parts, options.method)
    except ArgumentError as error:
        raise ArgumentError(f"{options.file}: {error}") from error
    report = parts.report()
    if options.out is not None:
        with _bar(options.parts) as progress:
            parts.save(options.out, progress)
    if options.plot is not None:
        parts.plot(options.plot)
    if options.json:
        print(json.dumps(report.to_dict(), indent=1))
        return 0
    print(report)
    if options.out is not None:
        print(f"parts: {options.out}")
    if options.plot is not None:
        print(f"picture: {options.plot}")
    return 0


@contextmanager
def _bar(parts: int) -> Iterator[Callable[[int], object] | None]:
    """Yield what shows how many parts are written, to whoever looks on, where tqdm is installed."""
    if not sys.stderr.isatty():
        yield None
        return
    try:
        from tqdm import tqdm
    except ImportError:
        yield None
        return
    with tqdm(total=parts, desc="writing parts", unit="part", leave=False) as bar:
        yield lambda rank: bar.update()


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive whole number")
    if int(text) > _MOST:
        raise argparse.ArgumentTypeError(f"{text} are more parts than {_MOST:,}")
    return int(text)
