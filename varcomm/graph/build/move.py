"""``Move``: rows that leave for other ranks, and rows that arrive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch

from varcomm.ops.packing import signed, taken
from varcomm.plan.exchange_plan import ExchangePlan
from varcomm.transport.group import Group


@dataclass(frozen=True, eq=False)
class Move:
    """Rows of one kind that leave for other ranks, and rows that arrive and are merged by id.

    For example, 20 leaves of ids 10, 20, 30, and 15 and 40 arrive: new `ids` are 10, 15, 30, 40.
    Arriving rows, in the order `arrival`, stand at the positions `at`, 1 and 3. The rows `kept`, 0
    and 2, stand at the other positions; `origin` is 0, 0, 2, 0, the old position of kept rows.
    """

    plan: ExchangePlan
    arrival: torch.Tensor
    at: torch.Tensor
    kept: torch.Tensor
    origin: torch.Tensor
    ids: torch.Tensor

    @classmethod
    def to(
        cls,
        owner: torch.Tensor,
        ids: torch.Tensor,
        group: Group,
        into: torch.Tensor | None = None,
    ) -> Self:
        """Plan the move of rows with these ids, ascending, to new ranks; collective.

        `owner` holds the rank of each row; with `into`, the rank of each node, and the node of each
        row.
        """
        leaves = owner != group.rank
        leaves = leaves if into is None else leaves.index_select(0, into)
        gone, kept = leaves.nonzero().view(-1), (~leaves).nonzero().view(-1)
        ranks = owner[gone if into is None else into[gone]]
        counts = torch.bincount(ranks, minlength=group.size).tolist()
        leaving = gone[torch.sort(ranks, stable=True).indices]
        plan = ExchangePlan.from_indices(leaving.split(counts), len(ids), group=group.process_group)
        arrived, arrival = plan(ids).sort()
        before = torch.searchsorted(ids, arrived)
        before -= torch.searchsorted(gone, before)  # kept rows before each arriving one
        at = before + torch.arange(len(arrived), device=ids.device)
        stays = torch.ones(len(kept) + len(at), dtype=torch.bool, device=ids.device)
        stays[at] = False
        origin = torch.zeros_like(stays, dtype=torch.int32).masked_scatter_(stays, kept.int())
        new_ids = torch.empty_like(stays, dtype=torch.int64).index_copy_(0, at, arrived)
        return cls(plan, arrival, at, kept, origin, new_ids.masked_scatter_(stays, ids[kept]))

    def row(self, row: torch.Tensor) -> torch.Tensor:
        """Return the new rows of an attribute, (new rows, *F), from the old ones; collective."""
        arriving = taken(self.plan(row), self.arrival)
        if not len(self.kept):
            return arriving
        out = _settable(row.resolve_conj().resolve_neg()).index_select(0, self.origin)
        return out.index_copy_(0, self.at, _settable(arriving)).view(row.dtype)

    def rows(self, rows: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the new rows of attributes by name; collective."""
        return {name: self.row(value) for name, value in rows.items()}

    def numbers(self, first: int) -> torch.Tensor:
        """Return the new global numbers of the old rows; `first` is the first new number."""
        arrived = torch.empty_like(self.at)
        arrived[self.arrival] = self.at + first
        numbers = self.plan.adjoint(arrived)
        stays = torch.ones_like(self.origin, dtype=torch.bool).index_fill_(0, self.at, False)
        numbers[self.kept] = stays.nonzero().view(-1) + first
        return numbers


def _settable(rows: torch.Tensor) -> torch.Tensor:
    """Return a view of a dtype of which torch can set rows, unlike unsigned ones and float8."""
    return rows.view(torch.int8) if rows.element_size() == 1 else signed(rows)
