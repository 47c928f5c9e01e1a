"""Time of a step by number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch

from varcomm.errors import ArgumentError
from varcomm.simulate.machine import Machine
from varcomm.simulate.parts import Counts, partition
from varcomm.simulate.step import Fit, HaloCall, Prepare, SameCall, Step, calls_of_all, run
from varcomm.simulate.table import aligned

__all__ = ["Point", "Sample", "Scaling", "sample", "scaling"]

_RANKS = 8  # simulated ranks of all numbers of ranks together; at least two of each


@dataclass(frozen=True)
class Point:
    """A step on one number of ranks; counts, bytes and seconds are the maximum over ranks.

    Attributes
    ----------
    ranks, nodes : int
        Ranks, and nodes of the full graph.
    owned, edges, halo, neighbours : int
        Owned nodes and edges, received rows, and ranks with which a rank exchanges rows.
    sent, messages, memory : float
        Bytes and messages that a rank sends in a step, and its bytes of tensors.
    compute, busy, launching : float
        Seconds of operators: the greater of arithmetic and memory, and of starting operators.
    halo_seconds, sum_seconds : float
        Seconds of exchanges of halos, and of all other calls: sums of gradients and losses.
    seconds : float
        Seconds of the slowest rank; nothing overlaps.
    """

    ranks: int
    nodes: int
    owned: int
    edges: int
    halo: int
    neighbours: int
    sent: float
    messages: float
    memory: float
    compute: float
    busy: float
    launching: float
    halo_seconds: float
    sum_seconds: float
    seconds: float

    @classmethod
    def of(cls, step: Step, machine: Machine) -> Point:
        """Sum up a step on a machine."""
        parts, counts, times = step.parts, step.counts, step.times(machine)
        busy = machine.busy(*(counts[name] for name in ("flops", "matmul_bytes", "other_bytes")))
        halos = {call.name for call in step.transfers if isinstance(call, HaloCall)}
        of_halos, of_sums = torch.zeros(2, parts.size, dtype=torch.float64)
        for name, seconds in times.communication.items():
            (of_halos if name in halos else of_sums).add_(seconds)
        return cls(
            ranks=parts.size,
            nodes=int(parts.owned.sum()),
            owned=int(parts.owned.max()),
            edges=int(parts.edges.max()),
            halo=int(parts.halo.max()),
            neighbours=int(parts.neighbours.max()),
            sent=float(step.sent.max()),
            messages=float(step.messages.max()),
            memory=float(step.memory.max()),
            compute=float(times.compute.max()),
            busy=float(busy.max()),
            launching=float(counts["kernels"].max()) * machine.launch,
            halo_seconds=float(of_halos.max()),
            sum_seconds=float(of_sums.max()),
            seconds=times.step,
        )


@dataclass(frozen=True)
class Sample:
    """Work of a step per row of a graph, for some numbers of ranks.

    Attributes
    ----------
    fit : Fit
        Operations, bytes and memory.
    transfers : mapping of int to tuple
        Calls of a step, by number of ranks.
    """

    fit: Fit
    transfers: Mapping[int, tuple[HaloCall | SameCall, ...]]

    def step(self, counts: Counts) -> Step:
        """Return the step on a partition, for a number of ranks that was sampled."""
        if counts.size not in self.transfers:
            raise ArgumentError(
                f"simulate: the sample was run for {sorted(self.transfers)} ranks, and these parts "
                f"are for {counts.size}."
            )
        return Step(counts, {}, self.fit, self.transfers[counts.size])


def sample(prepare: Prepare, data: Any, sizes: Iterable[int], method: Any = None) -> Sample:
    """Run a step on a small graph for several numbers of ranks, to predict steps on large graphs.

    A few ranks are simulated for each number of ranks.

    Parameters
    ----------
    prepare : callable
        As for :func:`step`.
    data : torch_geometric.data.Data or torch_geometric.data.HeteroData
        A graph of a few thousand nodes of any shape, with the attributes that `prepare` uses.
    sizes : iterable of int
        Numbers of ranks. Ranks may own nothing of the small graph.
    method : str or torch.Tensor, optional
        As for :func:`partition`.

    Returns
    -------
    Sample
        Applies to counts of any graph.

    Raises
    ------
    ArgumentError
        If `sizes` is empty, or the small graph has no halos on one of them.

    Examples
    --------
    >>> import torch, varcomm as vc
    >>> from torch_geometric.data import Data
    >>> from torch_geometric.nn import SAGEConv
    >>> def ring(n):
    ...     nodes = torch.arange(n)
    ...     return Data(x=torch.ones(n, 8), edge_index=torch.stack([nodes, nodes.roll(-1)]))
    >>> def prepare(graph):
    ...     model = vc.graph.distribute(SAGEConv(8, 8), graph)
    ...     return lambda: graph.sum(model(graph.x, graph.edge_index)).backward()
    >>> sample = vc.simulate.sample(prepare, ring(64), [4], "block")
    >>> sample.step(vc.simulate.partition(ring(6400), 4, "block")).sent.tolist()
    [80.0, 80.0, 80.0, 80.0]
    """
    different = list(dict.fromkeys(sizes))
    if not different:
        raise ArgumentError("simulate.sample: sizes must name at least one number of ranks.")
    simulated, transfers = [], {}

    def simulate(size: int, ranks_each: int) -> None:
        parts = partition(data, size, method)
        order = parts.edges.argsort()
        order = order[parts.edges[order] > 0] if parts.edges.any() else order
        places = torch.linspace(len(order) - 1, len(order) // 4, ranks_each).round().long()
        # A rank with a halo determines the bytes per row.
        ranks = dict.fromkeys([*order[places].tolist(), int(parts.halo.argmax())])
        works = run(prepare, parts, list(ranks))
        simulated.append((parts, works))
        transfers[size] = calls_of_all(parts, works)
        if size > 1 and any(getattr(call, "width", 1) == 0 for call in transfers[size]):
            raise ArgumentError(
                f"simulate.sample: the small graph has no halos on {size} ranks, so that the bytes "
                "per row are not determined. Use a graph with edges between parts."
            )

    for size in different:
        simulate(size, max(2, ceil(_RANKS / len(different))))
    # Each number of ranks has its own constant, so a few ranks do not determine the slopes.
    if sum(len(works) - 1 for _, works in simulated) < _RANKS:
        simulate(2 * max(different) + _RANKS, 2 * _RANKS)
    return Sample(Fit.of(simulated), transfers)


@dataclass(frozen=True)
class Scaling:
    """Points for growing numbers of ranks on one machine.

    Attributes
    ----------
    machine : Machine
    points : tuple of Point
    weak : bool
        Whether the graph grows with the ranks.
    """

    machine: Machine
    points: tuple[Point, ...]
    weak: bool = False

    @property
    def efficiency(self) -> list[float]:
        """Nodes per second and rank, relative to the first point."""
        rates = [point.nodes / point.seconds / point.ranks for point in self.points]
        return [rate / rates[0] for rate in rates]

    def __str__(self) -> str:
        """Return a table."""
        full = self.machine.memory
        head = "ranks,nodes,owned,halo,neighbours,MB sent,messages,GB "
        rows = [f"{head},compute ms,halo ms,sums ms,step ms,efficiency".split(",")]
        for point, efficiency in zip(self.points, self.efficiency, strict=True):
            counts = (point.ranks, point.nodes, point.owned, point.halo, point.neighbours)
            seconds = (point.compute, point.halo_seconds, point.sum_seconds, point.seconds)
            rows.append([f"{number:,}" for number in counts])
            rows[-1] += [f"{point.sent / 1e6:.2f}", f"{point.messages:,.0f}"]
            rows[-1] += [f"{point.memory / 1e9:.2f}{'*' if point.memory > full else ' '}"]
            rows[-1] += [*(f"{each * 1e3:.2f}" for each in seconds), f"{efficiency:.2f}"]
        lines = aligned(rows, left=0)
        if any(point.memory > full for point in self.points):
            lines.append(f"* more than the {full / 1e9:.0f} GB of a rank")
        return "\n".join(lines)


def scaling(
    sample: Sample, counts: Sequence[Counts], machine: Machine, weak: bool = False
) -> Scaling:
    """Predict a step on a machine for several numbers of ranks.

    Parameters
    ----------
    sample : Sample
        Work of the step.
    counts : sequence of Counts
        A graph cut for each number of ranks; with `weak`, graphs that grow with it.
    machine : Machine
        Machine of all ranks.
    weak : bool
        Recorded in the result.

    Returns
    -------
    Scaling
        One point per number of ranks.

    Examples
    --------
    >>> import torch, varcomm as vc
    >>> from torch_geometric.data import Data
    >>> from torch_geometric.nn import SAGEConv
    >>> def ring(n):
    ...     nodes = torch.arange(n)
    ...     return Data(x=torch.ones(n, 8), edge_index=torch.stack([nodes, nodes.roll(-1)]))
    >>> def prepare(graph):
    ...     model = vc.graph.distribute(SAGEConv(8, 8), graph)
    ...     return lambda: graph.sum(model(graph.x, graph.edge_index)).backward()
    >>> sample = vc.simulate.sample(prepare, ring(64), [2, 4], "block")
    >>> counts = [vc.simulate.partition(ring(6400), ranks, "block") for ranks in (2, 4)]
    >>> curve = vc.simulate.scaling(sample, counts, vc.simulate.MACHINES["h100-ndr"])
    >>> [(point.ranks, point.owned, point.sent) for point in curve.points]
    [(2, 3200, 48.0), (4, 1600, 80.0)]
    """
    steps = [sample.step(each) for each in counts]
    return Scaling(machine, tuple(Point.of(each, machine) for each in steps), weak)
