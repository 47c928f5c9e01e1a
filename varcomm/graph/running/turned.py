"""Edges turned round: what layers need that gather at the source of an edge, not at its target.

A rank owns the edges into its nodes. For ``flow="target_to_source"`` each edge has to be where its
source is owned, together with the values that belong to it, and the halo is one of targets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from weakref import WeakKeyDictionary
from zlib import crc32

import torch

from varcomm.graph.running.edges import Edges, EdgeSet
from varcomm.graph.running.outside import outside_transforms
from varcomm.ops.all_to_all_v import all_to_all_v
from varcomm.ops.autograd import kept_from_compilation
from varcomm.plan.exchange_plan import ExchangePlan
from varcomm.transport.group import Group

__all__ = ["Meeting", "Turned", "TurnedEdges", "turned"]

# Tensors of edges whose turned ones are kept: those of a graph, and what a few layers make of them.
_KEPT = 4


@dataclass(frozen=True, eq=False)
class TurnedEdges:
    """Some edges of a graph, each at the owner of its source.

    Attributes
    ----------
    edges : Edges
        Turned round, from what was their target to what was their source.
    plan : ExchangePlan
        Takes values from where the edges were to where they are now; its adjoint takes them back.
    number : int
        Which of the turnings of these edges it is, the same on all ranks.
    """

    edges: Edges
    plan: ExchangePlan
    number: int


@dataclass(frozen=True)
class Meeting:
    """What ranks tell each other before they turn edges round.

    Attributes
    ----------
    turned : TurnedEdges
    on_all, on_some : tuple of bool
        Of each flag that the ranks brought, whether all of them, or some of them, raised it.
    """

    turned: TurnedEdges
    on_all: tuple[bool, ...]
    on_some: tuple[bool, ...]


@dataclass(eq=False)
class Turned:
    """How the edges of a graph, or any of them, are turned round.

    Who needs which targets is settled once. Of edges that are given later, in local numbers, two
    integers travel with each that goes to another rank: its source as its owner counts, and the
    place of its target in the halo there.

    Attributes
    ----------
    group : Group
        The ranks.
    targets : int
        Nodes that edges lead to, and that this rank owns: sources of the turned edges.
    rank_of_source, number_of_source : torch.Tensor
        For each local source of the edges the rank that owns it, and its number there.
    halo : ExchangePlan
        Gives the halo's rows of the owned targets' rows.
    sent : torch.Tensor
        What :attr:`halo` sends, as ``rank * targets + target``, ascending.
    """

    group: Group
    targets: int
    rank_of_source: torch.Tensor
    number_of_source: torch.Tensor
    halo: ExchangePlan
    sent: torch.Tensor
    _kept: list[tuple[torch.Tensor, int, TurnedEdges]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))

    @classmethod
    def of(cls, edges: EdgeSet) -> Turned:
        """Settle who needs which targets; collective."""
        group, sources, targets = edges.group, edges.num_sources, edges.num_targets
        device = edges.edge_index.device
        own = torch.arange(sources, device=device)
        number = torch.cat([own, edges.plan(own)])
        counts = torch.tensor(edges.plan.recv_counts, device=device)
        of_halo = torch.arange(group.size, device=device).repeat_interleave(counts)
        rank = torch.cat([torch.full_like(own, group.rank), of_halo])
        away = edges.edge_index[:, rank[edges.edge_index[0]] != group.rank]
        sent = (rank[away[0]] * targets + away[1]).unique()  # sorted
        per_rank = torch.bincount(sent // max(1, targets), minlength=group.size).tolist()
        indices = (sent % max(1, targets)).split(per_rank)
        halo = ExchangePlan.from_indices(indices, targets, group=group.process_group)
        return cls(group, targets, rank, number, halo, sent)

    def __call__(self, edge_index: torch.Tensor) -> TurnedEdges:
        """Turn edges round; collective. See :meth:`meet`."""
        return self.meet(edge_index, ()).turned

    @kept_from_compilation
    @outside_transforms
    def meet(self, edge_index: torch.Tensor, flags: Sequence[bool]) -> Meeting:
        """Turn edges round, and tell which flags the ranks raised; collective.

        Parameters
        ----------
        edge_index : torch.Tensor
            Edges of the graph, or self loops, in local numbers.
        flags : sequence of bool
            As many on every rank, at most 62.

        Notes
        -----
        Communication: three integers to each rank; and, unless every rank still has the same
        turning of the edges that it is given, two for each edge that goes to another rank.
        """
        found = self._find(edge_index)
        rank = self.rank_of_source[edge_index[0]]
        counts = torch.bincount(rank, minlength=self.group.size)
        bits = sum(flag << place for place, flag in enumerate(flags))
        mine = torch.tensor([found.number if found else 0, bits], device=counts.device)
        told = torch.cat([counts.view(-1, 1), mine.expand(self.group.size, 2)], dim=1)
        ones = [1] * self.group.size
        columns = all_to_all_v(told, ones, ones, group=self.group.process_group).T.tolist()
        recv_counts, numbers, of_ranks = columns
        if found is None or set(numbers) != {found.number}:
            # all ranks turn anew or none does, so they count alike
            number = next(self._numbers)
            found = self._turn(edge_index, rank, counts.tolist(), recv_counts, number)
            self._keep(edge_index, found)
        raised = [[bool(own >> place & 1) for own in of_ranks] for place in range(len(flags))]
        return Meeting(found, tuple(map(all, raised)), tuple(map(any, raised)))

    def _turn(
        self,
        edge_index: torch.Tensor,
        rank: torch.Tensor,
        send_counts: list[int],
        recv_counts: list[int],
        number: int,
    ) -> TurnedEdges:
        source, target = edge_index
        order = torch.sort(rank, stable=True).indices
        identity = crc32(repr((self.halo.identity, number)).encode())
        counts = tuple(send_counts), tuple(recv_counts)
        plan = ExchangePlan(self.group, order, *counts, edge_index.shape[1], identity)
        place = torch.searchsorted(self.sent, rank * self.targets + target)
        asked = torch.tensor(self.halo.send_counts, device=rank.device)
        place -= (asked.cumsum(0) - asked)[rank]
        mine = rank == self.group.rank
        ends = torch.stack([torch.where(mine, target, place), self.number_of_source[source]], dim=1)
        turned = plan(ends).T.contiguous()
        sent = torch.tensor(self.halo.recv_counts, device=rank.device)
        first = self.targets + sent.cumsum(0) - sent
        first[self.group.rank] = 0
        turned[0] += first.repeat_interleave(torch.tensor(recv_counts, device=rank.device))
        own = int((self.rank_of_source == self.group.rank).sum())
        return TurnedEdges(Edges(turned, self.halo, own), plan, number)

    def _find(self, edge_index: torch.Tensor) -> TurnedEdges | None:
        for kept, version, found in self._kept:
            if kept._version == version and (
                kept is edge_index
                or (kept.shape == edge_index.shape and torch.equal(kept, edge_index))
            ):
                return found
        return None

    def _keep(self, edge_index: torch.Tensor, found: TurnedEdges) -> None:
        # tensors of inference mode do not tell whether they have been written to
        if not edge_index.is_inference():
            others = [entry for entry in self._kept if entry[0] is not edge_index]
            self._kept[:] = [(edge_index, edge_index._version, found), *others][:_KEPT]


# As long as the edges live; whoever moves a model between two graphs does not settle them anew.
_known: WeakKeyDictionary[EdgeSet, Turned] = WeakKeyDictionary()


@kept_from_compilation
@outside_transforms
def turned(edges: EdgeSet) -> Turned:
    """Return how these edges are turned round; collective when it is first asked for."""
    if edges not in _known:
        _known[edges] = Turned.of(edges)
    return _known[edges]
