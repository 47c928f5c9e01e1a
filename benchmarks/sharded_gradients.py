"""Bytes and memory of training with uneven rows: ``python benchmarks/sharded_gradients.py``.

The script trains one model with the methods of torch and of varcomm for several ranks. Each method
has its own processes, and methods take turns. The kernel counts the bytes of all ranks on the
loopback interface, which no other program may use during the run.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import time
import warnings

import torch
from measuring import arguments, median, reset_peak, status, table, turns_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import varcomm as vc


class Rows(torch.nn.Module):
    """Layers with weights of `rows` x `columns`, applied in sequence."""

    def __init__(self, rows, columns, layers):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(columns, rows, bias=False) for _ in range(layers)
        )

    def forward(self, x):
        return sum(torch.tanh(layer(x)) for layer in self.layers)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=False)


def ddp(model):
    wrapped = DistributedDataParallel(model)
    return wrapped, adamw(wrapped.parameters())


def zero(model):
    wrapped = DistributedDataParallel(model)
    options = {"lr": 1e-3, "foreach": False}
    return wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, **options)


def fsdp(model):
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh), adamw(model.parameters())


def summed(model):
    return model, adamw(model.parameters())


def sharded(model):
    return model, vc.data_parallel.ShardedGradients(model, adamw)


WAYS = {
    "DistributedDataParallel": ddp,
    "... and ZeroRedundancyOptimizer": zero,
    "fully_shard": fsdp,
    "varcomm sum_gradients": summed,
    "varcomm ShardedGradients": sharded,
}


def train(rank, way, rows, columns, layers, steps):
    """Return bytes and seconds per step, peak memory, and a number for the comparison."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # warnings of torch about itself
    begin = status("VmRSS")
    reset_peak()
    model, optimizer = WAYS[way](Rows(rows, columns, layers))
    x = torch.randn(4, columns, generator=torch.Generator().manual_seed(rank))
    ranks, taken = torch.distributed.get_world_size(), []
    for step in range(steps + 1):
        torch.distributed.barrier()
        time.sleep(0.2)  # until the kernel has counted the bytes of the other ranks
        wire, start = on_loopback(), time.perf_counter()
        optimizer.zero_grad()
        loss = model(x).square().mean()
        if way == "varcomm sum_gradients":
            (loss / ranks).backward()
            vc.data_parallel.sum_gradients(model)
        else:
            loss.backward()
        optimizer.step()
        seconds = time.perf_counter() - start
        torch.distributed.barrier()
        if step:  # the first one warms up
            taken.append((on_loopback() - wire, seconds))
    high = status("VmHWM") - begin
    with torch.no_grad():
        outcome = model(torch.ones(1, columns)).sum().item()
    return [median(values) for values in zip(*taken, strict=True)], high, outcome


def on_loopback():
    """Return the bytes that the kernel has sent over the loopback interface."""
    with open("/proc/net/dev") as file:
        fields = next(line for line in file if line.strip().startswith("lo:")).split()
    return int(fields[9])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    given = arguments(parser, ranks=8, rows=9, columns=200_000, layers=4, steps=3, repeats=3)
    size = given.rows * given.columns * given.layers * 4
    fewest = 2 * (given.ranks - 1) / given.ranks * size
    print(
        f"{given.layers} weights of {given.rows} x {given.columns}, {size / 1e6:.1f} MB, on "
        f"{given.ranks} ranks; the fewest that each has to send in a step: {fewest / 1e6:.1f} MB\n"
    )
    results = {way: [] for way in WAYS}
    for turn in range(given.repeats):
        for way in turns_of(WAYS, turn):
            what = (way, given.rows, given.columns, given.layers, given.steps)
            results[way].append(vc.launch(train, given.ranks, *what))
    outcomes = [outcome for runs in results.values() for run in runs for *_, outcome in run]
    spread = max(outcomes) - min(outcomes)
    assert spread <= 1e-4 * max(1, *map(abs, outcomes)), f"ways differ by {spread}"

    rows = []
    for way, runs in results.items():
        wire = median([run[0][0][0] for run in runs]) / given.ranks
        seconds = median([max(rank[0][1] for rank in run) for run in runs])
        high = median([max(rank[1] for rank in run) for run in runs])
        cells = [f"{wire / 1e6:.1f}", f"{wire / fewest:.2f}", f"{high / 1e6:.0f}"]
        rows.append([way, *cells, f"{high / size:.1f}", f"{seconds * 1e3:.0f}"])
    columns = ["", "MB sent per rank", "of the fewest", "MB at the peak", "of the model"]
    table([*columns, "ms per step"], rows)


if __name__ == "__main__":
    main()
