"""Prediction of a training step on all ranks from simulated runs on some of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from varcomm.errors import ArgumentError, DisagreementError
from varcomm.simulate.fit import COUNTS, Fit
from varcomm.simulate.machine import Machine
from varcomm.simulate.parts import Counts, Flows, Parts
from varcomm.simulate.table import aligned
from varcomm.simulate.work import Work, count, world
from varcomm.sizes import checked_rank
from varcomm.transport.simulated import Transfer

if TYPE_CHECKING:  # which needs PyTorch Geometric
    from varcomm.graph.partitioned_graph import PartitionedGraph

__all__ = ["HaloCall", "Prepare", "SameCall", "Step", "Times", "calls_of_all", "run", "step"]

# From a rank's part of the graph to a function that does one step.
Prepare = Callable[["PartitionedGraph"], Callable[[], object]]

_RANKS = 8  # simulated ranks by default


@dataclass(frozen=True)
class HaloCall:
    """An exchange of halos, or its adjoint if `is_adjoint`: `width` bytes per halo row."""

    name: str
    edge_type: Any
    width: int
    is_adjoint: bool

    def traffic(self, flows: Flows, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the messages and bytes that each rank sends; fp64, shape (P,)."""
        sent, received = _per_rank(flows, size, size)
        messages, rows = (received if self.is_adjoint else sent).sum(dim=1)
        return messages, rows * self.width

    def seconds(self, flows: Flows, size: int, machine: Machine) -> torch.Tensor:
        """Return the seconds on each rank; fp64, shape (P,)."""
        sent, received = _per_rank(flows, size, machine.ranks_per_node)
        messages, rows = torch.maximum(sent, received)
        nbytes = rows * self.width
        total: torch.Tensor = machine.exchange((messages[0], nbytes[0]), (messages[1], nbytes[1]))
        return total


@dataclass(frozen=True)
class SameCall:
    """A call with the same bytes on all ranks, up to a few, such as a sum over all ranks."""

    name: str
    transfer: Transfer

    def traffic(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the messages and bytes that each rank sends; fp64, shape (P,)."""
        send = torch.tensor(self.transfer.send, dtype=torch.float64)
        return (send > 0).sum().double().expand(size), send.sum().expand(size)


def _per_rank(flows: Flows, size: int, per_node: int) -> torch.Tensor:
    """Return messages and rows of each rank within its node and beyond.

    fp64 of shape (2, 2, 2, P): sent or received; messages or rows; within or beyond.
    """
    beyond = (flows.sender // per_node != flows.receiver // per_node).long()
    both = (torch.ones_like(flows.rows, dtype=torch.float64), flows.rows.double())
    return torch.stack([
        torch.stack([
            torch.bincount(beyond * size + end, weights, minlength=2 * size).view(2, size)
            for weights in both
        ])
        for end in (flows.sender, flows.receiver)
    ])  # fmt: skip


def calls_of_all(parts: Parts, works: Mapping[int, Work]) -> tuple[HaloCall | SameCall, ...]:
    """Return the calls of all ranks of a partition from those of simulated ranks.

    Raises
    ------
    ArgumentError
        If the simulated ranks do not determine which halo a call exchanges.
    DisagreementError
        If ranks make different calls.
    """
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


def _call(parts: Parts, name: str, transfers: Mapping[int, Transfer]) -> HaloCall | SameCall:
    largest = max(transfers.values(), key=lambda each: sum(each.send) + sum(each.recv))
    if largest.schedule != "neighbours" or len(largest.ranks) != parts.size:
        return SameCall(name, largest)
    halos = [halo for key in parts.needs for halo in _matching(parts, key, name, transfers)]
    if len({_messages(parts, halo) for halo in halos}) > 1:
        sent = torch.stack([h.traffic(parts.flows[h.edge_type], parts.size)[1] for h in halos])
        apart = torch.nonzero((sent != sent[0]).any(dim=0)).view(-1).tolist()
        raise ArgumentError(
            f"simulate: ranks {sorted(transfers)} do not determine whose halo a call of {name} "
            f"exchanges, or in which direction. Also run one of these ranks: {apart[:5]}."
        )
    if halos and halos[0].width == 0 and len(parts.flows[halos[0].edge_type].rows):
        raise ArgumentError(
            f"simulate: ranks {sorted(transfers)} exchange no rows in {name}, so that the bytes "
            f"per row are not determined. Also run a rank with a halo: {int(parts.halo.argmax())}."
        )
    return halos[0] if halos else SameCall(name, largest)


def _matching(
    parts: Parts, edge_type: Any, name: str, transfers: Mapping[int, Transfer]
) -> Iterator[HaloCall]:
    """Yield the exchanges of a halo, and their adjoints, that have the bytes of the transfers."""
    needs = parts.needs[edge_type]
    given = [counts for each in transfers.values() for counts in (each.send, each.recv)]
    for is_adjoint in {"exchange": [False], "exchange_adjoint": [True]}.get(name, [False, True]):
        rows: list[tuple[int, ...]] = []
        for rank in transfers:
            ends = needs.asked_of(rank)[1], needs.asked_by(rank)
            rows += reversed(ends) if is_adjoint else ends
        total = sum(map(sum, rows))
        width = sum(map(sum, given)) // total if total else 0
        if all(tuple(width * n for n in r) == tuple(g) for r, g in zip(rows, given, strict=True)):
            yield HaloCall(name, edge_type, width, is_adjoint)


def _messages(parts: Parts, halo: HaloCall) -> tuple[tuple[int, ...], ...]:
    """Return pairs of ranks and bytes of the messages of an exchange, in one order."""
    flows = parts.flows[halo.edge_type]
    ends = (flows.sender, flows.receiver)
    source, target = reversed(ends) if halo.is_adjoint else ends
    pair = source * parts.size + target
    order = pair.argsort()
    return tuple(pair[order].tolist()), tuple((flows.rows[order] * halo.width).tolist())


@dataclass(frozen=True)
class Times:
    """Seconds of a step on each rank; fp64 tensors of shape (P,).

    Attributes
    ----------
    compute : torch.Tensor
        Of operators.
    communication : mapping of str to torch.Tensor
        Of calls, by operation.
    """

    compute: torch.Tensor
    communication: Mapping[str, torch.Tensor]

    @property
    def total(self) -> torch.Tensor:
        """Sum of both on each rank; nothing overlaps."""
        return torch.stack([self.compute, *self.communication.values()]).sum(dim=0)

    @property
    def step(self) -> float:
        """Seconds of the slowest rank."""
        return float(self.total.max())


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
        The linear model and its error.
    transfers : tuple of HaloCall and SameCall
        The calls of a step, in order.
    """

    parts: Counts
    works: Mapping[int, Work]
    fit: Fit = field(repr=False)
    transfers: tuple[HaloCall | SameCall, ...] = field(repr=False)

    @cached_property
    def counts(self) -> Mapping[str, torch.Tensor]:
        """Attributes of :class:`Work` on each rank, by name; fp64, shape (P,)."""
        found = self.fit.counts(self.parts)
        for rank, work in self.works.items():
            found[rank] = torch.tensor([float(getattr(work, name)) for name in COUNTS])
        return dict(zip(COUNTS, found.T, strict=True))

    @property
    def memory(self) -> torch.Tensor:
        """Peak bytes of tensors on each rank; fp64, shape (P,)."""
        return self.counts["memory"]

    @cached_property
    def _sent(self) -> tuple[torch.Tensor, torch.Tensor]:
        messages, nbytes = torch.zeros(2, self.parts.size, dtype=torch.float64)
        for call in self.transfers:
            if isinstance(call, HaloCall):
                more = call.traffic(self.parts.flows[call.edge_type], self.parts.size)
            else:
                more = call.traffic(self.parts.size)
            messages, nbytes = messages + more[0], nbytes + more[1]
        for rank, work in self.works.items():
            total = work.calls.total
            messages[rank], nbytes[rank] = total.messages_sent, total.sent
        return messages, nbytes

    @property
    def messages(self) -> torch.Tensor:
        """Messages that each rank sends; fp64, shape (P,)."""
        return self._sent[0]

    @property
    def sent(self) -> torch.Tensor:
        """Bytes that each rank sends; fp64, shape (P,)."""
        return self._sent[1]

    def times(self, machine: Machine) -> Times:
        """Return the seconds of the step on each rank of a machine."""
        compute = machine.compute(*(self.counts[name] for name in COUNTS if name != "memory"))
        zeros = torch.zeros(self.parts.size, dtype=torch.float64)
        communication: dict[str, torch.Tensor] = {}
        for call in self.transfers:
            more = zeros
            if isinstance(call, HaloCall) and self.parts.size > 1:
                more = call.seconds(self.parts.flows[call.edge_type], self.parts.size, machine)
            elif isinstance(call, SameCall):
                more = zeros + machine.transfer(call.transfer)
            communication[call.name] = communication.get(call.name, zeros) + more
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
        cells = [(f"{parts.size} ranks, a step", "least", "mean", "most")]
        for name, values in rows.items():
            numbers = values.double()
            low, mean, high = (float(v) for v in (numbers.min(), numbers.mean(), numbers.max()))
            cells.append((name, _number(low), _number(mean), _number(high)))
        return "\n".join(aligned(cells))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def step(prepare: Prepare, parts: Parts, ranks: Sequence[int] | None = None) -> Step:
    """Run a step as some ranks of a partition, one after the other, and predict all ranks.

    Parameters
    ----------
    prepare : callable
        Takes a rank's :class:`~varcomm.graph.PartitionedGraph`, makes its model, optimizer and
        data, and returns a function without arguments that does one step, as a real run does.
    parts : Parts
        The partition; its graph has the attributes that `prepare` uses.
    ranks : sequence of int, optional
        Ranks to run. None chooses up to eight: those with the most and the fewest edges, halo rows
        and sent rows, and some between. Each run needs the time and memory of a rank.

    Returns
    -------
    Step
        Work and messages of all ranks.

    Raises
    ------
    ArgumentError
        If `ranks` is empty or names other ranks, or if it does not determine the messages of the
        other ranks.
    DisagreementError
        If ranks make different calls.
    GroupError
        If torch.distributed is already initialised.

    Examples
    --------
    >>> import torch, varcomm as vc
    >>> from torch_geometric.data import Data
    >>> from torch_geometric.nn import SAGEConv
    >>> ring = torch.stack([torch.arange(64), torch.arange(64).roll(-1)])
    >>> parts = vc.simulate.partition(Data(x=torch.ones(64, 8), edge_index=ring), 16, "block")
    >>> def prepare(graph):
    ...     model = vc.graph.distribute(SAGEConv(8, 8), graph)
    ...     def step():
    ...         graph.sum(model(graph.x, graph.edge_index)).backward()
    ...         vc.data_parallel.sum_gradients(model)
    ...     return step
    >>> step = vc.simulate.step(prepare, parts, ranks=[0, 1])
    >>> step.sent.max(), max(step.fit.error.values()) < 1e-9
    (tensor(8612., dtype=torch.float64), True)
    """
    works = run(prepare, parts, ranks)
    return Step(parts, works, Fit.of([(parts, works)]), calls_of_all(parts, works))


def run(prepare: Prepare, parts: Parts, ranks: Sequence[int] | None = None) -> dict[int, Work]:
    """Return the work of a step on some ranks, which run one after the other."""
    if ranks is None:
        chosen = _representative(parts)
    else:
        chosen = [checked_rank(rank, parts.size, "ranks", "simulate.step: ") for rank in ranks]
        if not chosen:
            raise ArgumentError("simulate.step: ranks must name at least one rank.")
    works = {}
    for rank in chosen:
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
        sent, received = (flows.per_rank(end, parts.size) for end in (flows.sender, flows.receiver))
        ranks += [int(received.argmax()), int((sent - received).abs().argmax())]
    for counts in (parts.edges, parts.halo, parts.sent):
        ranks += [int(counts.argmax()), int(counts.argmin())]
    places = torch.linspace(0, parts.size - 1, _RANKS).round().long()
    ranks += parts.edges.argsort()[places].tolist()
    return list(dict.fromkeys(ranks))[: max(_RANKS, 2 * len(parts.flows))]
