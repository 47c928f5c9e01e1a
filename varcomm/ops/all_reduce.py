"""``all_reduce``: every rank gets the sum. It is its own adjoint."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, Self, overload

import torch

from varcomm.ops import packing
from varcomm.ops.handle import Handle, run
from varcomm.ops.operator import Operator, checking, torch_operator
from varcomm.ops.reduction import checked_summable, pieces, sum_in_rank_order
from varcomm.transport.engine import Pending
from varcomm.transport.group import Group, GroupLike, resolve

__all__ = ["AllReduce", "all_reduce"]


@torch_operator
@dataclass(frozen=True)
class AllReduce(Operator):
    """From a tensor on each rank to the sum of all on every rank."""

    name = "all_reduce"
    group: Group
    use_fp32: bool
    one_round: bool = False

    def start(self, x: torch.Tensor) -> Pending:
        values, ranks, into = packing.flat(x), self.group.size, packing.memory_format(x)
        counts = pieces(x, self.group, self.one_round)
        if counts is None:
            works, wholes = packing.all_gather(self.name, self.group, values, [x.numel()] * ranks)
            parts = wholes.view(ranks, *x.shape)
            return Pending(
                works,
                lambda: sum_in_rank_order(parts, self.use_fp32).contiguous(memory_format=into),
            )
        mine = counts[self.group.rank]
        works, got = packing.exchange(self.name, self.group, values, counts, [mine] * ranks)

        def finish() -> torch.Tensor:
            piece = sum_in_rank_order(got.view(ranks, mine), self.use_fp32)
            works, total = packing.all_gather(self.name, self.group, piece, counts)
            return Pending(works, lambda: total.view(x.shape).contiguous(memory_format=into)).wait()

        return Pending(works, finish)

    def result(self, x: torch.Tensor) -> torch.Tensor:
        return packing.new(x, x.shape)

    @property
    def adjoint(self) -> Operator:
        return AllReduce(self.group, self.use_fp32)

    @property
    def in_one_round(self) -> Self:
        return replace(self, one_round=True)

    def describe(self, x: torch.Tensor) -> dict[str, Any]:
        how = {"use_fp32": self.use_fp32, "async_op": self.one_round}
        return {"shape": list(x.shape), **how}


@overload
def all_reduce(
    tensor: torch.Tensor,
    use_fp32: bool = True,
    group: GroupLike = None,
    *,
    async_op: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def all_reduce(
    tensor: torch.Tensor,
    use_fp32: bool = True,
    group: GroupLike = None,
    *,
    async_op: Literal[True],
) -> Handle: ...
def all_reduce(
    tensor: torch.Tensor,
    use_fp32: bool = True,
    group: GroupLike = None,
    *,
    async_op: bool = False,
) -> torch.Tensor | Handle:
    """Sum tensors of all ranks, on every rank.

    Parameters
    ----------
    tensor : torch.Tensor
        The same shape and dtype on all ranks, any but bool. It is not changed.
    use_fp32 : bool
        Sum floats narrower than 4 bytes in fp32 and round once.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None is the whole world.
    async_op : bool
        Return a :class:`~varcomm.Handle`; call its ``wait()``.

    Returns
    -------
    torch.Tensor or Handle
        The sum, a new tensor of the shape, dtype and memory format of `tensor`; the same on all
        ranks, bit for bit.

    Raises
    ------
    ArgumentError
        Before any communication, if `tensor` cannot be summed.
    GroupError
        If this rank is not in `group`, or the group has no engine for the tensor's device.

    Notes
    -----
    Adjoint: :func:`all_reduce` itself. The gradients of all ranks are summed, since each rank's
    result depends on every rank's input: a loss that all ranks compute alike from the result counts
    once a rank.

    Communication: each rank sums a piece of ``1 / P`` and sends it to the others, so that each
    sends and receives ``2 (P - 1) / P`` times the bytes of `tensor`. Up to 16 KiB, and with
    `async_op`, each sums all, in a single round: ``P - 1`` times.

    In one process: ``sum(tensors)``.

    Examples
    --------
    >>> import torch, varcomm
    >>> varcomm.launch(lambda rank: varcomm.all_reduce(torch.tensor([rank, 10])), 3)
    [tensor([ 3, 30]), tensor([ 3, 30]), tensor([ 3, 30])]
    """
    ranks = resolve(group)
    with checking("all_reduce", ranks, use_fp32=use_fp32, async_op=async_op) as where:
        checked_summable(tensor, where, use_fp32)
    return run(AllReduce(ranks, use_fp32), tensor, async_op)
