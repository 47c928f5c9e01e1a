"""The numbers of the machine at hand, measured with real ranks."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from varcomm.errors import ArgumentError
from varcomm.ops.all_to_all_v import all_to_all_v
from varcomm.simulate.machine import Machine
from varcomm.simulate.meter import Meter, Totals
from varcomm.sizes import exact_int
from varcomm.transport.launch import launch
from varcomm.transport.world import init

__all__ = ["measure"]

_WINDOWS = 5
_WINDOW = 0.1  # seconds
_CALLS = 20

# Rows of a product, and edges of what is done with messages.
_ROWS = 16000

# Bytes to each rank: enough for a rate, and more than any cache of a core.
_LARGE = 4 << 20


def measure(ranks: int, width: int = 64, threads: int = 1) -> Machine:
    """Measure what ranks on this host can do while all of them do the same.

    So the rates are those of a rank where ranks share cores and memory; they hold for this number
    of ranks and no other. The bandwidth of memory is what message passing reaches, forward and
    backward, by the bytes that :func:`count` would count: picking rows, SiLU, normalising, summing.
    The least time of an operator is that of the same on a few rows, Python and autograd included.

    Parameters
    ----------
    ranks : int
        Ranks, on the CPU, with Gloo.
    width : int
        Features of the matrix products, ``(16000, width) @ (width, width)``, and of the messages
        that are measured.
    threads : int
        Of each rank.

    Returns
    -------
    Machine
        One node with these ranks. What a call takes before it sends is in the latency.

    Raises
    ------
    ArgumentError
        If `ranks` is not an integer above one.
    """
    count = exact_int(ranks)
    if count is None or count < 2:
        raise ArgumentError(f"simulate.measure: ranks must be an integer above one; got {ranks!r}.")
    found: list[dict[str, float]] = launch(_on_rank, count, width, threads)
    # in each of these, the slowest is waited for
    worst = {name: max(one[name] for one in found) for name in found[0]}
    pair = worst["pair"]
    gap = (worst["all"] - pair) / (count - 2) if count > 2 else 0.0
    peers = count - 1
    moving = max(worst["large"] - worst["all"], 1e-9)
    return Machine(
        name="here",
        ranks_per_node=count,
        flops=1 / worst["flop"],
        memory_bandwidth=1 / worst["byte"],
        launch=worst["small"],
        memory=_memory() / count,
        latency_within=pair,
        latency_between=pair,
        bandwidth_within=peers * _LARGE / moving,
        bandwidth_between=peers * _LARGE / moving,
        gap=max(0.0, gap),
        call=0.0,
        runs_ahead=False,
        source=f"measured: {count} ranks at once with Gloo, {threads} threads each, on "
        f"{os.cpu_count()} cores of {platform.processor() or platform.machine()}, torch "
        f"{torch.__version__}",
    )


def _on_rank(rank: int, width: int, threads: int) -> dict[str, float]:
    """Return seconds: of a FLOP, a byte, a small operator, and of exchanges."""
    torch.set_num_threads(threads)
    size = init().size
    rows, weight = torch.randn(_ROWS, width), torch.randn(width, width)
    product = _busy(lambda: rows @ weight, size)
    counted = _counted(lambda: _messages(rows, weight))
    mixed = _busy(lambda: _messages(rows, weight), size)
    few = rows[:8].clone()
    small = _busy(lambda: _messages(few, weight), size)
    pair = [0] * size
    partner = rank ^ 1
    if partner < size:
        pair[partner] = 1
    all_of_them = [int(other != rank) for other in range(size)]

    def exchange(counts: list[int], nbytes: int) -> float:
        total = sum(counts)
        data = torch.ones(total, nbytes // 4)
        return _in_turn(lambda: all_to_all_v(data, counts, counts), size)

    return {
        "flop": product / (2 * rows.numel() * width),
        "byte": mixed / counted.other_bytes,
        "small": small / counted.kernels,
        "pair": exchange(pair, 64),
        "all": exchange(all_of_them, 64),
        "large": exchange(all_of_them, _LARGE),
    }


def _messages(rows: torch.Tensor, weight: torch.Tensor) -> None:
    """Do forward and backward what message passing does beside its products."""
    edges = torch.arange(len(rows))
    nodes = rows[: len(rows) // 8].detach().requires_grad_()
    messages = torch.nn.functional.silu(nodes[edges % len(nodes)]) + rows
    messages = torch.nn.functional.layer_norm(messages, weight.shape[:1])
    received = torch.zeros_like(nodes).index_add(0, edges // 8 % len(nodes), messages)
    received.sum().backward()


def _counted(call: Callable[[], Any]) -> Totals:
    """Return what a step that does this would be counted to do."""
    meter = Meter()
    with meter:
        call()
    return meter.totals


def _busy(call: Callable[[], Any], size: int) -> float:
    """Return the mean time of a call while all ranks make it over and over.

    Ranks that share a core take turns of some milliseconds, which a single call would not notice.
    """
    means = []
    for _ in range(_WINDOWS):
        _together(size)
        began, calls = time.perf_counter(), 0
        while (now := time.perf_counter()) - began < _WINDOW:
            call()
            calls += 1
        means.append((now - began) / calls)
    return statistics.median(means)


def _in_turn(call: Callable[[], Any], size: int) -> float:
    """Return the mean time of a call in which ranks wait for each other."""
    means = []
    for _ in range(_WINDOWS):
        _together(size)
        began = time.perf_counter()
        for _ in range(_CALLS):
            call()
        means.append((time.perf_counter() - began) / _CALLS)
    return statistics.median(means)


def _together(size: int) -> None:
    everyone = [1] * size
    all_to_all_v(torch.zeros(size), everyone, everyone)


def _memory() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
