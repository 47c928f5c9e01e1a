"""Predicted and measured steps of training on this machine, on a few ranks.

``python benchmarks/simulate.py`` measures the rates of this machine, predicts a step of
MeshGraphNet in one process, and measures the step on real ranks.
"""

import argparse
import os
import statistics
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from measuring import arguments, table
from rates import measure

import varcomm as vc
from varcomm.cli.simulate import prepare
from varcomm.graph.graph_file import globe


def measured(rank, side, width, blocks, steps):
    """Return the seconds of each step, and the bytes and messages of the last step."""
    torch.set_num_threads(1)
    step = prepare(width, blocks)(vc.graph.partition(globe(side, 2 * side), method="hilbert"))
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
    rows = []
    for side in given.sides:
        for ranks in given.ranks:
            parts = vc.simulate.partition(globe(side, 2 * side), ranks, "hilbert")
            step = vc.simulate.step(prepare(given.width, given.blocks), parts)
            # just before the run, because the rates of a machine change with its other work
            machine = measure(ranks, given.width)
            times = step.times(machine)
            what = (side, given.width, given.blocks, given.steps)
            found = vc.launch(measured, ranks, *what, timeout=500)
            # a step ends when the slowest rank ends
            slowest = [max(each) for each in zip(*(seconds for seconds, *_ in found), strict=True)]
            sent = [(nbytes, messages) for _, nbytes, messages in found]
            predicted = zip(step.sent.tolist(), step.messages.tolist(), strict=True)
            assert sent == [(int(nbytes), int(count)) for nbytes, count in predicted]
            low, middle, high = (1e3 * each for each in statistics.quantiles(slowest, n=4))
            compute, total = 1e3 * float(times.compute.max()), 1e3 * times.step
            print(machine)
            cells = [f"{2 * side * side:,}", ranks, f"{float(step.sent.max()) / 1e6:.2f}"]
            cells += [f"{float(step.messages.max()):.0f}"]
            cells += [f"{each:.1f}" for each in (compute, total - compute, total, middle)]
            cells += [f"{low:.1f} to {high:.1f}", f"{total / middle:.2f}"]
            rows.append(cells)
    columns = ["nodes", "ranks", "MB sent", "messages", "compute ms", "messages ms", "predicted ms"]
    table([*columns, "measured ms", "quartiles", "predicted / measured"], rows)
    print("bytes and messages are those that vc.trace counted on each rank")


if __name__ == "__main__":
    main()
