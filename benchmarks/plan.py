"""Plans against what they are made of, bare: ``python benchmarks/plan.py``.

Forward: ``index_select``, sends and receives among neighbours. Backward: sends and receives, and
``index_add_`` into zeros. Both are written with torch.distributed alone, and take turns with
the plan, since machines are noisy; so do the sums alone, on one process. A rank has one thread.
"""

import argparse
import os
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from measuring import machine, median, table

import varcomm as vc
from varcomm.plan.row_sum import RowSum

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def sent(kind, rows, rank, ranks):
    """Which rows `rank` sends to each: a share of them to two, or all of them 8 times in all."""
    generator = torch.Generator().manual_seed(rank)
    nothing = torch.zeros(0, dtype=torch.int64)
    others = [other for other in range(ranks) if other != rank]
    indices = [nothing] * ranks
    if kind == "dense":
        for other in others:
            indices[other] = torch.arange(rows).repeat(8 // len(others))
        return indices
    share = int(rows * float(kind.rstrip("%")) / 100)
    chosen = torch.randperm(rows, generator=generator)[:share]
    for place, other in enumerate(others):  # a few rows are for two
        start = place * share // len(others)
        part = chosen[max(start - share // 10, 0) : (place + 1) * share // len(others)]
        indices[other] = part.sort().values
    return indices


def in_turn(calls, seconds):
    """Milliseconds of each call, the median; the calls take turns, all ranks together."""
    times = {name: [] for name in calls}
    for call in calls.values():
        call()
    begin = time.perf_counter()
    turns = 5
    while turns:
        for name, call in calls.items():
            dist.barrier()
            start = time.perf_counter()
            call()
            times[name].append(1e3 * (time.perf_counter() - start))
        turns -= 1
        if not turns:  # rank 0 tells whether there is time for more
            more = torch.tensor([5 if time.perf_counter() - begin < seconds else 0])
            dist.broadcast(more, 0)
            turns = int(more)
    return {name: median(values) for name, values in times.items()}


def bare_exchange(values, out, send_counts, recv_counts):
    """Sends and receives between those who have rows for each other."""
    works = []
    for source, part in enumerate(out.split(recv_counts)):
        if len(part):
            works.append(dist.irecv(part, source))
    for target, part in enumerate(values.split(send_counts)):
        if len(part):
            works.append(dist.isend(part, target))
    for work in works:
        work.wait()


def measure(rank, fn, cases, ranks, seconds):
    """Milliseconds of each case; all of them in one world, which takes seconds to start."""
    torch.set_num_threads(1)
    return [fn(rank, *case, ranks, seconds) for case in cases]


def exchanges(rank, kind, rows, width, dtype, ranks, seconds):
    """There and back, of the plan and bare; and of planning."""
    dtype = DTYPES[dtype]
    indices = sent(kind, rows, rank, ranks)
    dist.barrier()
    start = time.perf_counter()
    plan = vc.ExchangePlan.from_indices(indices, rows)
    built = 1e3 * (time.perf_counter() - start)
    x = torch.randn(rows, width).to(dtype).requires_grad_()
    y = plan(x)
    gradient = torch.randn(y.shape).to(dtype)
    send, recv = list(plan.send_counts), list(plan.recv_counts)
    plain = x.detach()

    def bare_forward():
        out = plain.new_empty(sum(recv), width)
        bare_exchange(plain.index_select(0, plan.send_index), out, send, recv)
        return out

    def bare_backward():
        back = plain.new_empty(sum(send), width)
        bare_exchange(gradient, back, recv, send)
        return plain.new_zeros(rows, width).index_add_(0, plan.send_index, back)

    def backward():
        return torch.autograd.grad(y, x, gradient, retain_graph=True)[0]

    dist.barrier()
    start = time.perf_counter()
    total = backward()
    first = 1e3 * (time.perf_counter() - start)
    assert torch.equal(y, bare_forward())
    torch.testing.assert_close(total, bare_backward())
    calls = {
        "forward": lambda: plan(x),
        "bare forward": bare_forward,
        "backward": backward,
        "bare backward": bare_backward,
    }
    return in_turn(calls, seconds) | {"built": built, "first backward": first}


def sums_alone(rank, kind, rows, width, dtype, ranks, seconds):
    """The sum alone, and index_add_ into zeros."""
    index = torch.cat(sent(kind, rows, 0, 3))
    values = torch.randn(len(index), width).to(DTYPES[dtype])
    sums = RowSum(index, rows)
    start = time.perf_counter()
    _ = sums.bags
    planned = 1e3 * (time.perf_counter() - start)
    calls = {
        "sum": lambda: sums(values),
        "bare": lambda: values.new_zeros(rows, width).index_add_(0, index, values),
    }
    return in_turn(calls, seconds) | {"planned": planned}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 1_000_000])
    parser.add_argument("--kinds", nargs="+", default=["2%", "20%", "dense"])
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 3, 16, 64, 128])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32", "bf16"])
    parser.add_argument("--seconds", type=float, default=1.0, help="for each line of a table")
    parser.add_argument("--most", type=float, default=3e7, help="numbers that a rank sends or has")
    given = parser.parse_args()
    cases = [
        (kind, rows, width, name)
        for rows in given.rows
        for kind in given.kinds
        for width in given.widths
        for name in given.dtypes
        if rows * width * (8 if kind == "dense" else 1) <= given.most
    ]
    print(machine(), "\n")
    lines = []
    (costs,) = vc.launch(measure, 1, sums_alone, cases, 1, given.seconds, timeout=3600)
    for case, cost in zip(cases, costs, strict=True):
        ratio = f"{cost['sum'] / cost['bare']:.2f}"
        lines.append([*case, *_ms(cost, "bare", "sum"), ratio, *_ms(cost, "planned")])
    print("the sum alone, one process, ms")
    table(["sent", "rows", "width", "dtype", "bare", "varcomm", "ratio", "planned"], lines)
    lines = []
    world = (given.ranks, exchanges, cases, given.ranks, given.seconds)
    of_ranks = vc.launch(measure, *world, timeout=3600)
    for case, *parts in zip(cases, *of_ranks, strict=True):
        cost = {key: max(part[key] for part in parts) for key in parts[0]}
        line = [*case]
        for way in ("forward", "backward"):
            ratio = f"{cost[way] / cost[f'bare {way}']:.2f}"
            line += [*_ms(cost, f"bare {way}", way), ratio]
        lines.append(line + _ms(cost, "built", "first backward"))
    print(f"exchanges, {given.ranks} ranks, ms")
    columns = ["sent", "rows", "width", "dtype", "bare", "forward", "ratio", "bare", "backward"]
    table([*columns, "ratio", "building", "first backward"], lines)


def _ms(cost, *keys):
    return [f"{cost[key]:.3f}" for key in keys]


if __name__ == "__main__":
    main()
