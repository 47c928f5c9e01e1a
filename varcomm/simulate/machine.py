"""Machines by a few numbers, and the seconds that work takes on them.

Computing is a roofline [1]_. A message costs a latency and its bytes [2]_; messages of one call
start a gap apart and share one latency [3]_. The cost of a collective follows from its schedule
[4]_. Rates in :data:`MACHINES` are peaks of data sheets, in fp32 without tensor cores, so times are
lower bounds. Its latencies are those by which NCCL chooses algorithms.

References
----------
.. [1] S. Williams, A. Waterman and D. Patterson, "Roofline: an insightful visual performance model
   for multicore architectures", Communications of the ACM 52 (2009), 65-76.
.. [2] R. W. Hockney, "The communication challenge for MPP: Intel Paragon and Meiko CS-2", Parallel
   Computing 20 (1994), 389-398.
.. [3] A. Alexandrov, M. F. Ionescu, K. E. Schauser and C. Scheiman, "LogGP: incorporating long
   messages into the LogP model", Proceedings of SPAA '95, 95-105.
.. [4] R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication operations
   in MPICH", International Journal of High Performance Computing Applications 19 (2005), 49-66.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, log2
from typing import Any, TypeVar

import torch

from varcomm.ops.all_to_all_v import all_to_all_v
from varcomm.simulate.work import Work, count
from varcomm.sizes import at_least
from varcomm.transport.launch import launch
from varcomm.transport.simulated import Transfer
from varcomm.transport.world import init

__all__ = ["MACHINES", "Machine", "Seconds", "measure"]

Number = TypeVar("Number", float, torch.Tensor)

# In :func:`measure`: windows and their seconds, calls per window if ranks wait for each other,
# rows of products, and bytes to each rank, more than any cache of a core.
_WINDOWS, _WINDOW, _CALLS, _ROWS, _LARGE = 5, 0.1, 20, 16000, 4 << 20


@dataclass(frozen=True)
class Seconds:
    """Time of a step on one rank.

    Attributes
    ----------
    compute : float
        Seconds of operators.
    communication : mapping of str to float
        Seconds of calls, by operation.
    """

    compute: Any
    communication: Mapping[str, Any]

    @property
    def total(self) -> Any:
        """Sum of both; nothing overlaps."""
        return self.compute + sum(self.communication.values())


@dataclass(frozen=True)
class Machine:
    """A machine, by numbers per rank; a rank is a GPU, or a process on a CPU.

    Ranks ``0 ... ranks_per_node - 1`` are on the first node, and so on.

    Attributes
    ----------
    name : str
    ranks_per_node : int
    flops : float
        Floating-point operations of a matrix product, 1/s.
    memory_bandwidth, memory : float
        B/s, and B.
    launch : float
        Least time of an operator, s.
    latency_within, latency_between : float
        Of a message to a rank of the same node, and of another node, s.
    bandwidth_within, bandwidth_between : float
        Of the bytes that a rank sends while it receives as many, B/s.
    gap : float
        From one message to the next one of a call, s.
    call : float
        Of each call, before anything is sent, s.
    source : str
        Origin of the numbers.
    runs_ahead : bool
        Whether operators are started ahead of their execution, as on a GPU.
    """

    name: str
    ranks_per_node: int
    flops: float
    memory_bandwidth: float
    launch: float
    memory: float
    latency_within: float
    latency_between: float
    bandwidth_within: float
    bandwidth_between: float
    gap: float
    call: float
    source: str
    runs_ahead: bool = True

    def busy(self, flops: Number, matmul_bytes: Number, other_bytes: Number) -> Number:
        """Return the seconds of arithmetic and memory, of numbers or of tensors.

        ``max(flops / rate, bytes / bandwidth)`` for matrix products together, plus ``bytes /
        bandwidth`` for all other operators.
        """
        products = _greater(flops / self.flops, matmul_bytes / self.memory_bandwidth)
        return products + other_bytes / self.memory_bandwidth

    def compute(
        self, flops: Number, matmul_bytes: Number, other_bytes: Number, kernels: Number
    ) -> Number:
        """Return the seconds of operators, of numbers or of tensors.

        These are the seconds of :meth:`busy` and `launch` per operator: the greater one if
        operators are started ahead, else their sum.
        """
        busy, starting = self.busy(flops, matmul_bytes, other_bytes), kernels * self.launch
        return _greater(busy, starting) if self.runs_ahead else busy + starting

    def exchange(self, within: tuple[Number, Number], between: tuple[Number, Number]) -> Number:
        """Return the seconds of an exchange of messages, of numbers or of tensors.

        ``call + max(latency + (messages - 1) gap + bytes / bandwidth)`` over the messages within
        the node and those between nodes, which run side by side; `call` if there are no messages.

        Parameters
        ----------
        within, between : tuple
            Messages and bytes, each the greater of sent and received.
        """

        def lane(latency: float, bandwidth: float, messages: Number, nbytes: Number) -> Number:
            moving = latency + (messages - 1) * self.gap + nbytes / bandwidth
            return moving * (messages > 0)

        return self.call + _greater(
            lane(self.latency_within, self.bandwidth_within, *within),
            lane(self.latency_between, self.bandwidth_between, *between),
        )

    def transfer(self, transfer: Transfer) -> float:
        """Return the seconds of one call of an engine, on one of its ranks.

        An exchange takes the seconds of :meth:`exchange`. An all-gather takes ``call + ceil(log2 r)
        latency_within + ceil(log2 n) latency_between + max(bytes / bandwidth_within, bytes from
        other nodes / (r bandwidth_between))`` with ``r`` ranks on each of ``n`` nodes, and a gap
        for each further shard if shards are uneven, because each shard is a broadcast then. A
        broadcast takes the same with the bytes of the root, and no gap.
        """
        if len(transfer.ranks) == 1:
            return 0.0
        nodes = torch.tensor(transfer.ranks) // self.ranks_per_node
        is_near = nodes == nodes[transfer.rank]
        counts = torch.tensor([transfer.send, transfer.recv], dtype=torch.float64)
        if transfer.schedule not in ("all_gather", "broadcast"):
            near, far = (
                (ends.count_nonzero(dim=1).max().double(), ends.sum(dim=1).max())
                for ends in (counts[:, is_near], counts[:, ~is_near])
            )
            return float(self.exchange(near, far))
        shards = counts[1].clone()
        shards[transfer.rank] = max(transfer.send)
        per_node = nodes.unique(return_counts=True)[1]
        most, many = int(per_node.max()), len(per_node)
        latency = ceil(log2(most)) * self.latency_within + ceil(log2(many)) * self.latency_between
        if transfer.schedule == "broadcast":
            moved = float(shards.max())
            beyond = moved if many > 1 else 0.0
        else:
            moved, beyond = float(counts[1].sum()), float(shards[~is_near].sum())
            if len(shards.unique()) > 1:
                latency += (len(shards) - 1) * self.gap
        moving = max(moved / self.bandwidth_within, beyond / (most * self.bandwidth_between))
        return self.call + latency + moving

    def seconds(self, work: Work) -> Seconds:
        """Return the seconds of the work of one rank; nothing overlaps."""
        communication: dict[str, float] = {}
        for name, transfer in work.transfers:
            communication[name] = communication.get(name, 0.0) + self.transfer(transfer)
        counts = (work.flops, work.matmul_bytes, work.other_bytes, work.kernels)
        return Seconds(self.compute(*map(float, counts)), communication)


def _greater(a: Number, b: Number) -> Number:
    return torch.maximum(a, b) if isinstance(a, torch.Tensor) else max(a, b)


_NCCL = (
    "Latencies of messages and calls: hwLat and baseLat of rings with protocol Simple, NVIDIA/nccl "
    "src/graph/tuning.cc at commit 01afd20, measured by its authors. Gap of 1 us and launch of 5 "
    "us: assumed, of no source."
)
_A100 = (
    "NVIDIA A100 80 GB data sheet (2021): 19.5 TFLOP/s in fp32, 2.039 TB/s, NVLink of 600 GB/s in "
    "both directions together; peak. "
)
# FLOP/s, memory bandwidth and memory, bandwidths within and between nodes, latency between nodes
_RATES = {
    "h100-ndr": (66.9e12, 3.35e12, 80e9, 450e9, 50e9, 9.6e-6),
    "a100-hdr": (19.5e12, 2.039e12, 80e9, 300e9, 25e9, 9.6e-6),
    "mi250x-slingshot": (23.95e12, 1.6e12, 64e9, 50e9, 12.5e9, 9.6e-6),
    "a100-ethernet": (19.5e12, 2.039e12, 80e9, 300e9, 12.5e9 / 8, 50e-6),
}
_SOURCES = {
    "h100-ndr": "HGX H100. NVIDIA H100 SXM data sheet (2023): 66.9 TFLOP/s in fp32, 3.35 TB/s, "
    "NVLink of 900 GB/s in both directions together; a ConnectX-7 of 400 Gb/s a GPU, as in the "
    "DGX H100 data sheet (2023); peak. ",
    "a100-hdr": f"HGX A100. {_A100}A ConnectX-6 of 200 Gb/s a GPU, as in the DGX A100 data sheet "
    "(2020); peak. ",
    "mi250x-slingshot": "A rank is a GCD, half of an MI250X, as on Frontier and LUMI. AMD MI250X "
    "data sheet (2021): 47.9 TFLOP/s in fp32 and 3.2 TB/s for two GCDs. Frontier User Guide, "
    "docs.olcf.ornl.gov: 64 GB a GCD, links between GCDs of 50 GB/s at least, four Slingshot-11 "
    "NICs of 25 GB/s for eight GCDs; peak. RCCL is taken to be like NCCL. ",
    "a100-ethernet": f"{_A100}One port of 100 Gb/s, 100GBASE of IEEE 802.3, for eight GPUs; peak. "
    "Latency of 50 us between nodes over TCP: assumed, of no source. ",
}
MACHINES: dict[str, Machine] = {
    name: Machine(
        name=name,
        ranks_per_node=8,
        flops=flops,
        memory_bandwidth=memory_bandwidth,
        launch=5e-6,
        memory=memory,
        latency_within=3.4e-6,
        latency_between=latency,
        bandwidth_within=within,
        bandwidth_between=between,
        gap=1e-6,
        call=8.4e-6,
        source=_SOURCES[name] + _NCCL,
    )
    for name, (flops, memory_bandwidth, memory, within, between, latency) in _RATES.items()
}


def measure(ranks: int, width: int = 64, threads: int = 1) -> Machine:
    """Measure rates and latencies of ranks on this host while all of them do the same.

    Ranks share cores and memory, so the numbers hold for this number of ranks alone. The bandwidth
    of memory is that of message passing, forward and backward, over the bytes that :func:`count`
    counts. The least time of an operator is that of the same operators on a few rows.

    Parameters
    ----------
    ranks : int
        Number of ranks, on the CPU, with Gloo.
    width : int
        Features of the matrix products, ``(16000, width) @ (width, width)``, and of the messages.
    threads : int
        Threads per rank.

    Returns
    -------
    Machine
        One node with these ranks; the time before a call sends is part of the latency.

    Raises
    ------
    ArgumentError
        If `ranks` is not an integer above one.
    """
    size = at_least(2, ranks, "simulate.measure: ranks")
    found: list[dict[str, float]] = launch(_on_rank, size, width, threads)
    worst = {name: max(one[name] for one in found) for name in found[0]}
    bandwidth = (size - 1) * _LARGE / max(worst["large"] - worst["all"], 1e-9)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(
        name="here",
        ranks_per_node=size,
        flops=1 / worst["flop"],
        memory_bandwidth=1 / worst["byte"],
        launch=worst["small"],
        memory=float(memory) / size,
        latency_within=worst["pair"],
        latency_between=worst["pair"],
        bandwidth_within=bandwidth,
        bandwidth_between=bandwidth,
        gap=max(0.0, (worst["all"] - worst["pair"]) / (size - 2)) if size > 2 else 0.0,
        call=0.0,
        runs_ahead=False,
        source=f"measured: {size} ranks at once with Gloo, {threads} threads each, on "
        f"{os.cpu_count()} cores of {platform.processor() or platform.machine()}, torch "
        f"{torch.__version__}",
    )


def _on_rank(rank: int, width: int, threads: int) -> dict[str, float]:
    """Return the seconds of a FLOP, a byte, a small operator, and of exchanges."""
    torch.set_num_threads(threads)
    size = init().size
    rows, weight = torch.randn(_ROWS, width), torch.randn(width, width)
    few = rows[:8].clone()
    work = count(lambda: _messages(rows, weight))
    partner = [int(other == rank ^ 1) for other in range(size)]
    others = [int(other != rank) for other in range(size)]

    def exchange(counts: list[int], nbytes: int) -> float:
        data = torch.ones(sum(counts), nbytes // 4)
        return _mean(lambda: all_to_all_v(data, counts, counts), size, waits=True)

    return {
        "flop": _mean(lambda: rows @ weight, size) / (2 * rows.numel() * width),
        "byte": _mean(lambda: _messages(rows, weight), size) / work.other_bytes,
        "small": _mean(lambda: _messages(few, weight), size) / work.kernels,
        "pair": exchange(partner, 64),
        "all": exchange(others, 64),
        "large": exchange(others, _LARGE),
    }


def _messages(rows: torch.Tensor, weight: torch.Tensor) -> None:
    """Run the operators of message passing other than products, forward and backward."""
    edges = torch.arange(len(rows))
    nodes = rows[: len(rows) // 8].detach().requires_grad_()
    messages = torch.nn.functional.silu(nodes[edges % len(nodes)]) + rows
    messages = torch.nn.functional.layer_norm(messages, weight.shape[:1])
    received = torch.zeros_like(nodes).index_add(0, edges // 8 % len(nodes), messages)
    received.sum().backward()


def _mean(call: Callable[[], Any], size: int, waits: bool = False) -> float:
    """Return the median over windows of the mean time of a call on all ranks at once.

    Ranks that wait for each other make a fixed number of calls. Other ranks make calls for a fixed
    time, because ranks that share a core run in turns of some milliseconds.
    """
    means = []
    for _ in range(_WINDOWS):
        all_to_all_v(torch.zeros(size), [1] * size, [1] * size)  # ranks begin together
        start, calls = time.perf_counter(), 0
        while calls < _CALLS if waits else time.perf_counter() - start < _WINDOW:
            call()
            calls += 1
        means.append((time.perf_counter() - start) / calls)
    return statistics.median(means)
