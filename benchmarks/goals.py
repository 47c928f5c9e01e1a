"""Goals for speed, measured: ``python benchmarks/goals.py``.

The table compares varcomm with the fastest bare schedule of the engine, in turns, for messages of
1 KB to 16 MB and shards of 1:2. The last rows have Python's time on one rank. Inputs require a
gradient.
"""

import argparse
import os
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from measuring import machine, table
from python_time import alone
from suite import exchanges, report
from suite.floors import memory, mpi
from suite.task import FLOOR, OURS, Contender, Layout, Task, contender, measure, tolerance

import varcomm as vc
from varcomm.cli import arguments
from varcomm.cli.bench import microseconds
from varcomm.cli.workload import ROOT, Case
from varcomm.ops.reduction import sum_in_rank_order

OPERATIONS = (
    *("all_gather_v", "reduce_scatter_v", "all_reduce", "gather_v", "scatter_v", "broadcast"),
    *("all_to_all_v", "halo"),
)
SIZES, QUICK = (2**10, 2**14, 2**20, 2**24), (2**14, 2**20)
SMALL = 2**14  # bytes
RATIOS = {"gloo": (1.35, 1.15), "mpi": (None, 1.15)}  # of the bare time: small messages, others
ADDED = 15.0  # us, to small messages of MPI
PYTHON = {  # us
    "all_gather_v": 8,
    "all_gather_v with gradient": 15,
    "plan": 10,
    "plan with gradient": 17,
    "plan forward and backward": 45,
}


def build(case, peers, device):
    """Prepare an operation on this rank, as the suites of compare.py do."""
    if case.operation not in ("all_reduce", "broadcast"):
        return exchanges.build(case, peers, device)
    layout = Layout.of(replace(case, operation="all_gather_v"), dist.get_rank(), device)
    inputs = [layout.values(rank, layout.total, "x") for rank in range(layout.world)]
    x, on_mpi = inputs[layout.rank], case.engine == "mpi"
    if case.operation == "all_reduce":
        ours, expected = vc.all_reduce, sum_in_rank_order(inputs, True)
        bare, name = (mpi_sum, "Allreduce") if on_mpi else (torch_sum, "all_reduce")
    else:
        ours, expected = (lambda x: vc.broadcast(x, ROOT, like=x)), inputs[ROOT]
        bare, name = (mpi_copy, "Bcast") if on_mpi else (torch_copy, "broadcast")
    nbytes = x.numel() * x.element_size()
    return Task(
        [contender(OURS, OURS, ours, x, None), Contender(name, FLOOR, partial(bare, x))],
        expected,
        tolerance(case) if case.operation == "all_reduce" else 0.0,
        *(nbytes, layout.skew, (nbytes, nbytes), {}),
    )


def torch_sum(x):
    out = x.clone()
    dist.all_reduce(out)
    return out


def torch_copy(x):
    out = x.clone() if dist.get_rank() == ROOT else torch.empty_like(x)
    dist.broadcast(out, ROOT)
    return out


def mpi_sum(x):
    out = torch.empty_like(x)
    mpi().COMM_WORLD.Allreduce(x.numpy(), out.numpy())
    return out


def mpi_copy(x):
    out = x.clone() if dist.get_rank() == ROOT else torch.empty_like(x)
    mpi().COMM_WORLD.Bcast(memory(out), ROOT)
    return out


def row(result):
    """Return the cells of an operation."""
    name, bare = report.floor(result)
    ours, nbytes = result["timings"][OURS]["seconds"], result["asked"]
    limit = RATIOS[result["engine"]][nbytes > SMALL]
    found, unit = (bare["ratio"], "") if limit else (1e6 * (ours - bare["seconds"]), " us more")
    return [
        f"{result['engine']}: {result['operation']}, {report.short_bytes(nbytes)}",
        f"{limit or ADDED:g}{unit}",
        f"{found:.2f}{unit}" if limit else f"{found:.1f}{unit}",
        "yes" if found <= (limit or ADDED) else "no",
        f"{microseconds(ours)} us",
        f"{name} {microseconds(bare['seconds'])} us",
        f"{bare['ratio']:.2f}",
    ]


def rows(options):
    """Measure; yield the cells of each goal."""
    for engine in options.engines:
        with vc.Ranks(options.world, 600, backend=engine) as ranks:
            for name in OPERATIONS:
                for nbytes in QUICK if options.quick else SIZES:
                    case = Case(name, False, options.world, engine, "float32", nbytes, "1:2")
                    effort = options.seconds, options.repeat, False
                    yield row(ranks.run(measure, case, *effort, build)[0])
    (found,) = vc.launch(alone, 1, 20 if options.quick else 100)
    for name, limit in PYTHON.items():
        held, time = "yes" if found[name] <= limit else "no", f"{found[name]:.1f} us"
        yield [f"one rank: {name}", f"{limit} us", time, held, "", "", ""]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    engines = arguments.separated(arguments.one_of(tuple(RATIOS), "an engine"))
    parser.add_argument("--engines", type=engines, default=["gloo", "mpi"], metavar="NAME,...")
    parser.add_argument("--world", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--seconds", type=float, default=0.5, help="per case (default: 0.5)")
    parser.add_argument("--repeat", type=int, help="turns, in place of --seconds")
    parser.add_argument("--quick", action="store_true", help="16 KB and 1 MB only")
    parser.add_argument(
        "--markdown", action="store_true", help="print the table of docs/benchmarks/calls.md"
    )
    options = parser.parse_args()
    print(f"{machine()}, load before: {os.getloadavg()[0]:.1f}", end="\n\n", flush=True)
    head = ["call", "goal", "measured", "held", "time", "fastest bare schedule", "ratio"]
    found = list(rows(options))
    if options.markdown:
        # on one rank, the measured value is the time
        cells = [[line[0], line[4] or line[2], *line[5:]] for line in (head, *found)]
        print(*report.markdown(cells), sep="\n", end="\n\n")
    else:
        table(head, found)
    print(f"held: {sum(cells[3] == 'yes' for cells in found)} of {len(found)}")


if __name__ == "__main__":
    main()
