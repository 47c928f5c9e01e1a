"""Rates and latencies of ranks on this host."""

import os
import statistics
import time

import torch

import varcomm as vc

_ROWS = 16000
_LARGE = 4 << 20  # bytes to each rank, more than any cache
_WINDOWS, _WINDOW, _CALLS = 5, 0.1, 20  # seconds and calls per window


def measure(ranks, width=64):
    """Return a ``Machine`` of one node, measured while all its ranks do the same work.

    Ranks run on the CPU, with Gloo and one thread each. They share cores and memory, so the results
    apply only to this number of ranks, at least 2. The time before a call sends is part of the
    latency. `width` is the number of features of matrix products and messages.
    """
    found = vc.launch(_on_rank, ranks, width)
    worst = {name: max(one[name] for one in found) for name in found[0]}
    bandwidth = (ranks - 1) * _LARGE / max(worst["large"] - worst["all"], 1e-9)
    return vc.simulate.Machine(
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
        call=0.0,
        runs_ahead=False,
        source=f"measured: {ranks} ranks at once with Gloo, one thread each",
    )


def _on_rank(rank, width):
    """Return the seconds of a FLOP, a byte, a small operator, and of exchanges."""
    torch.set_num_threads(1)
    size = vc.init().size
    rows, weight = torch.randn(_ROWS, width), torch.randn(width, width)
    work = vc.simulate.count(lambda: _messages(rows, weight))

    def seconds(call, waits=False):
        """Return the median over windows of the mean time of a call on all ranks at once.

        Ranks that wait for each other make a fixed number of calls. Other ranks make calls for a
        fixed time, because ranks that share a core run in turns of some milliseconds.
        """
        means = []
        for _ in range(_WINDOWS):
            vc.all_to_all_v(torch.zeros(size), [1] * size, [1] * size)  # ranks begin together
            start, calls = time.perf_counter(), 0
            while calls < _CALLS if waits else time.perf_counter() - start < _WINDOW:
                call()
                calls += 1
            means.append((time.perf_counter() - start) / calls)
        return statistics.median(means)

    def exchange(counts, nbytes):
        data = torch.ones(sum(counts), nbytes // 4)
        return seconds(lambda: vc.all_to_all_v(data, counts, counts), waits=True)

    others = [int(other != rank) for other in range(size)]
    return {
        "flop": seconds(lambda: rows @ weight) / (2 * rows.numel() * width),
        "byte": seconds(lambda: _messages(rows, weight)) / work.other_bytes,
        "small": seconds(lambda: _messages(rows[:8], weight)) / work.kernels,
        "pair": exchange([int(other == rank ^ 1) for other in range(size)], 64),
        "all": exchange(others, 64),
        "large": exchange(others, _LARGE),
    }


def _messages(rows, weight):
    """Run the operators of message passing other than products, forward and backward."""
    edges = torch.arange(len(rows))
    nodes = rows[: len(rows) // 8].detach().requires_grad_()
    messages = torch.nn.functional.silu(nodes[edges % len(nodes)]) + rows
    messages = torch.nn.functional.layer_norm(messages, weight.shape[:1])
    torch.zeros_like(nodes).index_add(0, edges // 8 % len(nodes), messages).sum().backward()
