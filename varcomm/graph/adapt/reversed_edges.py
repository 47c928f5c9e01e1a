"""Reversed edges, each at the owner of its source: for layers that also gather there."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from varcomm.graph.adapt.shard_context import untransformed
from varcomm.graph.edge_shard import LocalEdges
from varcomm.ops.all_to_all_v import all_to_all_v
from varcomm.ops.compilation import kept_from_compilation
from varcomm.plan.exchange_plan import ExchangePlan

__all__ = ["reversed_edges"]


@kept_from_compilation
def reversed_edges(edges: LocalEdges, edge_index: torch.Tensor) -> LocalEdges:
    """Reverse some of these edges; collective.

    Communication: two integers to each rank; and, unless every rank still has the reversed edges of
    an equal `edge_index`, two for each edge that goes to another rank. At the first call, ids of
    the nodes that edges between ranks connect.
    """
    found: list[LocalEdges] = []

    def reverse(edge_index: torch.Tensor) -> None:
        # kept with the edges, as long as these live
        if "_reversal" not in vars(edges):
            vars(edges)["_reversal"] = _Reversal.of(edges)
        found.append(vars(edges)["_reversal"](edge_index))

    untransformed(edge_index, reverse)
    return found[0]


@dataclass(eq=False)
class _Reversal:
    """The ranks that need targets of some edges, settled once, and the last reversed edges.

    Attributes
    ----------
    targets : int
        Owned nodes that edges lead to: sources of the reversed edges.
    owner, owner_id : torch.Tensor
        For each local source of the edges its owner, and its local id there.
    halo : ExchangePlan
        Returns the halo's rows from the owned targets' rows.
    sent : torch.Tensor
        The rows that `halo` sends, as ``rank * targets + target``, ascending.
    """

    targets: int
    owner: torch.Tensor
    owner_id: torch.Tensor
    halo: ExchangePlan
    sent: torch.Tensor
    # the last edges, their version, their number, and the reversed ones
    _last: tuple[torch.Tensor, int, int, LocalEdges] | None = None
    _number: int = field(default=0)

    @classmethod
    def of(cls, edges: LocalEdges) -> _Reversal:
        """Settle which ranks need which targets; collective."""
        group, sources, targets = edges.plan.group, edges.num_sources, edges.num_targets
        device = edges.edge_index.device
        own = torch.arange(sources, device=device)
        counts = torch.tensor(edges.plan.recv_counts, device=device)
        of_halo = torch.arange(group.size, device=device).repeat_interleave(counts)
        owner = torch.cat([torch.full_like(own, group.rank), of_halo])
        away = edges.edge_index[:, owner[edges.edge_index[0]] != group.rank]
        sent = (owner[away[0]] * targets + away[1]).unique()  # sorted
        per_rank = torch.bincount(sent // max(1, targets), minlength=group.size).tolist()
        indices = (sent % max(1, targets)).split(per_rank)
        halo = ExchangePlan.from_indices(indices, targets, group=group.process_group)
        return cls(targets, owner, edges.with_halo(own), halo, sent)

    def __call__(self, edge_index: torch.Tensor) -> LocalEdges:
        """Return reversed edges, anew unless all ranks have kept them; collective."""
        group, owner = self.halo.group, self.owner[edge_index[0]]
        counts = torch.bincount(owner, minlength=group.size)
        kept = self._last if self._is_last(edge_index) else None
        number = torch.full_like(counts, kept[2] if kept else 0)
        ones = [1] * group.size
        sent = torch.stack([counts, number], dim=1)
        received = all_to_all_v(sent, ones, ones, group=group.process_group)
        recv_counts, numbers = received.T.tolist()
        if kept is not None and set(numbers) == {kept[2]}:
            return kept[3]
        found = self._reverse(edge_index, owner, counts.tolist(), recv_counts)
        self._number += 1  # on all ranks, so that they count alike
        # tensors of inference mode have no version
        if edge_index.is_inference():
            self._last = None
        else:
            self._last = edge_index, edge_index._version, self._number, found
        return found

    def _is_last(self, edge_index: torch.Tensor) -> bool:
        if self._last is None:
            return False
        last, version = self._last[:2]
        same = last is edge_index or (
            last.shape == edge_index.shape and torch.equal(last, edge_index)
        )
        return same and last._version == version

    def _reverse(
        self,
        edge_index: torch.Tensor,
        owner: torch.Tensor,
        send_counts: list[int],
        recv_counts: list[int],
    ) -> LocalEdges:
        group, (source, target) = self.halo.group, edge_index
        # on another rank a target is known by its place in the halo there
        place = torch.searchsorted(self.sent, owner * self.targets + target)
        asked = torch.tensor(self.halo.send_counts, device=owner.device)
        place -= (asked.cumsum(0) - asked)[owner]
        place = torch.where(owner == group.rank, target, place)
        ends = torch.stack([place, self.owner_id[source]], dim=1)
        ends = ends[torch.sort(owner, stable=True).indices]
        pg = group.process_group
        reverse = all_to_all_v(ends, send_counts, recv_counts, group=pg).T.contiguous()
        counts = torch.tensor(self.halo.recv_counts, device=owner.device)
        first = self.targets + counts.cumsum(0) - counts
        first[group.rank] = 0
        received = torch.tensor(recv_counts, device=owner.device)
        reverse[0] += first.repeat_interleave(received)
        owned = int((self.owner == group.rank).sum())
        return LocalEdges(reverse, self.halo, owned)
