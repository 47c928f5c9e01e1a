"""Sum of a flat tensor over ranks, in two rounds of messages."""

from __future__ import annotations

import torch

from varcomm.ops import packing
from varcomm.ops.reduction import SMALL, accumulated
from varcomm.sizes import ShardSizes
from varcomm.transport.agreement import compare, debugging
from varcomm.transport.engine import Pending, span
from varcomm.transport.failure import explained
from varcomm.transport.group import Group

__all__ = ["BucketSum"]


class BucketSum:
    """A sum in flight; the same on all ranks, bit for bit.

    Each rank sums a piece of ``1 / P`` in rank order, divides the piece, and sends it to the other
    ranks: ``2 (P - 1) / P`` of the bytes of `flat`. Up to 16 KiB, one round takes less time. The
    caller begins the second round, because an asynchronous :func:`varcomm.all_reduce` cannot.

    `flat`, of shape (N,) on all ranks, must not change before the sum is complete. All ranks make
    the same calls in the same order.
    """

    def __init__(self, flat: torch.Tensor, group: Group, use_fp32: bool = True) -> None:
        self._group, self._use_fp32 = group, use_fp32
        self._pieces: ShardSizes | None = None
        ranks, self._numbers = group.size, flat.numel()
        self._own = range(self._numbers)
        if ranks > 1 and flat.nbytes > SMALL:
            self._pieces = ShardSizes.balanced(self._numbers, ranks)
            self._own = self._pieces.range(group.rank)
        counts = [len(self._own)] * ranks
        name = "all_reduce" if self._pieces is None else "reduce_scatter_v"
        self._compare(name, flat)
        self._explained = explained(name, group)
        with span(name), self._explained:
            if self._pieces is None:
                works, parts = packing.all_gather(name, group, flat, counts)
            else:
                works, parts = packing.exchange(name, group, flat, self._pieces, counts)
        self._pending = Pending(works, lambda: parts.view(ranks, len(self._own)))

    def begin_second_round(self, divisor: int = 1, undivided: int = 0) -> None:
        """Wait for this rank's piece, and begin to send its sum.

        The sum is divided by `divisor`, except its last `undivided` numbers.
        """
        with self._explained:
            parts = self._pending.wait()
        total = accumulated(parts, self._use_fp32)
        if divisor != 1:
            total[: max(0, self._numbers - undivided - self._own.start)] /= divisor
        total = total.to(parts.dtype)
        if self._pieces is None:
            self._pending = Pending([], lambda: total)
            return
        name = "all_gather_v"
        self._compare(name, total)
        self._explained = explained(name, self._group)
        with span(name), self._explained:
            works, out = packing.all_gather(name, self._group, total, self._pieces)
        self._pending = Pending(works, lambda: out)

    def wait(self) -> torch.Tensor:
        """Return the sum; after :meth:`begin_second_round`."""
        with self._explained:
            return self._pending.wait()

    def _compare(self, name: str, values: torch.Tensor) -> None:
        if debugging():
            how = {"dtype": str(values.dtype), "use_fp32": self._use_fp32}
            compare(self._group, {"operation": name, "numbers": self._numbers, **how})
