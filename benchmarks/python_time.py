"""What a microsecond of Python costs between two messages of Gloo.

Rank 0 receives, rank 1 sends, again and again; before each call both compute for as long as the
first column says. On two cores the threads of Gloo then wait for a core: a call takes longer by
more than what was computed. So varcomm's own microseconds count more than once where messages are
small and cores few.

    python benchmarks/python_time.py
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from measuring import machine, table

import varcomm as vc

CALLS = 40  # a sample: ranks leave a barrier tens of microseconds apart


def ping(rank, nbytes, computing, samples):
    """Return microseconds a call, the median of samples."""
    torch.set_num_threads(1)
    group = dist.group.WORLD
    data = torch.ones(nbytes, dtype=torch.uint8)

    def call():
        end = time.perf_counter() + computing * 1e-6
        while time.perf_counter() < end:
            pass
        if rank == 0:
            group.recv([torch.empty_like(data)], 1, 9).wait()
        else:
            group.send([data], 0, 9).wait()

    seconds = []
    for _ in range(samples):
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        seconds.append((time.perf_counter() - begin) / CALLS)
    return 1e6 * statistics.median(seconds)


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=int, default=256)
    parser.add_argument("--samples", type=int, default=60)
    options = parser.parse_args()
    print(machine(), end="\n\n")
    rows, bare = [], None
    with vc.Ranks(2) as ranks:
        for computing in (0, 5, 10, 20, 40, 80):
            took = max(ranks.run(ping, options.bytes, computing, options.samples))
            bare = took if bare is None else bare
            factor = f"{(took - bare) / computing:.1f}" if computing else ""
            rows.append((computing, f"{took:.0f}", factor))
    table(("us computed", "us a call", "us for each"), rows)


if __name__ == "__main__":
    main()
