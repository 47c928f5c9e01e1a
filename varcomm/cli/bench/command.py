"""The arguments of ``python -m varcomm bench``, and the run from the first case to the last."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import TypeVar

import torch

from varcomm.cli.bench import table
from varcomm.cli.bench.case import Case, Result
from varcomm.cli.bench.files import check_writable, is_kept
from varcomm.cli.bench.plot import checked_figure, plot
from varcomm.cli.bench.ranks import Here, Pool, is_first, is_launched, pool
from varcomm.cli.bench.report import Report, described
from varcomm.cli.bench.sizes import checked_skew, to_bytes
from varcomm.cli.bench.suites.all import SUITES, checked_operations
from varcomm.cli.bench.timing import Effort, measure
from varcomm.errors import ArgumentError

__all__ = ["DESCRIPTION", "HELP", "add_arguments", "run"]

HELP = "measure varcomm beside bare calls and other libraries"
DESCRIPTION = """\
Measure varcomm beside the fastest bare schedule of the engine (the floor) and
beside other libraries, all in one run, in turns.

A time is that of the slowest rank: the median over repetitions, and its
quartiles. It goes from the input to a new output, whose allocation is included,
for all alike. Inputs require a gradient; a backward is measured on a graph that
is there already. Everybody's result is checked first.

  bytes     of the whole; for all-to-alls, the mean of what a rank has
  skew      largest over mean shard
  algbw     bytes over time, GB/s
  busbw     bytes that the busiest rank has to send, or to receive, over time:
            as nccl-tests has it where shards are even
  wire      bytes sent over the fewest possible, all ranks together
  /floor    varcomm's time over that of the fastest bare schedule
  peers     their time over varcomm's: 2.00 is half as fast

example:
  %(prog)s --world 2 --sizes 1M,16M --skews even,1:8 \\
      --dtypes float32 --json run.json --plot run.png
"""

T = TypeVar("T")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    many = "a comma between them"
    add = parser.add_argument
    add(
        "--suite",
        type=_list(_one_of(tuple(SUITES), "suite")),
        action="extend",
        help=f"what to measure: {', '.join(SUITES)} (default: ops)",
    )
    add("--engine", choices=("gloo", "nccl", "mpi"), default="gloo", help="default: gloo")
    add(
        "--world",
        type=_list(_positive),
        help="numbers of ranks, started on this machine (default: 2,3); under torchrun or mpirun "
        "the ranks are those of the job",
    )
    add(
        "--sizes",
        type=_list(to_bytes),
        default=[768, 2**14, 2**16, 2**20, 2**24],
        help=f"bytes, with K, M or G; {many} (default: 768,16K,64K,1M,16M)",
    )
    add(
        "--skews",
        type=_list(checked_skew),
        default=["even", "1:2", "1:8", "empty"],
        help="how shards differ: even, empty (the first rank has nothing), or weights that ranks "
        "take in turn (default: even,1:2,1:8,empty)",
    )
    add(
        "--dtypes",
        type=_list(_dtype),
        default=["float32", "bfloat16"],
        help="floating dtypes of torch (default: float32,bfloat16)",
    )
    add("--operations", type=_list(str), help="only these, of the suites chosen")
    add(
        "--seconds",
        type=_seconds,
        default=Effort.seconds,
        help="about how long a case takes; it has 15 repetitions at least and 200 at most "
        f"(default: {Effort.seconds})",
    )
    add("--repeat", type=_positive, help="repetitions of each case, whatever they take")
    add("--no-peers", action="store_true", help="leave out other libraries")
    add("--json", type=Path, metavar="FILE", help="write all that was measured")
    add(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw bandwidth against bytes, for the most uneven shards (matplotlib)",
    )
    add(
        "--from",
        type=Path,
        dest="source",
        metavar="FILE",
        help="read the results of an earlier --json in place of measuring",
    )
    add("--markdown", action="store_true", help="end with condensed tables in Markdown")


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Measure, or read, and show."""
    if options.plot:
        checked_figure(options.plot)
    speaks = is_first()
    if speaks:
        try:
            for path in filter(None, (options.json, options.plot)):
                check_writable(path)
        except ArgumentError as error:
            parser.error(str(error))
    if options.source:
        if speaks:
            _show_again(Report.load(options.source), options)
        return 0
    if options.engine == "nccl" and not torch.cuda.is_available():
        parser.error("--engine nccl: this machine has no GPU that torch can use")
    suites = list(dict.fromkeys(options.suite or ["ops"]))
    try:
        operations = checked_operations(suites, options.operations)
    except ArgumentError as error:
        parser.error(str(error))
    if "graph" in suites:
        import_module("varcomm.graph")  # says what to install, where something is missing
    here = Here(options.engine) if is_launched() else None
    if here is not None and options.world not in (None, [here.size]):
        parser.error(f"this job has {here.size} ranks: leave --world out")
    options.world = [here.size] if here else options.world or [2, 3]
    with open(os.devnull, "w") as nowhere, redirect_stdout(sys.stdout if speaks else nowhere):
        report = Report(described(options.engine, _command()), [])
        _begin(report)
        stopped = False
        try:
            for result in _measured(options, operations, here):
                report.results.append(result)
                print(table.row(result), flush=True)
                if speaks and options.json and is_kept(options.json):
                    report.save(options.json)
        except KeyboardInterrupt:
            stopped = True
        if speaks and (report.results or not stopped):
            _show(report, options)
    if stopped and speaks:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
    return 130 if stopped else 0


def _show_again(report: Report, options: argparse.Namespace) -> None:
    _begin(report)
    for result in report.results:
        print(table.row(result))
    _show(report, options)


def _begin(report: Report) -> None:
    print("\n".join(report.lines()), end="\n\n")
    print(table.head(), flush=True)


def _measured(
    options: argparse.Namespace, operations: Sequence[tuple[str, str]], here: Here | None
) -> Iterator[Result]:
    """Measure case by case, on ranks that stay alive for all of one number."""
    effort = Effort(options.seconds, options.repeat, not options.no_peers)
    for world in options.world:
        ranks: Pool = here or pool(world, options.engine)
        with ranks:
            for case in _cases(options, operations, world):
                build = SUITES[case.suite].build
                yield Result.of(case, ranks.run(measure, case, effort, build))


def _cases(
    options: argparse.Namespace, operations: Sequence[tuple[str, str]], world: int
) -> Iterator[Case]:
    for suite, operation in operations:
        for backward in (False, True):
            for dtype in options.dtypes:
                for nbytes in options.sizes:
                    for skew in options.skews:
                        yield Case(
                            *(suite, operation, backward, world),
                            *(options.engine, dtype, nbytes, skew),
                        )


def _show(report: Report, options: argparse.Namespace) -> None:
    """Print what follows the table, and write the files."""
    print()
    for line in table.reasons(report.results):
        print(f"could not run: {line}")
    print("", *table.goals(report.results), sep="\n")
    if options.markdown:
        print("", *table.condensed(report.results), sep="\n")
        print(*table.goals(report.results, as_markdown=True), sep="\n")
    if options.json:
        report.save(options.json)
    if options.plot:
        plot(report.results, options.plot)


def _command() -> str:
    return shlex.join(["python", "-m", "varcomm", *sys.argv[1:]])


def _list(read: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Return what reads several, with commas between them."""

    def several(text: str) -> list[T]:
        try:
            return [read(part) for part in text.split(",")]
        except ArgumentError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return several


def _one_of(names: Sequence[str], what: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in names:
            raise ArgumentError(f"{text!r} is no {what}: write {', '.join(names)}")
        return text

    return read


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive whole number")
    return int(text)


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number of seconds")
    return number


def _dtype(text: str) -> str:
    dtype = getattr(torch, text, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise ArgumentError(f"{text!r} is no dtype to measure: write float32, bfloat16, ...")
    return text
