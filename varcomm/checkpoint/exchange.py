"""Rows by their numbers, to the ranks that write them and back from those that have read them."""

from __future__ import annotations

import torch

from varcomm.checkpoint.agreement import rows_of
from varcomm.checkpoint.kinds import Rows
from varcomm.checkpoint.together import Ranks, agree
from varcomm.errors import ArgumentError
from varcomm.plan.exchange_plan import ExchangePlan
from varcomm.sharding import Box, Sharded
from varcomm.sizes import ShardSizes
from varcomm.transport.group import Group

__all__ = ["Fetch", "in_order"]

# torch can neither index the left ones nor send them; the right ones have the same bits.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def in_order(what: str, key: str, rows: Rows, ranks: Ranks) -> Sharded:
    """Return this rank's block of the whole, in its order; collective.

    Raises
    ------
    ArgumentError
        On every rank, if a row of the whole is on no rank, or on several.
    """
    block = rows_of(rows.total, ranks.rank, ranks.size)
    ids, tensor = rows.ids, _movable(rows.tensor)
    if isinstance(ranks, Group):
        sizes = ShardSizes.balanced(rows.total, ranks.size)
        owner = sizes.owner(ids)
        order = owner.argsort(stable=True)
        counts = owner.bincount(minlength=ranks.size).tolist()
        plan = ExchangePlan.from_indices(order.split(counts), len(ids), group=ranks.process_group)
        with torch.no_grad():
            ids, tensor = plan(ids), plan(tensor)

    def check() -> None:
        copies = (ids - block.start).bincount(minlength=len(block))
        if bool((copies != 1).any()):
            row = int((copies != 1).nonzero()[0])
            raise ArgumentError(
                f"{key!r}: row {block.start + row} of {rows.total} is given "
                f"{int(copies[row])} times by all ranks together. The ids of Rows must have each "
                "row once."
            )

    agree(what, check, ranks)
    whole = torch.empty_like(tensor)
    whole[ids - block.start] = tensor
    return _block(rows, block, whole.view(rows.tensor.dtype))


class Fetch:
    """Rows that are read block by block and go to the ranks that want them; collective."""

    def __init__(self, rows: Rows, ranks: Ranks) -> None:
        self._rows = rows
        block = rows_of(rows.total, ranks.rank, ranks.size)
        self._order = rows.ids.argsort(stable=True)
        wanted = rows.ids[self._order]
        self._plan = (
            ExchangePlan.from_needed(
                wanted,
                ShardSizes.balanced(rows.total, ranks.size),
                group=ranks.process_group,
            )
            if isinstance(ranks, Group)
            else None
        )
        self._block = rows.tensor.new_empty((len(block), *rows.tensor.shape[1:]))
        self.target = _block(rows, block, self._block)

    def finish(self) -> None:
        """Send what has been read into `target` to where it belongs; collective."""
        block, target = _movable(self._block), _movable(self._rows.tensor)
        with torch.no_grad():
            if self._plan is None:
                target.copy_(block[self._rows.ids])
            else:
                target[self._order] = self._plan(block)


def _movable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_SIGNED.get(tensor.dtype, tensor.dtype))


def _block(rows: Rows, block: range, tensor: torch.Tensor) -> Sharded:
    shape = (rows.total, *rows.tensor.shape[1:])
    at = (block.start, *(0,) * (len(shape) - 1))
    return Sharded(shape, [Box(at, tensor)], tensor.dtype)
