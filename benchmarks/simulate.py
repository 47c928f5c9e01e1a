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

import varcomm as vc
from varcomm.cli.bench import in_turns
from varcomm.cli.simulate import prepare
from varcomm.simulate import Machine

ROWS, LARGE = 16000, 4 << 20  # of products; bytes to each rank, more than any cache


def here(ranks, width):
    """Measure a Machine of this number of ranks on this host, while all of them do the same."""
    worst = vc.launch(rates, ranks, width)[0]
    bandwidth = (ranks - 1) * LARGE / max(worst["large"] - worst["all"], 1e-9)
    return Machine(
        name="here",
        ranks_per_node=ranks,
        flops=1 / worst["flop"],
        memory_bandwidth=1 / worst["byte"],
        launch=worst["small"],
        memory=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / ranks,
        latency_within=worst["pair"],
        latency_between=worst["pair"],
        bandwidth_within=bandwidth,
        bandwidth_between=bandwidth,
        gap=max(0.0, (worst["all"] - worst["pair"]) / (ranks - 2)) if ranks > 2 else 0.0,
        call=0.0,  # part of the latency
        runs_ahead=False,
        source="measured",
    )


def rates(rank, width):
    """Seconds of a FLOP, a byte, a small operator, and of exchanges, on the slowest rank."""
    torch.set_num_threads(1)
    size = vc.init().size
    rows, weight = torch.randn(ROWS, width), torch.randn(width, width)
    few = rows[:8].clone()
    work = vc.simulate.count(lambda: messages(rows, weight))

    def exchange(counts, nbytes):
        data = torch.ones(sum(counts), nbytes // 4)
        return lambda: vc.all_to_all_v(data, counts, counts)

    others = [int(other != rank) for other in range(size)]
    runs = {
        "flop": lambda: rows @ weight,
        "byte": lambda: messages(rows, weight),
        "small": lambda: messages(few, weight),
        "pair": exchange([int(other == rank ^ 1) for other in range(size)], 64),
        "all": exchange(others, 64),
        "large": exchange(others, LARGE),
    }
    of = {"flop": 2 * rows.numel() * width, "byte": work.other_bytes, "small": work.kernels}
    return {
        name: statistics.median(in_turns({name: call})[name]) / of.get(name, 1)
        for name, call in runs.items()
    }


def messages(rows, weight):
    """The operators of message passing other than products, forward and backward."""
    edges = torch.arange(len(rows))
    nodes = rows[: len(rows) // 8].detach().requires_grad_()
    values = torch.nn.functional.silu(nodes[edges % len(nodes)]) + rows
    values = torch.nn.functional.layer_norm(values, weight.shape[:1])
    torch.zeros_like(nodes).index_add(0, edges // 8 % len(nodes), values).sum().backward()


def grid(side):
    return vc.simulate.ocean(np.ones((side, 2 * side), dtype=bool))


def measured(rank, side, width, blocks, steps):
    """Seconds of each step, bytes sent and messages of the last."""
    torch.set_num_threads(1)
    step = prepare(width, blocks)(vc.graph.partition(grid(side), method="hilbert"))
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
            parts = vc.simulate.partition(grid(side), ranks, "hilbert")
            step = vc.simulate.step(prepare(given.width, given.blocks), parts)
            # just before the run, because the rates of a machine change with its other work
            machine = here(ranks, given.width)
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
