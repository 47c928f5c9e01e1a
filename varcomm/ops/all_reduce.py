"""``all_reduce``: every rank gets the sum. It is its own adjoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch

from varcomm.ops import levels, packing
from varcomm.ops.checks import checking
from varcomm.ops.graph_operator import torch_operator
from varcomm.ops.handle import TensorOrHandle, collective
from varcomm.ops.levels import InRounds, Rounds, all_gather
from varcomm.ops.reduction import checked_summable, pieces, sum_in_rank_order
from varcomm.ops.rule import Operator
from varcomm.transport.engine import Pending
from varcomm.transport.group import MANY, Group, GroupLike, resolve


def prepared_sum(
    name: str,
    group: Group,
    x: torch.Tensor,
    use_fp32: bool,
    one_round: bool,
    root: int | None = None,
    elsewhere: Sequence[int] = (),
    divisor: int = 1,
) -> Callable[[torch.Tensor], Pending]:
    """Return the start of sums over ranks of tensors like `x`, on every rank or at `root`.

    Others then get zeros of `elsewhere`.
    """
    rank, ranks, count = group.rank, group.size, x.numel()
    counts, gets_sum = pieces(x, group, one_round and ranks < MANY), root in (None, rank)

    how = use_fp32, root, divisor
    rounds: Callable[[torch.Tensor], Rounds] | None = None
    if ranks >= MANY:
        rounds = partial(_by_levels, name, group, counts, *how)
    elif counts is not None:
        rounds = partial(_by_pieces, name, group, counts, *how)
    if rounds is not None:
        return partial(_in_rounds, rounds, gets_sum, elsewhere)
    others = [other != rank for other in range(ranks)]
    send = [count * (other and root in (None, to)) for to, other in enumerate(others)]
    recv = [count * (other and gets_sum) for other in others]
    begin = packing.exchanger(name, group, x, send, recv, "copies" if root is None else "one")
    received = (ranks - 1 if gets_sum else 0, *x.shape)

    def start(x: torch.Tensor) -> Pending:
        own, got = packing.plain(x), x.new_empty(received)
        works = begin(got, own if root != rank else own.view(-1)[:0])  # a root sends nothing
        if not gets_sum:
            return Pending(works, lambda: x.new_zeros(elsewhere))
        parts = list(got.unbind())
        parts.insert(rank, own)
        return Pending(works, lambda: sum_in_rank_order(parts, use_fp32, divisor))

    return start


def _in_rounds(
    rounds: Callable[[torch.Tensor], Rounds],
    gets_sum: bool,
    elsewhere: Sequence[int],
    x: torch.Tensor,
) -> Pending:
    pending = InRounds(rounds(packing.flat(x)), x.shape if gets_sum else (-1,), x.dtype)
    if not gets_sum:
        finish = pending.finish
        pending.finish = lambda: finish().new_zeros(elsewhere)
    return pending


def _by_pieces(
    name: str,
    group: Group,
    counts: Sequence[int],
    use_fp32: bool,
    root: int | None,
    divisor: int,
    values: torch.Tensor,
) -> Rounds:
    """Sum a piece on each rank; return the sum as one dimension, on every rank or at `root`."""
    ranks = group.size
    works, got = packing.exchange(name, group, values, counts, [counts[group.rank]] * ranks)
    del values
    yield works
    del works  # they hold the sent tensor
    if len(got):
        got = sum_in_rank_order(got.view(ranks, -1), use_fp32, divisor)
    works, whole = packing.all_gather(name, group, got, counts, root=root)
    yield works
    return whole


def _by_levels(
    name: str,
    group: Group,
    counts: Sequence[int] | None,
    use_fp32: bool,
    root: int | None,
    divisor: int,
    values: torch.Tensor,
) -> Rounds:
    """Sum level by level, all of few values on each rank; return the sum as `_by_pieces` does."""
    dtype = values.dtype
    if counts is None:
        rounds = levels.all_sum(name, group, values, use_fp32, root)
    else:
        order = levels.piece_order(group)
        sizes = [size for _, size in sorted(zip(order, counts, strict=True))]
        rounds = levels.reduce_scatter(name, group, values, sizes, order, use_fp32)
    del values  # which the rounds free after the first message
    total = yield from rounds
    total = (total if divisor == 1 else total.div_(divisor)).to(dtype)
    return total if counts is None else (yield from all_gather(name, group, total, sizes, root))


@torch_operator
@dataclass(frozen=True)
class AllReduce(Operator):
    """From a tensor on each rank to their sum, divided, on every rank."""

    name = "all_reduce"
    group: Group
    use_fp32: bool
    one_round: bool = False
    divisor: int = 1

    def prepared(self, x: torch.Tensor) -> Callable[[torch.Tensor], Pending]:
        how = self.use_fp32, self.one_round
        return prepared_sum(self.name, self.group, x, *how, divisor=self.divisor)

    def result(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(x.shape)

    @property
    def adjoint(self) -> Operator:
        return replace(self, one_round=False)

    @property
    def in_one_round(self) -> Self:
        return replace(self, one_round=True)

    def describe(self, x: torch.Tensor) -> dict[str, Any]:
        return super().describe(x) | {"shape": list(x.shape)}


def all_reduce(
    tensor: torch.Tensor,
    use_fp32: bool = True,
    group: GroupLike = None,
    *,
    async_op: bool = False,
) -> TensorOrHandle:
    """Sum tensors of all ranks, on every rank.

    Parameters
    ----------
    tensor : torch.Tensor
        The same shape and dtype on all ranks; bool is refused. The input is not changed.
    use_fp32 : bool
        Sum floats narrower than 4 bytes in fp32 and round once.
    group, async_op
        As in :func:`all_gather_v`.

    Returns
    -------
    torch.Tensor or Handle
        A new tensor of the shape and dtype of `tensor`; the same bits on all ranks.

    Raises
    ------
    ArgumentError
        If an argument is wrong: on this rank, before any message.

    See Also
    --------
    reduce, reduce_scatter_v, varcomm.data_parallel.sum_gradients

    Notes
    -----
    Adjoint: :func:`all_reduce` itself. A loss that all ranks compute identically from the result
    counts once per rank.
    Communication: each rank sums a piece of ``1 / P`` and sends it to the other ranks: ``2 (P - 1)
    / P`` times the bytes of `tensor`. Up to 16 KiB, and with `async_op`, each rank sums all pieces
    in one round: ``P - 1`` times the bytes. From 16 ranks on, the sum is hierarchical, as in
    :func:`reduce_scatter_v`, with `async_op` too. Up to 16 KiB, each of the ``k`` ranks of a level
    sums all pieces: ``k - 1`` times the bytes. These small sums are equal bit for bit on processors
    of one kind.
    In one process: ``sum(tensors)``.

    Examples
    --------
    >>> import torch, varcomm
    >>> varcomm.launch(lambda rank: varcomm.all_reduce(torch.tensor([rank, 10])), 3)
    [tensor([ 3, 30]), tensor([ 3, 30]), tensor([ 3, 30])]
    """
    return collective(_operator, resolve(group), tensor, (), (use_fp32,), async_op)


def _operator(
    ranks: Group, x: torch.Tensor, _: Sequence[int], use_fp32: bool, async_op: bool
) -> AllReduce:
    with checking("all_reduce", ranks, use_fp32=use_fp32, async_op=async_op) as where:
        checked_summable(x, where, use_fp32)
    return AllReduce(ranks, use_fp32)
