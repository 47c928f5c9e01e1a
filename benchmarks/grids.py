"""A U-Net on an image split over ranks, beside one process: ``python benchmarks/grids.py``.

A step is forward, backward and `varcomm.data_parallel.sum_gradients`, on one thread per rank. The
floor is the plain network on as many rows as a rank has, on all ranks at once, without messages:
what these cores can do. A second floor waits for the other ranks before each convolution and norm,
which need their rows or sums. Memory is the peak of the tensors that a step makes, and the growth
of the peak of a new process. ``mpiexec -n 2 python benchmarks/grids.py`` times the steps with MPI.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from measuring import (
    Measured,
    arguments,
    median,
    ms,
    peak_of_tensors,
    slowest,
    spread,
    table,
    turns_of,
)
from torch.nn import GroupNorm

import varcomm as vc
from varcomm.data_parallel import sum_gradients
from varcomm.grid.fetch import span
from varcomm.models import UNet

CHANNELS = 16
FLOORS = ("floor", "floor that waits")


class Wait(torch.autograd.Function):
    """Wait for the other ranks, forward and backward."""

    @staticmethod
    def forward(ctx, x):
        vc.all_reduce(torch.zeros(1))
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        vc.all_reduce(torch.zeros(1))
        return gradient


def step_of(kind, rows, columns):
    """Return a step of a kind of run, of this rank."""
    torch.manual_seed(0)
    model = UNet(CHANNELS, CHANNELS, hidden_channels=CHANNELS)
    image = torch.randn(1, CHANNELS, rows, columns)
    rank, ranks = vc.init().rank, vc.init().size
    if kind == "split":
        grid = vc.grid.Grid((rows, columns))
        part = grid.ranges[0]
        image = grid.field(image[:, :, part.start : part.stop].clone())
    elif kind != "plain":
        image = image[:, :, rows * rank // ranks : rows * (rank + 1) // ranks].clone()
    if kind == "floor that waits":
        for module in model.modules():
            if getattr(module, "kernel_size", (1, 1)) != (1, 1) or isinstance(module, GroupNorm):
                module.register_forward_pre_hook(lambda _, given: Wait.apply(*given))

    def step():
        loss = model(image).square()
        loss = grid.mean(loss) if kind == "split" else loss.mean()
        loss.backward()
        if kind == "split":
            sum_gradients(model)
        model.zero_grad()

    return step


def timed(step):
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def beside_the_plain(rank, sizes, turns):
    """Return seconds on one rank, split and plain, by size."""
    torch.set_num_threads(1)
    found = {}
    for size in sizes:
        kinds = {kind: step_of(kind, size, size) for kind in ("split", "plain")}
        found[size] = {kind: [] for kind in kinds}
        for turn in range(turns + 2):
            for kind in turns_of(kinds, turn):
                found[size][kind].append(timed(kinds[kind]))
    return {n: {k: v[2:] for k, v in each.items()} for n, each in found.items()}


def on_ranks(rank, size, turns):
    """Return seconds of a step split over ranks, of the floor, and of the plain on rank 0 alone."""
    torch.set_num_threads(1)
    kinds = {kind: step_of(kind, size, size) for kind in ("split", *FLOORS, "plain")}
    found = {kind: [] for kind in kinds}
    for turn in range(turns + 2):
        for kind in turns_of(kinds, turn):
            dist.barrier()
            found[kind].append(timed(kinds[kind]) if kind != "plain" or rank == 0 else 0.0)
    dist.barrier()
    return {kind: each[2:] for kind, each in found.items()}


def memory(rank, kind, size):
    """Return the peak of a step's tensors, and the growth of the peak of the process."""
    torch.set_num_threads(1)
    step = step_of(kind, size, size)
    with Measured() as cost:
        step()
        step()
    return peak_of_tensors(step), cost.rise


def exchange(rank, size, turns, count=20):
    """Return seconds of a convolution's exchange, of its bare messages, and with the copy."""
    torch.set_num_threads(1)
    ranks = dist.get_world_size()
    grid = vc.grid.Grid((size, size))
    x = grid.field(torch.randn(1, CHANNELS, len(grid.ranges[0]), size))
    own, others = x.local, [r for r in (rank - 1, rank + 1) if 0 <= r < ranks]
    edges = {r: own[:, :, :1] if r < rank else own[:, :, -1:] for r in others}
    got = {r: torch.empty(1, CHANNELS, 1, size) for r in others}

    def bare():
        works = [dist.irecv(got[r], r) for r in others]
        works += [dist.isend(edges[r].contiguous(), r) for r in others]
        for work in works:
            work.wait()

    def joined():
        bare()
        before = [got[r] for r in others if r < rank]
        return torch.cat([*before, own, *(got[r] for r in others if r > rank)], 2)

    split = x.grid_layout.splits[0]
    reads = [(max(0, a - 1), min(size, b + 1)) for a, b in split.spans]

    def ours():
        return span(own, split, reads)

    calls = {"bare messages": bare, "and a copy": joined, "and a copy, in a field": ours}
    found = {name: [] for name in calls}
    for turn in range(turns + 2):
        for name in turns_of(calls, turn):
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(count):
                calls[name]()
            found[name].append((time.perf_counter() - begin) / count)
    return {name: each[2:] for name, each in found.items()}


def rows_of_steps(parts):
    """Return the slowest rank's seconds by kind of run, and the cells of a table."""
    found = {kind: slowest([part[kind] for part in parts]) for kind in parts[0]}
    return [
        [kind, *ms(median(seconds)), spread(found["plain"], seconds)]
        for kind, seconds in found.items()
    ]


def with_mpi(size, turns):
    """Print the table of steps of the ranks that mpiexec has started."""
    world = vc.init()
    parts = [None] * world.size
    dist.all_gather_object(parts, on_ranks(world.rank, size, turns))
    if world.rank == 0:
        table(["", "ms", "times as fast (quartiles)"], rows_of_steps(parts))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options = arguments(parser, ranks=2, turns=11, size=512, sizes=[64, 128, 256, 512])
    if "PMI_SIZE" in os.environ:
        return with_mpi(options.size, options.turns)
    alone = vc.launch(beside_the_plain, 1, options.sizes, options.turns, timeout=600)[0]
    rows = [
        [n, *ms(median(each["split"]), median(each["plain"])), spread(each["split"], each["plain"])]
        for n, each in alone.items()
    ]
    table(["rows", "1 rank, ms", "plain, ms", "ratio (quartiles)"], rows)

    parts = vc.launch(on_ranks, options.ranks, options.size, options.turns, timeout=600)
    rows, plain = rows_of_steps(parts), None
    for row in reversed(rows):
        ranks = 1 if row[0] == "plain" else options.ranks
        found = vc.launch(memory, ranks, row[0], options.size, timeout=600)
        peaks = [max(each) for each in zip(*found, strict=True)]
        plain = plain or peaks
        row += [f"{n / 1e6:.0f} ({n / of:.2f})" for n, of in zip(peaks, plain, strict=True)]
    table(["", "ms", "times as fast (quartiles)", "MB of tensors", "MB of process"], rows)

    parts = vc.launch(exchange, options.ranks, options.size, options.turns)
    found = {name: slowest([part[name] for part in parts]) for name in parts[0]}
    rows = [
        [name, f"{1e6 * median(each):.0f}", spread(each, found["bare messages"])]
        for name, each in found.items()
    ]
    table(["", "us", "of bare messages (quartiles)"], rows)


if __name__ == "__main__":
    main()
