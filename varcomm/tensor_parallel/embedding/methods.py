"""How rows of a sharded vocabulary come to where their ids are: masked, or each row once.

Ids are flat here, int64, within the vocabulary; `padding` is the global id whose row has no
derivative, or None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from varcomm.errors import ArgumentError
from varcomm.ops.all_gather_v import all_gather_v
from varcomm.ops.autograd import apply
from varcomm.ops.reduce_scatter_v import reduce_scatter_v
from varcomm.ops.reduction import SMALL
from varcomm.ops.replicated import ReplicatedSum
from varcomm.plan.exchange_plan import ExchangePlan
from varcomm.sizes import ShardSizes
from varcomm.tensor_parallel.embedding.lookup import Lookup, looked_up
from varcomm.tensor_parallel.embedding.rows_of_all import RowsOfAll
from varcomm.transport.group import Group

__all__ = ["Table"]


@dataclass(frozen=True)
class Table:
    """A table that is sharded by ids, of which this rank has some rows."""

    weight: torch.Tensor
    sizes: ShardSizes
    padding: int | None
    group: Group

    def replicated(self, ids: torch.Tensor, method: str) -> torch.Tensor:
        """Return the rows of `ids`, which are the same on all ranks, on all of them."""
        if method == "masked":
            return apply(ReplicatedSum(self.group, use_fp32=True), self._masked(ids))
        distinct, places = ids.unique(return_inverse=True)
        ranks = self.group.size
        counts = torch.bincount(self.sizes.owner(distinct), minlength=ranks).tolist()
        if method == "auto" and self._sum_is_no_more(counts, len(ids)):
            return self.replicated(ids, "masked")
        mine = self.sizes.range(self.group.rank)
        first = sum(counts[: self.group.rank])
        own = distinct[first : first + counts[self.group.rank]]
        picked = Lookup(own - mine.start, None, len(mine), len(own), self._constant(own))
        return apply(RowsOfAll(self.group, tuple(counts), places), looked_up(self.weight, picked))

    def of_part(self, ids: torch.Tensor, parts: Sequence[int], method: str) -> torch.Tensor:
        """Return the rows of this rank's part of `ids`, which are the same on all ranks."""
        if self._is_masked(method):
            partial = self._masked(ids)
            return reduce_scatter_v(partial, parts, group=self.group.process_group)
        return self._received(*self._plan_of_part(ids, parts))

    def adjoint_of_part(
        self, ids: torch.Tensor, parts: Sequence[int], method: str, gradient: torch.Tensor
    ) -> torch.Tensor:
        """Return the gradient of own rows from that of what :meth:`of_part` gives."""
        if self._is_masked(method):
            rows = all_gather_v(gradient, parts, group=self.group.process_group)
            return self.of_own_ids(ids).slope.adjoint(rows)
        plan, own, places = self._plan_of_part(ids, parts)
        return plan.adjoint(self._repeated(plan, own, places).slope.adjoint(gradient))

    def _is_masked(self, method: str) -> bool:
        return method == "masked" or (method == "auto" and self.group.size == 1)

    def _plan_of_part(
        self, ids: torch.Tensor, parts: Sequence[int]
    ) -> tuple[ExchangePlan, torch.Tensor, torch.Tensor]:
        """Return how the rows travel, this rank's ids, and which of the rows is each one's."""
        tokens, rank, ranks = ShardSizes(parts), self.group.rank, self.group.size
        own = ids[tokens.offsets[rank] :][: tokens[rank]]
        needed, places = own.unique(return_inverse=True)
        # what others need of this rank's rows, requester by requester: each id once for each
        mine = self.sizes.range(rank)
        asked = torch.nonzero((ids >= mine.start) & (ids < mine.stop)).view(-1)
        width = max(self.sizes.total, 1)
        wanted = (tokens.owner(asked) * width + ids[asked]).unique()
        send = torch.bincount(wanted // width, minlength=ranks)
        recv = torch.bincount(self.sizes.owner(needed), minlength=ranks)
        send_counts, recv_counts = torch.stack([send, recv]).tolist()
        plan = ExchangePlan(
            self.group,
            wanted % width - mine.start,
            tuple(send_counts),
            tuple(recv_counts),
            len(mine),
        )
        return plan, own, places

    def of_own(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of `ids`, which are this rank's own; all ranks raise if one has to."""
        needed, places = ids.unique(return_inverse=True)
        try:
            plan = ExchangePlan.from_needed(needed, self.sizes, self.group.process_group)
        except ArgumentError as error:
            raise ArgumentError(
                f"vocab_parallel_embedding: the ids that a rank brings are wrong: {error}"
            ) from error
        return self._received(plan, ids, places)

    def _received(
        self, plan: ExchangePlan, ids: torch.Tensor, places: torch.Tensor
    ) -> torch.Tensor:
        return looked_up(plan(self.weight), self._repeated(plan, ids, places))

    def _repeated(self, plan: ExchangePlan, ids: torch.Tensor, places: torch.Tensor) -> Lookup:
        rows = sum(plan.recv_counts)
        return Lookup(places, None, rows, len(places), self._constant(ids))

    def _masked(self, ids: torch.Tensor) -> torch.Tensor:
        return looked_up(self.weight, self.of_own_ids(ids))

    def of_own_ids(self, ids: torch.Tensor) -> Lookup:
        """Return what gives the rows of own ids, and zeros for all others."""
        mine = self.sizes.range(self.group.rank)
        positions = torch.nonzero((ids >= mine.start) & (ids < mine.stop)).view(-1)
        own = ids[positions]
        everywhere = None if len(own) == len(ids) else positions
        return Lookup(own - mine.start, everywhere, len(mine), len(ids), self._constant(own))

    def _constant(self, ids: torch.Tensor) -> torch.Tensor | None:
        return None if self.padding is None else ids == self.padding

    def _sum_is_no_more(self, counts: Sequence[int], tokens: int) -> bool:
        """Tell whether summing makes the busiest rank send and receive no more than gathering."""
        ranks, distinct = self.group.size, sum(counts)
        gathering = max(max((ranks - 1) * own, distinct - own) for own in counts)
        nbytes = tokens * self.weight.shape[1] * self.weight.element_size()
        # the schedules of varcomm.ops.all_reduce
        by_pieces = ranks > 2 and nbytes > SMALL
        summing = 2 * tokens * (ranks - 1) / ranks if by_pieces else tokens * (ranks - 1)
        return summing <= gathering
