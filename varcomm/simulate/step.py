"""Prediction of a training step on all ranks, or on a larger graph, from runs on some ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil
from typing import TYPE_CHECKING, Any, Self

import torch

from varcomm.errors import ArgumentError, DisagreementError
from varcomm.simulate.machine import Machine, Times
from varcomm.simulate.parts import Counts, Parts, partition, sums
from varcomm.simulate.work import Work, count, world
from varcomm.sizes import checked_rank
from varcomm.transport.engines.simulated import Transfer

if TYPE_CHECKING:  # which needs PyTorch Geometric
    from varcomm.graph.partitioned_graph import PartitionedGraph

# From a rank's part of the graph to a function that does one step.
Prepare = Callable[["PartitionedGraph"], Callable[[], object]]

_RANKS = 8  # simulated ranks of a step by default, and of all numbers of ranks of a sample
_OPERATORS = ("flops", "matmul_bytes", "other_bytes", "kernels")  # of Work


@dataclass(frozen=True)
class StepCall:
    """A call of a step: an exchange of halos or its adjoint, or one like it on all ranks.

    `transfer` describes one rank. An exchange of halos has an edge type, and `width` bytes per row.
    Other calls have the width None.
    """

    name: str
    transfer: Transfer
    edge_type: Any = None
    width: int | None = None

    def nbytes(self, counts: Counts, width: int) -> torch.Tensor:
        """Return the bytes that each rank sends to each rank; sparse, shape (P, P)."""
        flows: torch.Tensor = counts.flows[self.edge_type]
        return ((flows.T if self.name.endswith("_adjoint") else flows) * width).coalesce()

    def traffic(self, counts: Counts) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the messages and bytes that each rank sends; int64, shape (P,)."""
        if self.width is None:
            send = torch.tensor(self.transfer.send)
            return (send > 0).sum().expand(counts.size), send.sum().expand(counts.size)
        nbytes = self.nbytes(counts, self.width)
        return torch.bincount(nbytes.indices()[0], minlength=counts.size), sums(nbytes, 1)

    def seconds(self, counts: Counts, machine: Machine) -> torch.Tensor:
        """Return the seconds on each rank; fp64, shape (P,)."""
        if self.width is None:
            return torch.full((counts.size,), machine.transfer(self.transfer), dtype=torch.float64)
        nbytes = self.nbytes(counts, self.width)
        return machine.exchange(nbytes.indices(), nbytes.values(), counts.size)


def _calls_of_all(parts: Parts, works: Mapping[int, Work]) -> tuple[StepCall, ...]:
    """Return the calls of all ranks of a partition from those of simulated ranks."""
    names = {rank: [name for name, _ in work.transfers] for rank, work in works.items()}
    first = next(iter(names))
    for rank, named in names.items():
        if named != names[first]:
            raise DisagreementError(
                f"simulate.step: rank {rank} makes the calls {named}, and rank {first} "
                f"{names[first]}. All ranks must make the same calls in the same order."
            )
    return tuple(
        _call(parts, name, {rank: work.transfers[place][1] for rank, work in works.items()})
        for place, name in enumerate(names[first])
    )


def _call(parts: Parts, name: str, transfers: Mapping[int, Transfer]) -> StepCall:
    largest = max(transfers.values(), key=lambda each: sum(each.send) + sum(each.recv))
    if largest.schedule != "neighbours" or len(largest.ranks) != parts.size:
        return StepCall(name, largest)
    # the types of edges whose halo, or its adjoint, has the bytes of the transfers
    halos: list[StepCall] = []
    given = [n for each in transfers.values() for n in (*each.send, *each.recv)]
    for edge_type in parts.flows:
        call, rows = StepCall(name, largest, edge_type), list[int]()
        flows = call.nbytes(parts, 1)
        for rank in transfers:
            rows += [*flows[rank].to_dense().tolist(), *flows.T[rank].to_dense().tolist()]
        width = sum(given) // sum(rows) if any(rows) else 0
        if [width * n for n in rows] != given or (any(rows) and not width):
            continue
        if not width and flows.values().numel():
            raise ArgumentError(
                f"simulate: ranks {sorted(transfers)} exchange no rows in {name}, so that the "
                "bytes per row are not determined. Also run a rank with a halo: "
                f"{int(parts.halo.argmax())}."
            )
        halos.append(replace(call, width=width))
    if not halos:
        return StepCall(name, largest)
    first, *others = (call.nbytes(parts, call.width or 0) for call in halos)
    if any((other - first).coalesce().values().any() for other in others):
        raise ArgumentError(
            f"simulate: ranks {sorted(transfers)} do not determine the type of edges whose halo a "
            f"call of {name} exchanges. Also run other ranks."
        )
    return halos[0]


@dataclass(frozen=True)
class Fit:
    """Least-squares fit ``count = constant + rows @ slopes`` over simulated ranks.

    `rows` are owned nodes, edges, halo rows and sent rows; slopes are not negative. Operations and
    bytes have one constant per number of ranks, because weights are summed over ranks; memory has
    one. Kernels do not depend on rows. `error` is the largest deviation over the largest count.
    """

    coefficients: Mapping[str, torch.Tensor]
    kernels: Mapping[int, int]
    error: Mapping[str, float]

    @classmethod
    def of(cls, simulated: Sequence[tuple[Counts, Mapping[int, Work]]]) -> Self:
        """Fit the work of ranks of one partition, or of partitions for several numbers of ranks."""
        works = [(parts.size, work) for parts, ranks in simulated for work in ranks.values()]
        sizes = sorted({size for size, _ in works})
        kernels = {size: max(work.kernels for s, work in works if s == size) for size in sizes}
        rows = torch.cat([_rows(parts)[list(ranks)] for parts, ranks in simulated])
        of_size = torch.tensor([[s == size for s in sizes] for size, _ in works]).double()
        coefficients, error = {}, {}
        for name in ("flops", "matmul_bytes", "other_bytes", "memory"):
            constants = torch.ones(len(works), 1) if name == "memory" else of_size
            counts = torch.tensor([getattr(work, name) for _, work in works], dtype=torch.float64)
            design = torch.cat([constants, rows], dim=1)
            coefficients[name], error[name] = _fitted(design, counts, constants.shape[1])
        return cls(coefficients, kernels, error)

    def counts(self, parts: Counts) -> dict[str, torch.Tensor]:
        """Return the counts of all ranks by name; fp64, shape (P,)."""
        rows, found = _rows(parts), {}
        for name, solution in self.coefficients.items():
            constant = solution[0 if name == "memory" else list(self.kernels).index(parts.size)]
            found[name] = (constant + rows @ solution[-rows.shape[1] :]).clamp(min=0)
        return found | {"kernels": torch.full_like(rows[:, 0], self.kernels[parts.size])}


def _rows(parts: Counts) -> torch.Tensor:
    return torch.stack([parts.owned, parts.edges, parts.halo, parts.sent], dim=1).double()


def _fitted(design: torch.Tensor, counts: torch.Tensor, free: int) -> tuple[torch.Tensor, float]:
    """Return coefficients, of which only the first `free` may be negative, and the error."""
    # Columns are scaled to one size: the least norm must not prefer a column for its unit.
    scale = design.abs().amax(dim=0).clamp(min=1)
    scaled, used = design / scale, torch.ones(design.shape[1], dtype=torch.bool)
    solution = torch.zeros(design.shape[1], dtype=torch.float64)
    while True:
        found = torch.linalg.lstsq(scaled[:, used], counts[:, None], driver="gelsd").solution
        solution.zero_()[used] = found[:, 0]
        worst = int(solution[free:].argmin()) + free
        if solution[worst] >= -1e-12 * counts.abs().max():
            break
        used[worst] = False
    solution[free:].clamp_(min=0)
    off = (scaled @ solution - counts).abs().max() / counts.abs().max().clamp(min=1)
    return solution / scale, float(off)


@dataclass(frozen=True, eq=False)
class Step:
    """Work and messages of a step on every rank of a partition, made by :func:`step`.

    Counts of simulated ranks are exact. On other ranks, operations, bytes and memory are linear in
    the rows that a rank owns, receives and sends; messages follow from the partition.

    Attributes
    ----------
    parts : Counts
        The partition.
    works : mapping of int to Work
        Work of the simulated ranks.
    fit : Fit
        The linear model; ``fit.error`` is its error on the simulated ranks.
    transfers : tuple of StepCall
        The calls of a step, in order.

    See Also
    --------
    step, Counts
    """

    parts: Counts
    works: Mapping[int, Work]
    fit: Fit = field(repr=False)
    transfers: tuple[StepCall, ...] = field(repr=False)

    @cached_property
    def counts(self) -> Mapping[str, torch.Tensor]:
        """Attributes of :class:`Work`, and ``messages`` and ``sent``, by name; fp64, shape (P,)."""
        counts = self.fit.counts(self.parts)
        traffic = torch.zeros(2, self.parts.size, dtype=torch.float64)
        for call in self.transfers:
            traffic += torch.stack(call.traffic(self.parts))
        counts |= {"messages": traffic[0], "sent": traffic[1]}
        for rank, work in self.works.items():
            total = work.calls.total
            exact = {**vars(work), "messages": total.messages_sent, "sent": total.sent}
            for name, values in counts.items():
                values[rank] = exact[name]
        return counts

    @property
    def memory(self) -> torch.Tensor:
        """Peak bytes of tensors on each rank; fp64, shape (P,)."""
        return self.counts["memory"]

    @property
    def messages(self) -> torch.Tensor:
        """Messages that each rank sends; fp64, shape (P,)."""
        return self.counts["messages"]

    @property
    def sent(self) -> torch.Tensor:
        """Bytes that each rank sends; fp64, shape (P,)."""
        return self.counts["sent"]

    def times(self, machine: Machine) -> Times:
        """Return the seconds of the step on each rank of a machine."""
        compute = machine.compute(*(self.counts[name] for name in _OPERATORS))
        communication: dict[str, torch.Tensor] = {}
        for call in self.transfers:
            seconds = call.seconds(self.parts, machine)
            communication[call.name] = communication.get(call.name, 0.0) + seconds
        return Times(compute, communication)

    def __str__(self) -> str:
        """Return a table of minimum, mean and maximum over all ranks."""
        parts, counts = self.parts, self.counts
        rows = {
            "nodes": parts.owned,
            "edges": parts.edges,
            "halo rows": parts.halo,
            "neighbours": parts.neighbours,
            "messages sent": self.messages,
            "MB sent": self.sent / 1e6,
            "GFLOP": counts["flops"] / 1e9,
            "GB read and written": (counts["matmul_bytes"] + counts["other_bytes"]) / 1e9,
            "kernels": counts["kernels"],
            "GB of tensors": counts["memory"] / 1e9,
        }
        lines = [f"{f'{parts.size} ranks, a step':<22}{'least':>14}{'mean':>14}{'most':>14}"]
        for name, each in rows.items():
            v = each.double()
            numbers = (f"{float(n):>14,.6g}" for n in (v.min(), v.mean(), v.max()))
            lines.append(f"{name:<22}{''.join(numbers)}")
        return "\n".join(lines)


def step(prepare: Prepare, parts: Parts, ranks: Sequence[int] | None = None) -> Step:
    """Run a step as some ranks of a partition, one after the other, and predict all ranks.

    Parameters
    ----------
    prepare : callable
        Creates model, optimizer and data from a rank's :class:`~varcomm.graph.PartitionedGraph`,
        and returns a function without arguments that does one step.
    parts : Parts
        The partition; its graph has the attributes that `prepare` uses.
    ranks : sequence of int, optional
        Ranks to run. By default, up to eight ranks, including ranks with the most and the fewest
        rows. Each run needs the time and memory of a rank.

    Returns
    -------
    Step
        Work and messages of all ranks.

    Raises
    ------
    ArgumentError
        If `ranks` contains invalid ranks, or these ranks do not determine the messages of all
        others.
    DisagreementError
        If ranks make different calls.

    See Also
    --------
    Step, count, sample

    Examples
    --------
    >>> import varcomm as vc
    >>> from torch_geometric.data import Data
    >>> from torch_geometric.utils import grid
    >>> edge_index, pos = grid(32, 64)
    >>> parts = vc.simulate.partition(Data(edge_index=edge_index, pos=pos), 16, "block")
    >>> def prepare(graph):
    ...     return lambda: graph.halo(graph.pos)
    >>> step = vc.simulate.step(prepare, parts, ranks=[0, 1])
    >>> step.sent.max(), step.messages.max()
    (tensor(1024., dtype=torch.float64), tensor(2., dtype=torch.float64))
    """
    works = _run(prepare, parts, ranks)
    return Step(parts, works, Fit.of([(parts, works)]), _calls_of_all(parts, works))


def _run(prepare: Prepare, parts: Parts, ranks: Sequence[int] | None = None) -> dict[int, Work]:
    """Return the work of a step on some ranks, which run one after the other."""
    if ranks is None:
        ranks = _representative(parts)
    works = {}
    for rank in [checked_rank(rank, parts.size, "ranks", "simulate.step: ") for rank in ranks]:
        with world(parts.size, rank):
            one = prepare(parts.part())
            one()  # makes tensors that stay, such as the state of an optimizer
            works[rank] = count(one)
            del one
    return works


def _representative(parts: Parts) -> list[int]:
    """Return ranks whose runs determine the work of the others."""
    # Per halo: a rank that has rows, and a rank that sends and receives different numbers of rows.
    ranks = []
    for flows in parts.flows.values():
        received, sent = sums(flows, 0), sums(flows, 1)
        ranks += [int(received.argmax()), int((sent - received).abs().argmax())]
    for counts in (parts.edges, parts.halo, parts.sent):
        ranks += [int(counts.argmax()), int(counts.argmin())]
    places = torch.linspace(0, parts.size - 1, _RANKS).round().long()
    ranks += parts.edges.argsort()[places].tolist()
    return list(dict.fromkeys(ranks))[: max(_RANKS, 2 * len(parts.flows))]


@dataclass(frozen=True)
class Sample:
    """Work of a step per row of a graph, for some numbers of ranks.

    Attributes
    ----------
    fit : Fit
        Operations, bytes and memory.
    transfers : mapping of int to tuple
        Calls of a step, by number of ranks.

    See Also
    --------
    sample, Step
    """

    fit: Fit
    transfers: Mapping[int, tuple[StepCall, ...]]

    def step(self, counts: Counts) -> Step:
        """Return the step on a partition, for a number of ranks that was sampled."""
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
    method : str or torch.Tensor or numpy.ndarray or sequence of int, optional
        As for :func:`partition`.

    Returns
    -------
    Sample
        A sample that applies to the counts of any graph.

    Raises
    ------
    ArgumentError
        If the small graph has no edges between parts.

    See Also
    --------
    Sample, step

    Examples
    --------
    >>> import varcomm as vc
    >>> from torch_geometric.data import Data
    >>> from torch_geometric.utils import grid
    >>> def of_side(n):
    ...     edge_index, pos = grid(n, n)
    ...     return Data(edge_index=edge_index, pos=pos)
    >>> def prepare(graph):
    ...     return lambda: graph.halo(graph.pos)
    >>> sample = vc.simulate.sample(prepare, of_side(8), [2, 4], "block")
    >>> for ranks in (2, 4):
    ...     step = sample.step(vc.simulate.partition(of_side(64), ranks, "block"))
    ...     print(ranks, step.sent.tolist())
    2 [512.0, 512.0]
    4 [512.0, 1024.0, 1024.0, 512.0]
    """
    different = list(dict.fromkeys(sizes))
    simulated, transfers = [], {}

    def simulate(size: int, ranks_each: int) -> None:
        parts = partition(data, size, method)
        order = parts.edges.argsort()
        order = order[parts.edges[order] > 0] if parts.edges.any() else order
        places = torch.linspace(len(order) - 1, len(order) // 4, ranks_each).round().long()
        # A rank with a halo determines the bytes per row.
        ranks = dict.fromkeys([*order[places].tolist(), int(parts.halo.argmax())])
        works = _run(prepare, parts, list(ranks))
        simulated.append((parts, works))
        transfers[size] = _calls_of_all(parts, works)
        if size > 1 and any(call.width == 0 for call in transfers[size]):
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
