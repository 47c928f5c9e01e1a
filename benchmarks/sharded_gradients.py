"""Bytes and memory of training where rows are odd: ``python benchmarks/sharded_gradients.py``.

The same model, data and AdamW, by torch's ways to train it on several ranks and by varcomm's. Each
way has processes of its own, and they take turns. What travels is what the kernel has counted on
the loopback interface, of all ranks together: nobody else may use it meanwhile.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import time
import warnings

import torch
from measuring import machine, median, peak, reset_peak, resident, table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import varcomm as vc


class Rows(torch.nn.Module):
    """Some weights of `rows` x `columns`, applied one after the other; a layer each."""

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
    return wrapped, ZeroRedundancyOptimizer(
        wrapped.parameters(), torch.optim.AdamW, lr=1e-3, foreach=False
    )


def fsdp(model):
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh), adamw(model.parameters())


class Summed(torch.optim.AdamW):
    """AdamW of replicated parameters: its step begins with the mean of their gradients."""

    def step(self):
        parameters = self.param_groups[0]["params"]
        vc.data_parallel.sum_gradients(parameters, reduce="mean")
        super().step()


def summed(model):
    return model, Summed(model.parameters(), lr=1e-3, foreach=False)


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
    """Bytes on the wire and seconds a step, memory at the peak, and a number to compare."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of torch about itself
    begin = resident()
    reset_peak()
    model, optimizer = WAYS[way](Rows(rows, columns, layers))
    x = torch.randn(4, columns, generator=torch.Generator().manual_seed(rank))
    taken = []
    for step in range(steps + 1):
        torch.distributed.barrier()
        time.sleep(0.2)  # until what the others have sent has been counted
        wire, start = on_loopback(), time.perf_counter()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        seconds = time.perf_counter() - start
        torch.distributed.barrier()
        if step:  # the first one warms up
            taken.append((on_loopback() - wire, seconds))
    high = peak() - begin
    with torch.no_grad():
        outcome = model(torch.ones(1, columns)).sum().item()
    return [median(values) for values in zip(*taken, strict=True)], high, outcome


def on_loopback():
    """Bytes that the kernel has sent over the loopback interface so far."""
    with open("/proc/net/dev") as file:
        fields = next(line for line in file if line.strip().startswith("lo:")).split()
    return int(fields[9])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rows", type=int, default=9)
    parser.add_argument("--columns", type=int, default=200_000)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3, help="of each run")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each way")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    given = parser.parse_args()

    size = given.rows * given.columns * given.layers * 4
    fewest = 2 * (given.ranks - 1) / given.ranks * size
    print(f"{machine()}\n")
    print(
        f"{given.layers} weights of {given.rows} x {given.columns}, {size / 1e6:.1f} MB, on "
        f"{given.ranks} ranks; the fewest that each has to send in a step: {fewest / 1e6:.1f} MB\n"
    )
    results = {way: [] for way in given.ways}
    for turn in range(given.repeats):
        for way in given.ways if turn % 2 else given.ways[::-1]:
            arguments = (way, given.rows, given.columns, given.layers, given.steps)
            results[way].append(vc.launch(train, given.ranks, *arguments))
    outcomes = [outcome for runs in results.values() for run in runs for *_, outcome in run]
    spread = max(outcomes) - min(outcomes)
    assert spread <= 1e-4 * max(1, *map(abs, outcomes)), f"ways differ by {spread}"

    rows = []
    for way, runs in results.items():
        wire = median([run[0][0][0] for run in runs]) / given.ranks
        seconds = median([max(rank[0][1] for rank in run) for run in runs])
        high = median([max(rank[1] for rank in run) for run in runs])
        rows.append(
            [
                way,
                f"{wire / 1e6:.1f}",
                f"{wire / fewest:.2f}",
                f"{high / 1e6:.0f}",
                f"{high / size:.1f}",
                f"{seconds * 1e3:.0f}",
            ]
        )
    columns = ["", "MB sent a rank", "of the fewest", "MB at the peak", "of the model", "ms a step"]
    table(columns, rows)


if __name__ == "__main__":
    main()
