"""Python time per call on one rank, and its cost between two messages of Gloo.

The first table has microseconds per call of `all_gather_v`, without and with a gradient, and of a
plan, on one rank, beside a copy of the same tensor: compare ratios on a busy machine.

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


def call_times(rank, calls, samples):
    """Return microseconds of processor time per call, the least of the samples."""
    torch.set_num_threads(1)
    sizes = vc.ShardSizes([64])
    plain, recorded = torch.randn(64, 8), torch.randn(64, 8, requires_grad=True)
    plan = vc.ExchangePlan.from_indices([torch.arange(8)], 64)
    functions = {
        "clone": lambda: plain.clone(),
        "all_gather_v": lambda: vc.all_gather_v(plain, sizes),
        "all_gather_v, gradient": lambda: vc.all_gather_v(recorded, sizes),
        "plan": lambda: plan(plain),
        "plan, gradient": lambda: plan(recorded),
    }
    least = dict.fromkeys(functions, float("inf"))
    for _ in range(samples):
        for name, function in functions.items():
            begin = time.process_time()
            for _ in range(calls):
                function()
            least[name] = min(least[name], (time.process_time() - begin) / calls)
    return [(name, f"{1e6 * seconds:.1f}") for name, seconds in least.items()]


def main():
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=int, default=256)
    parser.add_argument("--samples", type=int, default=60)
    options = parser.parse_args()
    print(machine(), end="\n\n")
    with vc.Ranks(1) as one:
        table(("on one rank", "us a call"), one.run(call_times, 1000, options.samples // 2)[0])
    print()
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
