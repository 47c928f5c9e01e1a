"""``all_to_all_v``: every rank sends rows to every other; and ``transpose_v``, along two dims."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Self

import torch

from varcomm.errors import ArgumentError
from varcomm.ops import packing
from varcomm.ops.checks import checked_shard, checked_whole, checking
from varcomm.ops.graph_operator import torch_operator
from varcomm.ops.handle import TensorOrHandle, collective, start_or_apply
from varcomm.ops.rule import Operator
from varcomm.sizes import checked_sizes
from varcomm.transport.engine import Pending
from varcomm.transport.group import Group, GroupLike, resolve


@torch_operator
@dataclass(frozen=True)
class AllToAllV(Operator):
    """Split along one dimension, send block r to rank r, concatenate along the same or another."""

    name: ClassVar[str] = "all_to_all_v"
    group: Group
    split_dim: int
    split_sizes: tuple[int, ...]
    concat_dim: int
    concat_sizes: tuple[int, ...]

    def prepared(self, x: torch.Tensor) -> Callable[[torch.Tensor], Pending]:
        """Send blocks whose rows are along `concat_dim`, so that received blocks need no copy."""
        dim, split_sizes, split = self.concat_dim, self.split_sizes, 0
        if self.split_dim != dim:  # its place once `concat_dim` is the first
            split = self.split_dim + (self.split_dim < dim)
        shape = (x.shape[dim], *packing.rest(x.shape, dim))
        send = [rows * prod(packing.rest(shape, split)) for rows in split_sizes]
        kept = packing.like(shape, split, split_sizes[self.group.rank])[1:]
        recv = [rows * prod(kept) for rows in self.concat_sizes]
        received = (sum(self.concat_sizes), *kept)
        begin = packing.exchanger(self.name, self.group, x, send, recv)

        def start(x: torch.Tensor) -> Pending:
            out = x.new_empty(received)
            works = begin(out, packing.pack(x.movedim(dim, 0) if dim else x, split_sizes, split))
            return Pending(works, lambda: packing.back(out, dim))

        return start

    def result(self, x: torch.Tensor) -> torch.Tensor:
        kept = packing.like(x.shape, self.split_dim, self.split_sizes[self.group.rank])
        rows = packing.like(kept, self.concat_dim, sum(self.concat_sizes))
        front = x.new_empty(rows[self.concat_dim], *packing.rest(rows, self.concat_dim))
        return packing.back(front, self.concat_dim)

    @property
    def adjoint(self) -> Self:
        back = (self.concat_dim, self.concat_sizes, self.split_dim, self.split_sizes)
        return type(self)(self.group, *back)

    def describe(self, x: torch.Tensor) -> dict[str, Any]:
        return {
            "dim": self.split_dim,
            "send": list(self.split_sizes),
            "recv": list(self.concat_sizes),
            "shape of a row": packing.rest(x.shape, self.split_dim),
        }


def all_to_all_v(
    tensor: torch.Tensor,
    send_sizes: Sequence[int],
    recv_sizes: Sequence[int],
    dim: int = 0,
    group: GroupLike = None,
    *,
    async_op: bool = False,
) -> TensorOrHandle:
    """Send a block of rows to each rank, and concatenate the received blocks.

    Parameters
    ----------
    tensor : torch.Tensor
        ``sum(send_sizes)`` rows along `dim`, the rows for rank 0 first; any dtype.
    send_sizes : sequence of int
        Rows for each rank; zeros are allowed.
    recv_sizes : sequence of int
        Rows from each rank; zeros are allowed.
    dim : int
        The dimension that is split and concatenated.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None means the whole world.
    async_op : bool
        Return a :class:`~varcomm.Handle`; call its ``wait()``.

    Returns
    -------
    torch.Tensor or Handle
        ``sum(recv_sizes)`` rows along `dim`, sender by sender; dtype of `tensor`. For ``dim != 0``
        the result is a transposed view of contiguous memory.

    Raises
    ------
    ArgumentError
        If an argument is wrong: on this rank, before any message.

    See Also
    --------
    indexed_all_to_all_v, transpose_v

    Notes
    -----
    Adjoint: :func:`all_to_all_v` with `send_sizes` and `recv_sizes` exchanged.
    Communication: each rank sends its blocks for other ranks. For ``dim=0`` nothing is
    copied; for other dimensions, rows are copied once on departure.
    In one process: rank r has ``torch.cat([x.split(sizes, dim)[r] for x, sizes in ranks], dim)``.

    Examples
    --------
    >>> import torch, varcomm
    >>> def fn(rank):
    ...     sizes = [[1, 2], [0, 1]]  # sizes[i][j]: rows that i sends to j
    ...     rows = 10 * rank + torch.arange(sum(sizes[rank]))
    ...     return varcomm.all_to_all_v(rows, sizes[rank], [row[rank] for row in sizes])
    >>> varcomm.launch(fn, 2)
    [tensor([0]), tensor([ 1,  2, 10])]
    """
    ranks = resolve(group)
    if type(send_sizes) in (list, tuple) and type(recv_sizes) in (list, tuple):
        both = *send_sizes, *recv_sizes
        return collective(_operator, ranks, tensor, both, (len(send_sizes), dim), async_op)
    operator = all_to_all_operator(ranks, tensor, send_sizes, recv_sizes, dim)
    return start_or_apply(operator, tensor, async_op)


def _operator(ranks: Group, x: torch.Tensor, both: Sequence[int], sent: int, dim: int) -> AllToAllV:
    return all_to_all_operator(ranks, x, list(both[:sent]), list(both[sent:]), dim)


def all_to_all_operator(
    ranks: Group,
    x: torch.Tensor,
    send_sizes: Sequence[int],
    recv_sizes: Sequence[int],
    dim: int,
    name: str = "all_to_all_v",
    words: tuple[str, str] = ("send_sizes", "recv_sizes"),
) -> AllToAllV:
    """Return the operator of a call; errors have the names of the function and its sizes."""
    sent, received = words
    with checking(name, ranks) as where:
        sends, dim = checked_whole(x, send_sizes, dim, ranks, where, sent)
        receives = checked_sizes(recv_sizes, received, ranks.size, where)
        if sends[ranks.rank] != receives[ranks.rank]:
            raise ArgumentError(
                f"{where}this rank sends {sends[ranks.rank]} rows to itself ({sent}), but "
                f"expects {receives[ranks.rank]} from itself ({received})."
            )
    return AllToAllV(ranks, dim, sends, dim, receives)


@torch_operator
@dataclass(frozen=True)
class TransposeV(AllToAllV):
    """From shards along `concat_dim` to shards along `split_dim`."""

    name: ClassVar[str] = "transpose_v"

    def describe(self, x: torch.Tensor) -> dict[str, Any]:
        others = {"other dimensions": packing.rest(x.shape, self.concat_dim)}
        return super(AllToAllV, self).describe(x) | others


def transpose_v(
    tensor: torch.Tensor,
    split_dim: int,
    split_sizes: Sequence[int],
    concat_dim: int,
    concat_sizes: Sequence[int],
    group: GroupLike = None,
    *,
    async_op: bool = False,
) -> TensorOrHandle:
    """Exchange the sharded dimension: `split_dim` becomes sharded, `concat_dim` becomes full.

    Parameters
    ----------
    tensor : torch.Tensor
        This rank's shard: ``concat_sizes[rank]`` rows along `concat_dim` and ``sum(split_sizes)``
        along `split_dim`; any dtype.
    split_dim : int
        The dimension that becomes sharded.
    concat_dim : int
        The dimension that becomes full.
    split_sizes : sequence of int
        Rows per rank along `split_dim`; zeros are allowed. Identical on all ranks.
    concat_sizes : sequence of int
        Rows per rank along `concat_dim`; zeros are allowed. Identical on all ranks.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None means the whole world.
    async_op : bool
        Return a :class:`~varcomm.Handle`; call its ``wait()``.

    Returns
    -------
    torch.Tensor or Handle
        ``split_sizes[rank]`` rows along `split_dim` and ``sum(concat_sizes)`` along `concat_dim`,
        in memory as the result of :func:`all_to_all_v`.

    Raises
    ------
    ArgumentError
        If an argument is wrong: on this rank, before any message.

    See Also
    --------
    all_to_all_v, varcomm.tensor_parallel.all_to_all_sp2hp

    Notes
    -----
    Adjoint: :func:`transpose_v` with split and concatenation exchanged, which is also its inverse.
    Communication: each rank sends its blocks for other ranks. Rows are copied once
    before they are sent.
    In one process: rank r has ``whole.split(split_sizes, split_dim)[r]``.

    Examples
    --------
    >>> import torch, varcomm
    >>> def fn(rank):
    ...     whole = torch.arange(6).reshape(2, 3)
    ...     columns = varcomm.shard_v(whole, [1, 2], dim=1)
    ...     return varcomm.transpose_v(columns, 0, [1, 1], 1, [1, 2])
    >>> varcomm.launch(fn, 2)
    [tensor([[0, 1, 2]]), tensor([[3, 4, 5]])]
    """
    splits, concats = (split_dim, split_sizes), (concat_dim, concat_sizes)
    operator = transpose_operator(resolve(group), tensor, splits, concats)
    return start_or_apply(operator, tensor, async_op)


def transpose_operator(
    ranks: Group,
    x: torch.Tensor,
    splits: tuple[int, Sequence[int]],
    concats: tuple[int, Sequence[int]],
    name: str = "transpose_v",
    words: tuple[str, str] = ("split_sizes", "concat_sizes"),
) -> TransposeV:
    """Return the operator of a call; errors have the names of the function and its sizes."""
    (split_dim, split_sizes), (concat_dim, concat_sizes) = splits, concats
    with checking(name, ranks) as where:
        split_sizes, split = checked_whole(x, split_sizes, split_dim, ranks, where, words[0])
        concat_sizes, concat = checked_shard(x, concat_sizes, concat_dim, ranks, where, words[1])
        if split == concat:
            raise ArgumentError(
                f"{where}dimension {split_dim} to split and {concat_dim} to concatenate are the "
                f"same dimension of a tensor of shape {tuple(x.shape)}; use all_to_all_v."
            )
    return TransposeV(ranks, split, split_sizes, concat, concat_sizes)
