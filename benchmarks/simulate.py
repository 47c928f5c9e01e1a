"""Predicted and measured steps of training on this machine, on a few ranks.

``python benchmarks/simulate.py``: measures what ranks can do here, predicts a step of MeshGraphNet
from one process, and measures it on real ranks. Prints a table in Markdown.
"""

import argparse
import os
import statistics
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from measuring import machine
from torch.nn.functional import mse_loss

import varcomm as vc
from varcomm.models import MeshGraphNet


def prepare(graph, width, blocks):
    torch.manual_seed(0)
    model = MeshGraphNet(6, 3, 1, hidden_channels=width, num_blocks=blocks)
    model = vc.graph.distribute(model, graph)
    optimizer = torch.optim.Adam(model.parameters())
    x, edge_attr = torch.rand(graph.num_owned, 6), torch.rand(graph.num_edges, 3)
    y = torch.rand(graph.num_owned, 1)

    def step():
        optimizer.zero_grad()
        prediction = model(x, graph.edge_index, edge_attr)
        graph.mean(mse_loss(prediction, y, reduction="none")).backward()
        vc.data_parallel.sum_gradients(model)
        optimizer.step()

    return step


def grid(side):
    return vc.simulate.ocean(np.ones((side, 2 * side), dtype=bool))


def measured(rank, side, width, blocks, steps, method):
    """Seconds of each step, bytes sent and messages of the last."""
    torch.set_num_threads(1)
    step = prepare(vc.graph.partition(grid(side), method=method), width, blocks)
    step()
    seconds = []
    for _ in range(steps):
        with vc.trace() as calls:
            began = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - began)
    return seconds, calls.total.sent, calls.total.messages_sent


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sides", type=int, nargs="+", default=[20, 60, 120])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine(), end="\n\n")
    print(f"MeshGraphNet of width {options.width} with {options.blocks} blocks\n")
    columns = ["nodes", "ranks", "MB sent", "messages", "compute ms", "messages ms", "predicted ms"]
    columns += ["measured ms", "quartiles", "predicted / measured"]
    print("| " + " | ".join(columns) + " |\n" + "| --- " * len(columns) + "|")
    machines = []
    for side in options.sides:
        for ranks in options.ranks:
            parts = vc.simulate.partition(grid(side), ranks, "hilbert")
            told = vc.simulate.step(
                lambda graph: prepare(graph, options.width, options.blocks), parts
            )
            # just before, since what a machine can do changes with what else it does
            here = vc.simulate.measure(ranks, options.width)
            times = told.times(here)
            machines.append((side, ranks, here))
            arguments = (side, options.width, options.blocks, options.steps, "hilbert")
            found = vc.launch(measured, ranks, *arguments, timeout=500)
            # a step is done when the slowest rank is
            slowest = [max(each) for each in zip(*(seconds for seconds, *_ in found), strict=True)]
            sent = [(nbytes, messages) for _, nbytes, messages in found]
            assert sent == [
                (int(told.sent[rank]), int(told.messages[rank])) for rank in range(ranks)
            ]
            middle = statistics.median(slowest)
            low, _, high = statistics.quantiles(slowest, n=4)
            cells = [f"{2 * side * side:,}", ranks, f"{float(told.sent.max()) / 1e6:.2f}"]
            cells += [
                f"{float(told.messages.max()):.0f}",
                f"{1e3 * float(times.compute.max()):.1f}",
            ]
            cells += [f"{1e3 * (times.step - float(times.compute.max())):.1f}"]
            cells += [f"{1e3 * times.step:.1f}", f"{1e3 * middle:.1f}"]
            cells += [f"{1e3 * low:.1f} to {1e3 * high:.1f}", f"{times.step / middle:.2f}"]
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    print("\nmeasured just before, of each of the ranks while all do the same:\n")
    names = ["nodes", "ranks", "GFLOP/s", "GB/s of memory", "us an operator", "us a message"]
    names += ["us to the next", "GB/s sent"]
    print("| " + " | ".join(names) + " |\n" + "| --- " * len(names) + "|")
    for side, ranks, here in machines:
        cells = [f"{2 * side * side:,}", ranks, f"{here.flops / 1e9:.1f}"]
        cells += [f"{here.memory_bandwidth / 1e9:.1f}", f"{here.launch * 1e6:.1f}"]
        cells += [f"{here.latency_within * 1e6:.0f}", f"{here.gap * 1e6:.0f}"]
        cells += [f"{here.bandwidth_within / 1e9:.2f}"]
        print("| " + " | ".join(map(str, cells)) + " |")
    print("\nbytes and messages are those that vc.trace counted on each rank")


if __name__ == "__main__":
    main()
