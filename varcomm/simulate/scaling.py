"""How a step's time changes with the number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch

from varcomm.errors import ArgumentError
from varcomm.simulate.counts import Counts
from varcomm.simulate.fit import Fit
from varcomm.simulate.flows import Alike, Halo, recognised
from varcomm.simulate.machine import Machine
from varcomm.simulate.parts import partition
from varcomm.simulate.step import Prepare, Step, run

__all__ = ["Point", "Sample", "Scaling", "sample", "scaling"]

# Ranks that are run, of all numbers of ranks together; at least two of each.
_RANKS = 8

# What keeps a rank busy.
_BUSY = ("flops", "matmul_bytes", "other_bytes")


@dataclass(frozen=True)
class Point:
    """A step on some number of ranks; counts, bytes and seconds are the most of any rank.

    Attributes
    ----------
    ranks, nodes : int
        Ranks, and nodes of the whole graph.
    owned, edges, halo, neighbours : int
        Nodes and edges that a rank owns, rows that it receives, and ranks with which it exchanges.
    sent, messages : float
        Bytes and messages that it sends in a step.
    memory : float
        Bytes of tensors.
    compute : float
        Seconds of operators: the greater of the two that follow.
    busy, launching : float
        Of their arithmetic and memory, and of starting them one by one.
    halo_seconds, sum_seconds : float
        Of exchanges of halos, and of all other calls: sums of gradients and losses.
    seconds : float
        Of the slowest rank, with nothing overlapped.
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
        counts, times = step.parts, step.times(machine)
        halos = {transfer.name for transfer in step.transfers if isinstance(transfer, Halo)}
        of_halos, of_sums = torch.zeros(2, counts.size, dtype=torch.float64)
        for name, seconds in times.communication.items():
            if name in halos:
                of_halos = of_halos + seconds
            else:
                of_sums = of_sums + seconds
        return cls(
            ranks=counts.size,
            nodes=int(counts.owned.sum()),
            owned=int(counts.owned.max()),
            edges=int(counts.edges.max()),
            halo=int(counts.halo.max()),
            neighbours=int(counts.neighbours.max()),
            sent=float(step.sent.max()),
            messages=float(step.messages.max()),
            memory=float(step.memory.max()),
            compute=float(times.compute.max()),
            busy=float(machine.busy(*(step.counts[name] for name in _BUSY)).max()),
            launching=float(step.counts["kernels"].max()) * machine.launch,
            halo_seconds=float(of_halos.max()),
            sum_seconds=float(of_sums.max()),
            seconds=times.step,
        )


@dataclass(frozen=True)
class Sample:
    """What a step does by what a rank has of a graph, for some numbers of ranks.

    Attributes
    ----------
    fit : Fit
        Operations, bytes and memory.
    transfers : mapping of int to tuple
        The calls of a step, by the number of ranks.
    """

    fit: Fit
    transfers: Mapping[int, tuple[Halo | Alike, ...]]

    def step(self, counts: Counts) -> Step:
        """Return the step on a partition for one of these numbers of ranks.

        Raises
        ------
        ArgumentError
            If the sample was not run for that number of ranks.
        """
        if counts.size not in self.transfers:
            raise ArgumentError(
                f"simulate: the sample was run for {sorted(self.transfers)} ranks, and these parts "
                f"are for {counts.size}."
            )
        return Step(counts, {}, self.fit, self.transfers[counts.size])


def sample(prepare: Prepare, data: Any, sizes: Iterable[int], method: Any = None) -> Sample:
    """Run a step on a small graph, cut for several numbers of ranks, to tell it for large ones.

    What a step does is counted on a few ranks for each number of ranks. The small graph must be
    like the large one in what is there of each node and edge, not in its shape.

    Parameters
    ----------
    prepare : callable
        As for :func:`step`.
    data : torch_geometric.data.Data or torch_geometric.data.HeteroData
        A graph of a few thousand nodes, with the attributes that `prepare` uses.
    sizes : iterable of int
        Numbers of ranks. Ranks may own nothing of the small graph.
    method : str or torch.Tensor, optional
        As for :func:`partition`.

    Returns
    -------
    Sample
        To be applied to counts of any graph.

    Raises
    ------
    ArgumentError
        If `sizes` are none, or the small graph has no halos on one of them.

    Examples
    --------
    >>> import torch, varcomm as vc
    >>> from torch_geometric.data import Data
    >>> from torch_geometric.nn import SAGEConv
    >>> def ring(n):
    ...     return torch.stack([torch.arange(n), torch.arange(n).roll(-1)])
    >>> def prepare(graph):
    ...     model = vc.graph.distribute(SAGEConv(8, 8), graph)
    ...     return lambda: graph.sum(model(graph.x, graph.edge_index)).backward()
    >>> small = Data(x=torch.ones(64, 8), edge_index=ring(64))
    >>> sample = vc.simulate.sample(prepare, small, [4], "block")
    >>> large = Data(edge_index=ring(6400), num_nodes=6400)
    >>> sample.step(vc.simulate.partition(large, 4, "block")).sent.tolist()
    [80.0, 80.0, 80.0, 80.0]
    """
    simulated, transfers = [], {}
    different = list(dict.fromkeys(sizes))
    if not different:
        raise ArgumentError("simulate.sample: sizes must name one number of ranks at least.")

    def simulate(size: int, ranks_each: int) -> None:
        parts = partition(data, size, method)
        order = parts.edges.argsort()
        order = order[parts.edges[order] > 0] if parts.edges.any() else order
        places = torch.linspace(len(order) - 1, len(order) // 4, ranks_each).round().long()
        # and one with a halo, which tells the bytes of its rows
        ranks = dict.fromkeys([*order[places].tolist(), int(parts.halo.argmax())])
        works = run(prepare, parts, list(ranks))
        simulated.append((parts, works))
        transfers[size] = recognised(parts, works)
        known = (not isinstance(each, Halo) or each.width > 0 for each in transfers[size])
        if size > 1 and not all(known):
            raise ArgumentError(
                f"simulate.sample: the small graph has no halos on {size} ranks, so that the bytes "
                "of a row are not known. Take one with edges between parts."
            )

    for size in different:
        simulate(size, max(2, ceil(_RANKS / len(different))))
    # each has a constant of its own, so that few ranks of few numbers tell too little of rows
    if sum(len(works) - 1 for _, works in simulated) < _RANKS:
        simulate(2 * max(different) + _RANKS, 2 * _RANKS)
    return Sample(Fit.of(simulated), transfers)


@dataclass(frozen=True)
class Scaling:
    """Points of growing numbers of ranks, on one machine.

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
        """Nodes a second and a rank, as a part of those of the first point."""
        rates = [point.nodes / point.seconds / point.ranks for point in self.points]
        return [rate / rates[0] for rate in rates]

    def __str__(self) -> str:
        """Return a table."""
        rows = [_COLUMNS]
        for point, efficiency in zip(self.points, self.efficiency, strict=True):
            rows.append(
                (
                    f"{point.ranks:,}",
                    f"{point.nodes:,}",
                    f"{point.owned:,}",
                    f"{point.halo:,}",
                    f"{point.neighbours:,}",
                    f"{point.sent / 1e6:.2f}",
                    f"{point.messages:,.0f}",
                    f"{point.memory / 1e9:.2f}{'*' if point.memory > self.machine.memory else ' '}",
                    f"{point.compute * 1e3:.2f}",
                    f"{point.halo_seconds * 1e3:.2f}",
                    f"{point.sum_seconds * 1e3:.2f}",
                    f"{point.seconds * 1e3:.2f}",
                    f"{efficiency:.2f}",
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
        if any(point.memory > self.machine.memory for point in self.points):
            lines.append(f"* more than the {self.machine.memory / 1e9:.0f} GB of a rank")
        return "\n".join(lines)


_COLUMNS = (
    *("ranks", "nodes", "owned", "halo", "neighbours", "MB sent", "messages", "GB "),
    *("compute ms", "halo ms", "sums ms", "step ms", "efficiency"),
)


def scaling(
    sample: Sample, counts: Sequence[Counts], machine: Machine, weak: bool = False
) -> Scaling:
    """Predict a step on a machine for several numbers of ranks.

    Parameters
    ----------
    sample : Sample
        What the step does.
    counts : sequence of Counts
        A graph cut for each number of ranks; with `weak`, graphs that grow with it.
    machine : Machine
    weak : bool
        Only what is said of it.

    Returns
    -------
    Scaling
        A point for each number of ranks.

    Examples
    --------
    >>> import torch, varcomm as vc
    >>> from torch_geometric.data import Data
    >>> from torch_geometric.nn import SAGEConv
    >>> def ring(n):
    ...     return torch.stack([torch.arange(n), torch.arange(n).roll(-1)])
    >>> def prepare(graph):
    ...     model = vc.graph.distribute(SAGEConv(8, 8), graph)
    ...     return lambda: graph.sum(model(graph.x, graph.edge_index)).backward()
    >>> small = Data(x=torch.ones(64, 8), edge_index=ring(64))
    >>> sample = vc.simulate.sample(prepare, small, [2, 4], "block")
    >>> large = Data(edge_index=ring(6400), num_nodes=6400)
    >>> counts = [vc.simulate.partition(large, ranks, "block") for ranks in (2, 4)]
    >>> curve = vc.simulate.scaling(sample, counts, vc.simulate.MACHINES["h100-ndr"])
    >>> [(point.ranks, point.owned, point.sent) for point in curve.points]
    [(2, 3200, 48.0), (4, 1600, 80.0)]
    """
    steps = [sample.step(each) for each in counts]
    return Scaling(machine, tuple(Point.of(each, machine) for each in steps), weak)
