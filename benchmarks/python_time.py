"""Python's time, of calls and between messages: ``python benchmarks/python_time.py``.

The first table has the microseconds of eager calls on one rank, without messages. In the second
table, rank 0 receives and rank 1 sends repeatedly; the first column is the computation before each
call. On two cores the threads of Gloo wait for a core, which makes calls slower.
"""

import argparse
import time

import torch
import torch.distributed as dist
from measuring import arguments, median, table

import varcomm as vc

CALLS = 40  # per sample: ranks leave a barrier tens of microseconds apart


def per_call(call, samples, calls=CALLS):
    """Return microseconds per call, the median of samples."""
    seconds = []
    for _ in range(samples):
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        seconds.append((time.perf_counter() - begin) / calls)
    return 1e6 * median(seconds)


def alone(rank, samples):
    """Return microseconds of eager calls on one rank."""
    torch.set_num_threads(1)
    x = torch.ones(8, 4)
    leaf = x.clone().requires_grad_()
    plan = vc.ExchangePlan.from_indices([torch.arange(4)], 8)
    calls = {
        "all_gather_v": lambda: vc.all_gather_v(x, [8]),
        "all_gather_v with gradient": lambda: vc.all_gather_v(leaf, [8]),
        "plan": lambda: plan(x),
        "plan with gradient": lambda: plan(leaf),
        "plan forward and backward": lambda: torch.autograd.grad(plan(leaf), leaf, x[:4]),
    }
    return {name: per_call(call, samples, 500) for name, call in calls.items()}


def ping(rank, nbytes, computing, samples):
    """Return microseconds per message."""
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

    return per_call(call, samples)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options = arguments(parser, bytes=256, samples=60)
    (found,) = vc.launch(alone, 1, options.samples)
    table(("one rank", "us"), [(name, f"{each:.1f}") for name, each in found.items()])
    rows, bare = [], None
    with vc.Ranks(2) as ranks:
        for computing in (0, 5, 10, 20, 40, 80):
            took = max(ranks.run(ping, options.bytes, computing, options.samples))
            bare = took if bare is None else bare
            factor = f"{(took - bare) / computing:.1f}" if computing else ""
            rows.append((computing, f"{took:.0f}", factor))
    table(("us computed", "us per call", "us for each"), rows)


if __name__ == "__main__":
    main()
