"""``all_reduce``: every rank gets the sum. It is its own adjoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch

from varcomm.ops import levels, packing
from varcomm.ops.carried import carrying
from varcomm.ops.checks import checking
from varcomm.ops.graph_operator import torch_operator
from varcomm.ops.handle import TensorOrHandle, collective
from varcomm.ops.levels import InRounds, Rounds
from varcomm.ops.reduction import checked_summable, pieces, sum_in_rank_order
from varcomm.ops.rule import Operator
from varcomm.transport.engine import Pending, Schedule
from varcomm.transport.group import MANY, Group, GroupLike, resolve


class Sum(Operator):
    """The sum of equal tensors over ranks, divided, on every rank or at `root`.

    Other ranks then get zeros of `elsewhere`. Subclasses make fields of these attributes.
    """

    use_fp32: bool
    one_round: bool
    root: int | None = None
    elsewhere: Sequence[int] = ()
    divisor: int = 1

    @property
    def in_one_round(self) -> Self:
        return replace(self, one_round=True)  # type: ignore[type-var]

    def prepared(self, x: torch.Tensor) -> Callable[[torch.Tensor], Pending]:
        group, root, elsewhere = self.group, self.root, self.elsewhere
        rank, ranks, count = group.rank, group.size, x.numel()
        counts = pieces(x, group, self.one_round and ranks < MANY)
        gets_sum = root in (None, rank)
        if counts is not None or ranks >= MANY:
            return partial(self._start_rounds, counts, gets_sum)
        others = [other != rank for other in range(ranks)]
        send = [count * (other and root in (None, to)) for to, other in enumerate(others)]
        recv = [count * (other and gets_sum) for other in others]
        schedule: Schedule = "copies" if root is None else "one"
        begin = packing.exchanger(self.name, group, x, send, recv, schedule)
        received = (ranks - 1 if gets_sum else 0, *x.shape)

        def start(x: torch.Tensor) -> Pending:
            own, got = packing.plain(x), x.new_empty(received)
            works = begin(got, own if root != rank else own.view(-1)[:0])  # a root sends nothing
            if not gets_sum:
                return Pending(works, lambda: x.new_zeros(elsewhere))
            parts = list(got.unbind())
            parts.insert(rank, own)
            return Pending(works, lambda: sum_in_rank_order(parts, self.use_fp32, self.divisor))

        return start

    def _start_rounds(
        self, counts: Sequence[int] | None, gets_sum: bool, x: torch.Tensor
    ) -> Pending:
        rounds = self._by_levels if self.group.size >= MANY else self._by_pieces
        shape = x.shape if gets_sum else (-1,)
        pending = InRounds(rounds(packing.flat(x), counts), shape, x.dtype)
        if not gets_sum:
            finish = pending.finish
            pending.finish = lambda: finish().new_zeros(self.elsewhere)
        return pending

    def _by_pieces(self, values: torch.Tensor, counts: Sequence[int] | None) -> Rounds:
        """Sum a piece on each rank; return the sum as one dimension, where it is wanted."""
        assert counts is not None
        name, group = self.name, self.group
        recv = [counts[group.rank]] * group.size
        works, got = packing.exchange(name, group, values, counts, recv)
        del values
        yield works
        del works  # they hold the sent tensor
        if len(got):
            got = sum_in_rank_order(got.view(group.size, -1), self.use_fp32, self.divisor)
        works, whole = packing.all_gather(name, group, got, counts, root=self.root)
        yield works
        return whole

    def _by_levels(self, values: torch.Tensor, counts: Sequence[int] | None) -> Rounds:
        """Sum level by level, all of few values on each rank; return it as `_by_pieces` does."""
        name, group, dtype = self.name, self.group, values.dtype
        if counts is None:
            rounds = levels.all_sum(name, group, values, self.use_fp32, self.root)
        else:
            order = levels.piece_order(group)
            sizes = [size for _, size in sorted(zip(order, counts, strict=True))]
            rounds = levels.reduce_scatter(name, group, values, sizes, order, self.use_fp32)
        del values  # which the rounds free after the first message
        total = yield from rounds
        total = (total if self.divisor == 1 else total.div_(self.divisor)).to(dtype)
        if counts is None:
            return total
        return (yield from levels.all_gather(name, group, total, sizes, self.root))


@torch_operator
@dataclass(frozen=True)
class AllReduce(Sum):
    """From a tensor on each rank to their sum, divided, on every rank."""

    name = "all_reduce"
    group: Group
    use_fp32: bool
    one_round: bool = False
    divisor: int = 1
    compares: bool = True  # the calls of ranks, if it is small

    def prepared(self, x: torch.Tensor) -> Callable[[torch.Tensor], Pending]:
        if not self.compares:
            return super().prepared(x)
        return carrying(self.group, super().prepared, x, self.divisor)

    def result(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(x.shape)

    @property
    def adjoint(self) -> Operator:
        return replace(self, one_round=False)

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
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None means the whole world.
    async_op : bool
        Return a :class:`~varcomm.Handle`; call its ``wait()``.

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
    There is no ``op``: for a maximum, use ``all_gather_v(x[None]).amax(0)``.

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


def _operator(ranks: Group, x: torch.Tensor, _: Sequence[int], use_fp32: bool) -> AllReduce:
    with checking("all_reduce", ranks, use_fp32=use_fp32) as where:
        checked_summable(x, where, use_fp32)
    return AllReduce(ranks, use_fp32)
