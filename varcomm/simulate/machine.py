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

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, log2
from typing import TypeVar

import torch

from varcomm.simulate.work import Work
from varcomm.transport.simulated import Transfer

__all__ = ["MACHINES", "Machine", "Seconds"]

Number = TypeVar("Number", float, torch.Tensor)


@dataclass(frozen=True)
class Seconds:
    """Time of a step on one rank.

    Attributes
    ----------
    compute : float
        Seconds of operators.
    communication : mapping of str to float
        Seconds of calls, by operation.

    Examples
    --------
    >>> from varcomm.simulate import Seconds
    >>> Seconds(compute=0.5, communication={"halo": 0.25, "all_reduce": 0.125}).total
    0.875
    """

    compute: float
    communication: Mapping[str, float]

    @property
    def total(self) -> float:
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
    memory_bandwidth : float
        B/s.
    launch : float
        Least time of an operator, s.
    memory : float
        B.
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

    Examples
    --------
    >>> from varcomm.simulate import MACHINES
    >>> machine = MACHINES["h100-ndr"]
    >>> machine.ranks_per_node, machine.bandwidth_between
    (8, 50000000000.0)
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
        by_rate, by_bytes = flops / self.flops, matmul_bytes / self.memory_bandwidth
        return _greater(by_rate, by_bytes) + other_bytes / self.memory_bandwidth

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
        inside = self._lane(self.latency_within, self.bandwidth_within, *within)
        outside = self._lane(self.latency_between, self.bandwidth_between, *between)
        return self.call + _greater(inside, outside)

    def _lane(self, latency: float, bandwidth: float, messages: Number, nbytes: Number) -> Number:
        seconds = latency + (messages - 1) * self.gap + nbytes / bandwidth
        if isinstance(seconds, torch.Tensor):
            return torch.where(torch.as_tensor(messages) > 0, seconds, 0.0)
        return seconds if messages else 0.0

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
        nodes = [rank // self.ranks_per_node for rank in transfer.ranks]
        if transfer.schedule in ("all_gather", "broadcast"):
            return self._to_all(transfer, nodes)
        here, lanes = nodes[transfer.rank], []
        for is_outside in (False, True):
            both = [
                [n for n, node in zip(counts, nodes, strict=True) if (node != here) == is_outside]
                for counts in (transfer.send, transfer.recv)
            ]
            messages = max(sum(map(bool, counts)) for counts in both)
            lanes.append((float(messages), float(max(map(sum, both)))))
        return self.exchange(*lanes)

    def _to_all(self, transfer: Transfer, nodes: list[int]) -> float:
        """Return the seconds of an all-gather or a broadcast."""
        most, many = max(map(nodes.count, set(nodes))), len(set(nodes))
        shards = list(transfer.recv)
        shards[transfer.rank] = max(transfer.send)
        latency = ceil(log2(most)) * self.latency_within
        latency += ceil(log2(many)) * self.latency_between
        if transfer.schedule == "broadcast":
            moved = max(shards)
            far = moved if many > 1 else 0
        else:
            if len(set(shards)) > 1:
                latency += (len(shards) - 1) * self.gap
            here = nodes[transfer.rank]
            moved = sum(transfer.recv)
            far = sum(n for n, node in zip(shards, nodes, strict=True) if node != here)
        moving = max(moved / self.bandwidth_within, far / (most * self.bandwidth_between))
        return self.call + latency + moving

    def seconds(self, work: Work) -> Seconds:
        """Return the seconds of the work of one rank; nothing overlaps."""
        communication: dict[str, float] = {}
        for name, transfer in work.transfers:
            communication[name] = communication.get(name, 0.0) + self.transfer(transfer)
        counts = (work.flops, work.matmul_bytes, work.other_bytes, work.kernels)
        return Seconds(self.compute(*map(float, counts)), communication)


def _greater(a: Number, b: Number) -> Number:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return torch.maximum(torch.as_tensor(a), torch.as_tensor(b))
    return max(a, b)


_NCCL = (
    "Latencies of messages and calls: hwLat and baseLat of rings with protocol Simple, NVIDIA/nccl "
    "src/graph/tuning.cc at commit 01afd20, measured by its authors. Gap of 1 us and launch of 5 "
    "us: assumed, of no source."
)
_A100 = (
    "NVIDIA A100 80 GB data sheet (2021): 19.5 TFLOP/s in fp32, 2.039 TB/s, NVLink of 600 GB/s in "
    "both directions together; peak. "
)
_H100_NDR = Machine(
    name="h100-ndr",
    ranks_per_node=8,
    flops=66.9e12,
    memory_bandwidth=3.35e12,
    launch=5e-6,
    memory=80e9,
    latency_within=3.4e-6,
    latency_between=9.6e-6,
    bandwidth_within=450e9,
    bandwidth_between=50e9,
    gap=1e-6,
    call=8.4e-6,
    source="HGX H100. NVIDIA H100 SXM data sheet (2023): 66.9 TFLOP/s in fp32, 3.35 TB/s, NVLink "
    "of 900 GB/s in both directions together; a ConnectX-7 of 400 Gb/s a GPU, as in the DGX H100 "
    f"data sheet (2023); peak. {_NCCL}",
)
_A100_HDR = replace(
    _H100_NDR,
    name="a100-hdr",
    flops=19.5e12,
    memory_bandwidth=2.039e12,
    bandwidth_within=300e9,
    bandwidth_between=25e9,
    source=f"HGX A100. {_A100}A ConnectX-6 of 200 Gb/s a GPU, as in the DGX A100 data sheet "
    f"(2020); peak. {_NCCL}",
)
_MI250X = replace(
    _H100_NDR,
    name="mi250x-slingshot",
    flops=23.95e12,
    memory_bandwidth=1.6e12,
    memory=64e9,
    bandwidth_within=50e9,
    bandwidth_between=12.5e9,
    source="A rank is a GCD, half of an MI250X, as on Frontier and LUMI. AMD MI250X data sheet "
    "(2021): 47.9 TFLOP/s in fp32 and 3.2 TB/s for two GCDs. Frontier User Guide, "
    "docs.olcf.ornl.gov: 64 GB a GCD, links between GCDs of 50 GB/s at least, four Slingshot-11 "
    f"NICs of 25 GB/s for eight GCDs; peak. RCCL is taken to be like NCCL. {_NCCL}",
)
_ETHERNET = replace(
    _A100_HDR,
    name="a100-ethernet",
    latency_between=50e-6,
    bandwidth_between=12.5e9 / 8,
    source=f"{_A100}One port of 100 Gb/s, 100GBASE of IEEE 802.3, for eight GPUs; peak. Latency of "
    f"50 us between nodes over TCP: assumed, of no source. {_NCCL}",
)
MACHINES: dict[str, Machine] = {
    machine.name: machine for machine in (_H100_NDR, _A100_HDR, _MI250X, _ETHERNET)
}
