"""Machines by a few numbers, and the seconds that work takes on them.

The page :doc:`/simulate` has the formulas and their sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, log2
from typing import Any

import torch

from varcomm.simulate.work import Work
from varcomm.transport.engines.simulated import Transfer


@dataclass(frozen=True)
class Times:
    """Seconds of a step: of one rank, or of all ranks as fp64 tensors of shape (P,).

    Attributes
    ----------
    compute : float or torch.Tensor
        Seconds of operators: a number, or one entry per rank.
    communication : mapping of str
        Seconds of calls, by operation.

    See Also
    --------
    Step, Machine
    """

    compute: Any
    communication: Mapping[str, Any]

    @property
    def total(self) -> Any:
        """Sum of operators and calls; nothing overlaps."""
        return self.compute + sum(self.communication.values())

    @property
    def step(self) -> float:
        """Seconds of the slowest rank."""
        return float(torch.as_tensor(self.total).max())


@dataclass(frozen=True)
class Machine:
    """Rates and latencies of a machine, per rank; a rank is a GPU, or a process on a CPU.

    Ranks ``0 ... ranks_per_node - 1`` are on the first node, and so on.

    Attributes
    ----------
    name, source : str
        Name of the machine, and origin of the numbers.
    ranks_per_node : int
    flops : float
        Floating-point operations of a matrix product, 1/s.
    memory, memory_bandwidth : float
        Memory of a rank, B, and its bandwidth, B/s.
    launch : float
        Least time of an operator, s.
    latency_within, latency_between : float
        Latency of a message to a rank of the same node, and of another node, s.
    bandwidth_within, bandwidth_between : float
        Bandwidth inside a node, and between nodes, of a rank that sends and receives at the same
        time, B/s.
    gap, call : float
        Time between two messages of a call, and before the first one, s.
    runs_ahead : bool
        Whether operators are started ahead of their execution, as on a GPU.

    See Also
    --------
    Step, Times
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

    def busy(self, flops: Any, matmul_bytes: Any, other_bytes: Any) -> Any:
        """Return the seconds of arithmetic and memory, of numbers or of tensors."""
        products = _greater(flops / self.flops, matmul_bytes / self.memory_bandwidth)
        return products + other_bytes / self.memory_bandwidth

    def compute(self, flops: Any, matmul_bytes: Any, other_bytes: Any, kernels: Any) -> Any:
        """Return the seconds of operators, of numbers or of tensors."""
        busy, starting = self.busy(flops, matmul_bytes, other_bytes), kernels * self.launch
        return _greater(busy, starting) if self.runs_ahead else busy + starting

    def exchange(self, ends: torch.Tensor, nbytes: torch.Tensor, size: int) -> torch.Tensor:
        """Return the seconds of an exchange of M messages on each of P ranks; fp64, shape (P,).

        `ends` has the sender and receiver of each message, (2, M), `nbytes` its bytes, (M,).
        """
        if size == 1:
            return torch.zeros(1, dtype=torch.float64)
        weights = torch.stack([torch.ones_like(nbytes), nbytes]).double()

        def lane(used: torch.Tensor, latency: float, bandwidth: float) -> torch.Tensor:
            messages, moved = (
                torch.maximum(*(torch.bincount(end[used], w[used], size) for end in ends))
                for w in weights
            )
            seconds = latency + (messages - 1) * self.gap + moved / bandwidth
            return torch.where(messages > 0, seconds, 0.0)

        is_near = torch.eq(*ends // self.ranks_per_node)
        return self.call + torch.maximum(
            lane(is_near, self.latency_within, self.bandwidth_within),
            lane(~is_near, self.latency_between, self.bandwidth_between),
        )

    def transfer(self, transfer: Transfer) -> float:
        """Return the seconds of one call of an engine, on one of its ranks."""
        if len(transfer.ranks) == 1:
            return 0.0
        ranks, own = torch.tensor(transfer.ranks), transfer.ranks[transfer.rank]
        counts = torch.tensor([transfer.send, transfer.recv], dtype=torch.float64)
        if transfer.schedule not in ("all_gather", "broadcast"):
            here = torch.full_like(ranks, own)
            ends = torch.stack([torch.cat([here, ranks]), torch.cat([ranks, here])])
            used = counts.flatten() > 0
            size = max(transfer.ranks) + 1
            return float(self.exchange(ends[:, used], counts.flatten()[used], size)[own])
        nodes = ranks // self.ranks_per_node
        shards = counts[1].clone()
        shards[transfer.rank] = max(transfer.send)
        per_node = nodes.unique(return_counts=True)[1]
        most, many = int(per_node.max()), len(per_node)
        latency = ceil(log2(most)) * self.latency_within + ceil(log2(many)) * self.latency_between
        if transfer.schedule == "broadcast":
            moved = float(shards.max())
            beyond = moved if many > 1 else 0.0
        else:
            moved = float(counts[1].sum())
            beyond = float(shards[nodes != nodes[transfer.rank]].sum())
            if len(shards.unique()) > 1:  # each shard is a broadcast
                latency += (len(shards) - 1) * self.gap
        moving = max(moved / self.bandwidth_within, beyond / (most * self.bandwidth_between))
        return self.call + latency + moving

    def seconds(self, work: Work) -> Times:
        """Return the seconds of the work of one rank."""
        communication: dict[str, float] = {}
        for name, transfer in work.transfers:
            communication[name] = communication.get(name, 0.0) + self.transfer(transfer)
        counts = (work.flops, work.matmul_bytes, work.other_bytes, work.kernels)
        return Times(self.compute(*map(float, counts)), communication)


def _greater(a: Any, b: Any) -> Any:
    return torch.maximum(a, b) if isinstance(a, torch.Tensor) else max(a, b)


# FLOP/s, memory bandwidth and memory, bandwidths within and between nodes, latency between nodes
_RATES = {
    "h100-ndr": (66.9e12, 3.35e12, 80e9, 450e9, 50e9, 9.6e-6),
    "a100-hdr": (19.5e12, 2.039e12, 80e9, 300e9, 25e9, 9.6e-6),
    "mi250x-slingshot": (23.95e12, 1.6e12, 64e9, 50e9, 12.5e9, 9.6e-6),
    "a100-ethernet": (19.5e12, 2.039e12, 80e9, 300e9, 12.5e9 / 8, 50e-6),
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
        source="peak rates from data sheets, in fp32; latencies of NCCL: docs/simulate.md",
    )
    for name, (flops, memory_bandwidth, memory, within, between, latency) in _RATES.items()
}
