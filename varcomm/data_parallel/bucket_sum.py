"""The sum of a flat tensor over ranks, under way in the background, in two rounds."""

from __future__ import annotations

import torch

from varcomm.layout import ShardSizes
from varcomm.ops.all_gather_v import all_gather_v
from varcomm.ops.all_reduce import all_reduce
from varcomm.ops.handle import Handle
from varcomm.ops.reduce_scatter_v import reduce_scatter_v
from varcomm.ops.reduction import SMALL
from varcomm.transport.group import Group

__all__ = ["BucketSum"]


class BucketSum:
    """A sum that is begun now; the same on all ranks, bit for bit.

    Each rank sums a piece of ``1 / P``, and then sends it to the others. An asynchronous
    :func:`varcomm.all_reduce` cannot do so, since nobody would begin its second round, and takes
    ``P - 1`` times the bytes in place of ``2 (P - 1) / P``; here the caller begins it. On two
    ranks that is the same, but each adds half as much. Up to 16 KiB one round is less time.

    Parameters
    ----------
    flat : torch.Tensor
        Shape (N,), the same on all ranks. It must not change before the sum is there.
    group : Group
        The ranks that sum. All make the same calls in the same order.
    """

    def __init__(self, flat: torch.Tensor, group: Group) -> None:
        self._group = group.process_group
        self._pieces: ShardSizes | None = None
        self._handle: Handle
        if group.size == 1 or flat.nbytes <= SMALL:
            self._handle = all_reduce(flat, group=self._group, async_op=True)
        else:
            self._pieces = ShardSizes.balanced(flat.numel(), group.size)
            self._handle = reduce_scatter_v(flat, self._pieces, group=self._group, async_op=True)

    def begin_second_round(self) -> None:
        """Wait for this rank's piece and begin to send it, where there are pieces."""
        if self._pieces is not None:
            piece = self._handle.wait()
            self._handle = all_gather_v(piece, self._pieces, group=self._group, async_op=True)

    def wait(self) -> torch.Tensor:
        """Return the sum; after :meth:`begin_second_round`."""
        return self._handle.wait()
