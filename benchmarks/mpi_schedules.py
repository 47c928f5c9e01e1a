"""How uneven bytes move fastest on MPI: ``python benchmarks/mpi_schedules.py --ranks 2``.

The engine's calls beside mpi4py's own, which block and cannot be interrupted, and their
non-blocking forms, polled as the engine does. Shards as 1:2:...:ranks; medians of runs that take
turns, of the slowest rank; microseconds. Thresholds in varcomm/transport/mpi/engine.py come from
here.
"""

import argparse
import os
import time
from itertools import accumulate

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from measuring import machine, median, table

import varcomm as vc

GATHERS = ("Allgatherv", "Iallgatherv", "engine")
EXCHANGES = ("Alltoallv", "Ialltoallv", "engine")
BROADCASTS = ("Bcast", "engine")


def wait(works):
    for work in works:
        work.wait()


def polled(request):
    while not request.Test():
        os.sched_yield()


def calls(comm, group, engine, total):
    """Each schedule of each collective; all fill an output of their own kind."""
    from mpi4py.MPI import BYTE

    rank, ranks = comm.rank, comm.size
    sizes = [total * (r + 1) // (ranks * (ranks + 1) // 2) for r in range(ranks)]
    starts = [0, *accumulate(sizes)][:-1]
    own = torch.full((sizes[rank],), rank, dtype=torch.uint8)
    out = torch.zeros(sum(sizes), dtype=torch.uint8)
    shard, whole = [own.numpy(), BYTE], [out.numpy(), sizes, starts, BYTE]
    # everyone sends sizes[r] to rank r
    recv = [sizes[rank]] * ranks
    data, table = torch.zeros_like(out), torch.zeros(sum(recv), dtype=torch.uint8)
    send_to = [data.numpy(), sizes, starts, BYTE]
    from_all = [table.numpy(), recv, [i * sizes[rank] for i in range(ranks)], BYTE]
    buffer = [data.numpy(), BYTE]
    return {
        "all-gather": {
            "Allgatherv": lambda: comm.Allgatherv(shard, whole),
            "Iallgatherv": lambda: polled(comm.Iallgatherv(shard, whole)),
            "engine": lambda: wait(engine.all_gather(group, out, own, sizes)),
        },
        "all-to-all": {
            "Alltoallv": lambda: comm.Alltoallv(send_to, from_all),
            "Ialltoallv": lambda: polled(comm.Ialltoallv(send_to, from_all)),
            "engine": lambda: wait(engine.exchange(group, table, data, recv, sizes, "all")),
        },
        "broadcast": {
            "Bcast": lambda: comm.Bcast(buffer, 0),
            "engine": lambda: wait(engine.broadcast(group, data, 0)),
        },
    }


def measure(rank, totals, repeats):
    from mpi4py import MPI

    from varcomm.transport.engines import engine_for
    from varcomm.transport.group import resolve

    torch.set_num_threads(1)
    group = resolve(None)
    engine, comm = engine_for(group, torch.device("cpu")), MPI.COMM_WORLD.Dup()
    found = {}
    for total in totals:
        turns = max(5, min(repeats, repeats * (1 << 22) // total))
        for what, schedules in calls(comm, group, engine, total).items():
            seconds = {name: [] for name in schedules}
            for turn in range(turns + 2):
                for name, run in schedules.items():
                    comm.Barrier()
                    start = time.perf_counter()
                    run()
                    if turn > 1:
                        seconds[name].append(time.perf_counter() - start)
            found[what, total] = {name: median(taken) for name, taken in seconds.items()}
    comm.Free()
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--bytes", type=int, nargs="+", default=[768, 1 << 14, 1 << 16, 1 << 20, 50 << 20]
    )
    parser.add_argument("--repeats", type=int, default=200)
    options = parser.parse_args()
    print(machine(), end="\n\n")
    what = (options.bytes, options.repeats)
    parts = vc.launch(measure, options.ranks, *what, backend="mpi", timeout=1800)
    for kind, names in (
        ("all-gather", GATHERS),
        ("all-to-all", EXCHANGES),
        ("broadcast", BROADCASTS),
    ):
        rows = [
            [total, *(f"{1e6 * max(p[kind, total][name] for p in parts):.1f}" for name in names)]
            for total in options.bytes
        ]
        print(f"{kind}, {options.ranks} ranks, us")
        table(["bytes", *names], rows)


if __name__ == "__main__":
    main()
