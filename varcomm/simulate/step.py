"""A training step on a partition: run as some of its ranks, told for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from varcomm.errors import ArgumentError
from varcomm.simulate.counts import Counts
from varcomm.simulate.fit import COUNTS, Fit
from varcomm.simulate.flows import Alike, Halo, Lanes, recognised
from varcomm.simulate.machine import Machine
from varcomm.simulate.parts import Parts
from varcomm.simulate.work import Work, count
from varcomm.simulate.world import world
from varcomm.sizes import checked_rank

if TYPE_CHECKING:  # which needs PyTorch Geometric
    from varcomm.graph.partitioned_graph import PartitionedGraph

__all__ = ["Prepare", "Step", "Times", "run", "step"]

# From a rank's part of the graph to what it does in a step.
Prepare = Callable[["PartitionedGraph"], Callable[[], object]]

# Ranks that are simulated where nobody says which.
_RANKS = 8


@dataclass(frozen=True)
class Times:
    """Seconds of a step on each rank; float64 tensors of shape (P,).

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
        """Of both, one after the other on each rank: nothing overlaps."""
        return torch.stack([self.compute, *self.communication.values()]).sum(dim=0)

    @property
    def step(self) -> float:
        """Of the slowest rank, for which the others wait."""
        return float(self.total.max())


@dataclass(frozen=True, eq=False)
class Step:
    """What a step does on every rank of a partition.

    Made by :func:`step`. What was counted on simulated ranks holds there exactly; on all others,
    operations, bytes and memory are linear in the rows that a rank owns, receives and sends, and
    transfers are those of the partition.

    Attributes
    ----------
    parts : Counts
        The partition.
    works : mapping of int to Work
        What was counted, by rank.
    fit : Fit
        The linear model, with its error.
    transfers : tuple of Halo and Alike
        The calls of a step, in their order.
    """

    parts: Counts
    works: Mapping[int, Work]
    fit: Fit = field(repr=False)
    transfers: tuple[Halo | Alike, ...] = field(repr=False)

    @cached_property
    def counts(self) -> Mapping[str, torch.Tensor]:
        """What each rank does and keeps, by the names in :class:`Work`; float64, shape (P,)."""
        found = self.fit.counts(self.parts)
        for rank, work in self.works.items():
            found[rank] = torch.tensor([float(getattr(work, name)) for name in COUNTS])
        return dict(zip(COUNTS, found.T, strict=True))

    @property
    def memory(self) -> torch.Tensor:
        """Bytes of tensors alive on each rank at the worst moment; float64, shape (P,)."""
        return self.counts["memory"]

    @cached_property
    def _sent(self) -> tuple[torch.Tensor, torch.Tensor]:
        messages, nbytes = torch.zeros(2, self.parts.size, dtype=torch.float64)
        for transfer in self.transfers:
            if isinstance(transfer, Halo):
                more = transfer.numbers(self._lanes(1)[transfer.edge_type])
            else:
                send = transfer.transfer.send
                more = (torch.tensor(float(sum(map(bool, send)))), torch.tensor(float(sum(send))))
            messages, nbytes = messages + more[0], nbytes + more[1]
        for rank, work in self.works.items():
            total = work.calls.total
            messages[rank], nbytes[rank] = total.messages_sent, total.sent
        return messages, nbytes

    @property
    def messages(self) -> torch.Tensor:
        """Messages that each rank sends; float64, shape (P,)."""
        return self._sent[0]

    @property
    def sent(self) -> torch.Tensor:
        """Bytes that each rank sends; float64, shape (P,)."""
        return self._sent[1]

    def times(self, machine: Machine) -> Times:
        """Return the seconds of the step on each rank of a machine."""
        compute = machine.compute(*(self.counts[name] for name in COUNTS if name != "memory"))
        lanes = self._lanes(machine.ranks_per_node)
        communication: dict[str, torch.Tensor] = {}
        alone = self.parts.size == 1
        for transfer in self.transfers:
            if alone:
                more = torch.zeros(1, dtype=torch.float64)
            elif isinstance(transfer, Halo):
                more = transfer.seconds(lanes[transfer.edge_type], machine)
            else:
                seconds = machine.transfer(transfer.transfer)
                more = torch.full((self.parts.size,), seconds, dtype=torch.float64)
            before = communication.get(transfer.name)
            communication[transfer.name] = more if before is None else before + more
        return Times(compute, communication)

    def _lanes(self, ranks_per_node: int) -> Mapping[Any, Lanes]:
        return {
            key: Lanes.of(flows, self.parts.size, ranks_per_node)
            for key, flows in self.parts.flows.items()
        }

    def __str__(self) -> str:
        """Return a table of the least, the mean and the most of all ranks."""
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
        cells: list[tuple[str, ...]] = [(f"{parts.size} ranks, a step", "least", "mean", "most")]
        for name, values in rows.items():
            numbers = values.double()
            cells.append(
                (name, *(_number(float(v)) for v in (numbers.min(), numbers.mean(), numbers.max())))
            )
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return "\n".join(
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
            for row in cells
        )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def step(prepare: Prepare, parts: Parts, ranks: Sequence[int] | None = None) -> Step:
    """Run a step as some ranks of a partition, one after the other, and tell what all ranks do.

    Parameters
    ----------
    prepare : callable
        Takes a rank's :class:`~varcomm.graph.PartitionedGraph`, makes its model, optimizer and
        data, and returns a function without arguments that does one step: the lines of a real run.
    parts : Parts
        The partition; its graph has the attributes that `prepare` uses.
    ranks : sequence of int, optional
        Which ranks to run. None takes up to eight: those with the most and the least edges, halo
        and rows to send, and some between. Each takes the time and the memory of a rank.

    Returns
    -------
    Step
        Of all ranks.

    Raises
    ------
    ArgumentError
        If `ranks` are none of the partition's, or do not tell what others exchange.
    DisagreementError
        If ranks make different calls.
    GroupError
        If torch.distributed is initialised already.

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
    return Step(parts, works, Fit.of([(parts, works)]), recognised(parts, works))


def run(prepare: Prepare, parts: Parts, ranks: Sequence[int] | None = None) -> dict[int, Work]:
    """Return what a step does as each of some ranks, which run one after the other."""
    if ranks is None:
        chosen = _telling(parts)
    else:
        chosen = [checked_rank(rank, parts.size, "ranks", "simulate.step: ") for rank in ranks]
        if not chosen:
            raise ArgumentError("simulate.step: ranks must name one rank at least.")
    works = {}
    for rank in chosen:
        with world(parts.size, rank):
            one = prepare(parts.part())
            one()  # what the first time makes, as the state of an optimizer, is there from then on
            works[rank] = count(one)
            del one
    return works


def _telling(parts: Parts) -> list[int]:
    """Return ranks that tell much about the others."""
    # of each halo a rank that has rows, and one that tells what goes out from what comes back
    ranks = []
    for flows in parts.flows.values():
        sent, received = (
            torch.zeros(parts.size, dtype=torch.int64).index_add_(0, end, flows.rows)
            for end in (flows.sender, flows.receiver)
        )
        ranks += [int(received.argmax()), int((sent - received).abs().argmax())]
    for counts in (parts.edges, parts.halo, parts.sent):
        ranks += [int(counts.argmax()), int(counts.argmin())]
    order = parts.edges.argsort()
    places = torch.linspace(0, parts.size - 1, _RANKS).round().long()
    ranks += order[places].tolist()
    return list(dict.fromkeys(ranks))[: max(_RANKS, 2 * len(parts.flows))]
