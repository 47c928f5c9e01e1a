"""varcomm beside bare schedules and other libraries: ``python benchmarks/compare.py --help``.

All contenders of a case run in turns. Times are of the slowest rank, from the input to a new
output: median and quartiles over repetitions. Inputs require a gradient; the graph of a backward
exists before the clock starts. Every result is checked first. Columns are as in `varcomm bench`,
and:

  skew      largest over mean shard
  /floor    varcomm's time over that of the fastest bare schedule
  peers     their time over varcomm's: 2.00 is half as fast
"""

import argparse
import json
import os
import shlex
import sys
from contextlib import redirect_stdout
from datetime import UTC, datetime
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from measuring import machine
from suite import exchanges, layers, report
from suite.peers import versions
from suite.task import measure

from varcomm.cli import arguments
from varcomm.cli.bench import add_case_arguments, cases, check_options, is_first_rank

# Operations of each suite, and build(case, peers, device), which prepares a case on a rank.
SUITES = {
    "ops": (tuple(exchanges.PRIMITIVES), exchanges.build),
    "plan": (exchanges.PLANS, exchanges.build),
    "graph": (tuple(layers.GRAPH), layers.build_graph),
    "tensor-parallel": (tuple(layers.TENSOR_PARALLEL), layers.build_tensor_parallel),
    "debug": (tuple(exchanges.PRIMITIVES), exchanges.build_debug),
}


def parse():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    names = arguments.separated(arguments.one_of(tuple(SUITES), "a suite"))
    suites = f"some of {', '.join(SUITES)} (default: ops)"
    parser.add_argument("--suite", type=names, default=["ops"], metavar="NAME,...", help=suites)
    add_case_arguments(parser)
    some = arguments.separated(str)
    parser.add_argument("--operations", type=some, metavar="NAME,...", help="of these suites")
    parser.add_argument("--no-peers", action="store_true", help="leave out other libraries")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw bandwidth against bytes")
    earlier = "show the results of an earlier --json; measure nothing"
    parser.add_argument("--from", type=Path, dest="source", metavar="FILE", help=earlier)
    parser.add_argument("--markdown", action="store_true", help="end with condensed tables")
    options = parser.parse_args()
    known = [name for suite in options.suite for name in SUITES[suite][0]]
    if wrong := set(options.operations or ()) - set(known):
        parser.error(f"--operations: {', '.join(wrong)}; choose some of {', '.join(known)}")
    return options, parser


def main():
    options, parser = parse()
    if options.source:
        record = json.loads(options.source.read_text())
        print("\n".join(f"{name}: {value}" for name, value in record["about"].items()), end="\n\n")
        print(report.head(), *map(report.row, record["results"]), sep="\n")
        show(record, options)
        return 0
    check_options(options, parser)
    about = {"machine": machine(), "torch": torch.__version__, **versions()}
    about["command"] = shlex.join(["python", *sys.argv])
    about["date"] = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    record = {"about": about, "results": []}
    chosen = [
        (suite, name)
        for suite in options.suite
        for name in SUITES[suite][0]
        if options.operations is None or name in options.operations
    ]
    speaks = is_first_rank()
    with open(os.devnull, "w") as nowhere, redirect_stdout(sys.stdout if speaks else nowhere):
        print("\n".join(f"{name}: {value}" for name, value in about.items()), end="\n\n")
        print(report.head(), flush=True)
        try:
            for case, on_ranks in cases(options, parser, chosen):
                build = SUITES[case.suite][1]
                effort = options.seconds, options.repeat, not options.no_peers
                record["results"].append(on_ranks(measure, case, *effort, build))
                print(report.row(record["results"][-1]), flush=True)
        except KeyboardInterrupt:
            print("interrupted")
        if speaks:
            show(record, options)


def show(record, options):
    """Print the text after the table, and write the files."""
    results = record["results"]
    print("", *report.reasons(results), sep="\n")
    if options.markdown:
        print("", *report.condensed(results), sep="\n")
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    if options.plot and results:
        report.plot(results, options.plot)


if __name__ == "__main__":
    main()
