"""What a machine can do, and the seconds that work takes on it by a model of a few numbers.

Computing is a roofline [1]_. A message costs a latency and its bytes [2]_; messages of one call
start a gap apart, and share one latency [3]_. What a collective takes follows from its schedule
[4]_.

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
from dataclasses import dataclass
from math import ceil, log2
from typing import TypeVar

import torch

from varcomm.simulate.work import Work
from varcomm.transport.simulated import Transfer

__all__ = ["Machine", "Seconds"]

Number = TypeVar("Number", float, torch.Tensor)


@dataclass(frozen=True)
class Seconds:
    """What a step takes on one rank.

    Attributes
    ----------
    compute : float
        Of operators.
    communication : mapping of str to float
        Of calls, by operation.

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
        """Of both, one after the other: nothing overlaps."""
        return self.compute + sum(self.communication.values())


@dataclass(frozen=True)
class Machine:
    """A machine, by numbers a rank; a rank is a GPU, or a process on a CPU.

    Ranks ``0 ... ranks_per_node - 1`` are on the first node, and so on. Rates are whatever they are
    said to be: with the peak of a data sheet, times are lower bounds.

    Attributes
    ----------
    name : str
    ranks_per_node : int
    flops : float
        Floating-point operations of a matrix product, 1/s.
    memory_bandwidth : float
        Of what a rank computes on, B/s.
    launch : float
        The least time of an operator, s.
    memory : float
        B.
    latency_within, latency_between : float
        Of a message to a rank of the same node, and of another, s.
    bandwidth_within, bandwidth_between : float
        Of what a rank sends, and at the same time of what it receives, B/s.
    gap : float
        From one message to the next of a call, s.
    call : float
        Of each call, before anything is sent, s.
    source : str
        Where the numbers come from.
    runs_ahead : bool
        Whether what starts operators runs ahead of what computes them, as with a GPU.

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
        """Return the seconds of arithmetic and memory, of numbers or of tensors of them.

        ``max(flops / rate, bytes / bandwidth)`` for matrix products together, plus ``bytes /
        bandwidth`` for all other operators.
        """
        by_rate, by_bytes = flops / self.flops, matmul_bytes / self.memory_bandwidth
        return _greater(by_rate, by_bytes) + other_bytes / self.memory_bandwidth

    def compute(
        self, flops: Number, matmul_bytes: Number, other_bytes: Number, kernels: Number
    ) -> Number:
        """Return the seconds of operators, of numbers or of tensors of them.

        Those of :meth:`busy` and `launch` for each operator: their sum, or the greater one where
        what starts operators runs ahead.
        """
        busy, starting = self.busy(flops, matmul_bytes, other_bytes), kernels * self.launch
        return _greater(busy, starting) if self.runs_ahead else busy + starting

    def exchange(self, within: tuple[Number, Number], between: tuple[Number, Number]) -> Number:
        """Return the seconds of an exchange of messages, of numbers or of tensors of them.

        ``call + max(latency + (messages - 1) gap + bytes / bandwidth)`` over those within the node
        and those between nodes, which go side by side. Where nobody has a message, `call` alone.

        Parameters
        ----------
        within, between : tuple
            Messages and bytes, each the greater of what is sent and what is received: both
            directions are used at the same time.
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
        """Return the seconds of what an engine is asked to do, for one of its ranks.

        An exchange takes what :meth:`exchange` says. An all-gather, by which all get each shard:
        ``call + ceil(log2 r) latency_within + ceil(log2 n) latency_between + max(bytes /
        bandwidth_within, bytes from other nodes / (r bandwidth_between))`` with ``r`` ranks on each
        of ``n`` nodes, whose links to other nodes share the work; and a gap more for each further
        shard where they are uneven, since each is a broadcast then. A broadcast takes the same with
        the bytes of the root, and no gap.
        """
        if len(transfer.ranks) == 1:
            return 0.0
        nodes = [rank // self.ranks_per_node for rank in transfer.ranks]
        if transfer.schedule in ("all_gather", "broadcast"):
            return self._to_all(transfer, nodes)
        here = nodes[transfer.rank]
        lanes = []
        for outside in (False, True):
            messages, nbytes = [], []
            for counts in (transfer.send, transfer.recv):
                lane = [
                    n
                    for n, node in zip(counts, nodes, strict=True)
                    if n and (node != here) == outside
                ]
                messages.append(float(len(lane)))
                nbytes.append(float(sum(lane)))
            lanes.append((max(messages), max(nbytes)))
        return self.exchange(*lanes)

    def _to_all(self, transfer: Transfer, nodes: list[int]) -> float:
        """Return the seconds of an all-gather or a broadcast."""
        most, many = max(map(nodes.count, set(nodes))), len(set(nodes))
        shards = list(transfer.recv)
        shards[transfer.rank] = max(transfer.send)  # what this rank sends to each
        latency = ceil(log2(most)) * self.latency_within
        latency += ceil(log2(many)) * self.latency_between
        if transfer.schedule == "all_gather" and len(set(shards)) > 1:
            latency += (len(shards) - 1) * self.gap
        here = nodes[transfer.rank]
        if transfer.schedule == "broadcast":
            moved = max(shards)
            far = moved if many > 1 else 0
        else:
            moved = sum(transfer.recv)
            far = sum(n for n, node in zip(shards, nodes, strict=True) if node != here)
        moving = max(moved / self.bandwidth_within, far / (most * self.bandwidth_between))
        return self.call + latency + moving

    def seconds(self, work: Work) -> Seconds:
        """Return what the work of one rank takes, with nothing overlapped."""
        communication: dict[str, float] = {}
        for name, transfer in work.transfers:
            communication[name] = communication.get(name, 0.0) + self.transfer(transfer)
        compute = self.compute(
            float(work.flops),
            float(work.matmul_bytes),
            float(work.other_bytes),
            float(work.kernels),
        )
        return Seconds(compute, communication)


def _greater(a: Number, b: Number) -> Number:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return torch.maximum(torch.as_tensor(a), torch.as_tensor(b))
    return max(a, b)
