"""Predicted and measured steps of training on this machine, on a few ranks.

``python benchmarks/simulate.py``: measures the rates of ranks here, predicts a step of MeshGraphNet
from one process, and measures it on real ranks.
"""

import argparse
import os
import statistics
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from measuring import arguments, table
from torch.nn.functional import mse_loss

import varcomm as vc
from varcomm.models import MeshGraphNet


def prepare(graph, width, blocks):
    torch.manual_seed(0)
    model = MeshGraphNet(6, 3, 1, hidden_channels=width, num_blocks=blocks)
    model = vc.graph.distribute(model, graph)
    optimizer = torch.optim.Adam(model.parameters())
    x, edge_attr = torch.rand(graph.num_owned, 6), torch.rand(graph.edges.num_owned, 3)
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
    given = arguments(parser, ranks=[2, 4], sides=[20, 60, 120], width=64, blocks=4, steps=9)
    torch.set_num_threads(1)
    print(f"MeshGraphNet of width {given.width} with {given.blocks} blocks\n")
    rows, machines = [], []
    for side in given.sides:
        for ranks in given.ranks:
            parts = vc.simulate.partition(grid(side), ranks, "hilbert")
            step = vc.simulate.step(lambda graph: prepare(graph, given.width, given.blocks), parts)
            # just before the run, because the rates of a machine change with its other work
            here = vc.simulate.measure(ranks, given.width)
            times = step.times(here)
            what = (side, given.width, given.blocks, given.steps, "hilbert")
            found = vc.launch(measured, ranks, *what, timeout=500)
            # a step ends when the slowest rank ends
            slowest = [max(each) for each in zip(*(seconds for seconds, *_ in found), strict=True)]
            sent = [(nbytes, messages) for _, nbytes, messages in found]
            predicted = zip(step.sent.tolist(), step.messages.tolist(), strict=True)
            assert sent == [(int(nbytes), int(count)) for nbytes, count in predicted]
            low, middle, high = (1e3 * each for each in statistics.quantiles(slowest, n=4))
            compute, total = 1e3 * float(times.compute.max()), 1e3 * times.step
            size = [f"{2 * side * side:,}", ranks]
            cells = [f"{float(step.sent.max()) / 1e6:.2f}", f"{float(step.messages.max()):.0f}"]
            cells += [f"{each:.1f}" for each in (compute, total - compute, total, middle)]
            cells += [f"{low:.1f} to {high:.1f}", f"{total / middle:.2f}"]
            rows.append([*size, *cells])
            rates = [f"{here.flops / 1e9:.1f}", f"{here.memory_bandwidth / 1e9:.1f}"]
            latencies = (here.launch, here.latency_within, here.gap)
            rates += [*(f"{1e6 * each:.1f}" for each in latencies)]
            machines.append([*size, *rates, f"{here.bandwidth_within / 1e9:.2f}"])
    columns = ["nodes", "ranks", "MB sent", "messages", "compute ms", "messages ms", "predicted ms"]
    table([*columns, "measured ms", "quartiles", "predicted / measured"], rows)
    print("measured just before, on each of the ranks while all do the same:\n")
    columns = ["nodes", "ranks", "GFLOP/s", "GB/s of memory", "us per operator", "us per message"]
    table([*columns, "us to the next", "GB/s sent"], machines)
    print("bytes and messages are those that vc.trace counted on each rank")


if __name__ == "__main__":
    main()
