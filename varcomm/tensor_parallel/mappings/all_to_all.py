"""Mappings between layouts that are sharded before and after."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from varcomm.ops.all_to_all_v import all_to_all_v
from varcomm.ops.autograd import uncompiled
from varcomm.ops.transpose_v import transpose_v
from varcomm.sizes import checked_sizes
from varcomm.tensor_parallel.mappings.sizes import sizes_of_shard, sizes_of_whole
from varcomm.transport.agreement import share
from varcomm.transport.group import Group, GroupLike, resolve

__all__ = [
    "all_to_all",
    "all_to_all_hp2sp",
    "all_to_all_sp2hp",
]


def all_to_all(
    tensor: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    dim: int = 0,
    group: GroupLike = None,
) -> torch.Tensor:
    """Assume nothing, and send every rank some rows: :func:`varcomm.all_to_all_v`.

    Backward: the way back.

    Parameters
    ----------
    tensor : torch.Tensor
        ``sum(input_split_sizes)`` rows along `dim`, those for rank 0 first; any dtype.
    output_split_sizes : sequence of int, optional
        Rows from each rank. None asks the ranks what they send, which costs a round of messages.
    input_split_sizes : sequence of int, optional
        Rows for each rank, zeros allowed; None is balanced.
    dim : int
        The dimension that is split and concatenated.
    group : ProcessGroup or DeviceMesh, optional
        The ranks that take part; None is the whole world.

    Returns
    -------
    torch.Tensor
        ``sum(output_split_sizes)`` rows along `dim`, sender by sender.

    Raises
    ------
    ArgumentError
        If sizes, `dim` and `tensor` do not fit.

    Notes
    -----
    Adjoint: :func:`all_to_all` with the two kinds of sizes exchanged.

    Communication: each rank sends the bytes of `tensor` but for the block that it keeps.

    In one process: as of :func:`varcomm.all_to_all_v`.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel import all_to_all
    >>> varcomm.launch(lambda rank: all_to_all(torch.arange(3) + 10 * rank), 2)
    [tensor([ 0,  1, 10, 11]), tensor([ 2, 12])]
    """
    name, ranks = "all_to_all", resolve(group)
    sends = sizes_of_whole(name, tensor, input_split_sizes, dim, ranks)
    if output_split_sizes is None:
        output_split_sizes = _told(name, sends, ranks)
    return all_to_all_v(tensor, sends, output_split_sizes, dim, group)


@uncompiled("ranks ask each other for output_split_sizes, and graphs have none before; pass them")
def _told(name: str, sends: Sequence[int], group: Group) -> list[int]:
    told = share(name, lambda: checked_sizes(sends, "input_split_sizes", group.size), group)
    return [counts[group.rank] for counts in told]


def all_to_all_sp2hp(
    tensor: torch.Tensor,
    sequence_sizes: Sequence[int] | None = None,
    hidden_sizes: Sequence[int] | None = None,
    group: GroupLike = None,
) -> torch.Tensor:
    """Assume nothing, and turn parts of the sequence into shards of the hidden dimension.

    Parameters
    ----------
    tensor : torch.Tensor
        ``(sequence_sizes[rank], *F, H)``: this rank's part of the sequence; any dtype.
    sequence_sizes : sequence of int, optional
        Rows of the first dimension on each rank, zeros allowed. None asks the ranks, which costs a
        round of messages.
    hidden_sizes : sequence of int, optional
        Columns of the last dimension for each rank, zeros allowed; None is balanced.
    group : ProcessGroup or DeviceMesh, optional
        The ranks that take part; None is the whole world.

    Returns
    -------
    torch.Tensor
        ``(sum(sequence_sizes), *F, hidden_sizes[rank])``.

    Raises
    ------
    ArgumentError
        If sizes and `tensor` do not fit.

    Notes
    -----
    Adjoint: :func:`all_to_all_hp2sp`, which is its inverse too.

    Communication: each rank sends the bytes of `tensor` but for the block that it keeps; see
    :func:`varcomm.transpose_v`.

    In one process: the whole is the same before and after, ``(sum(sequence_sizes), *F,
    sum(hidden_sizes))``.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel import all_to_all_sp2hp
    >>> def fn(rank):
    ...     return all_to_all_sp2hp(torch.arange(3).expand(rank + 1, 3))
    >>> varcomm.launch(fn, 2)[1]
    tensor([[2],
            [2],
            [2]])
    """
    name, ranks = "all_to_all_sp2hp", resolve(group)
    rows = sizes_of_shard(name, tensor, sequence_sizes, 0, ranks, "sequence_sizes")
    columns = sizes_of_whole(name, tensor, hidden_sizes, -1, ranks)
    return transpose_v(tensor, -1, columns, 0, rows, group)


def all_to_all_hp2sp(
    tensor: torch.Tensor,
    sequence_sizes: Sequence[int] | None = None,
    hidden_sizes: Sequence[int] | None = None,
    group: GroupLike = None,
) -> torch.Tensor:
    """Assume nothing, and turn shards of the hidden dimension into parts of the sequence.

    The way back of :func:`all_to_all_sp2hp`, with the same sizes.

    Parameters
    ----------
    tensor : torch.Tensor
        ``(sum(sequence_sizes), *F, hidden_sizes[rank])``: this rank's columns; any dtype.
    sequence_sizes : sequence of int, optional
        Rows of the first dimension for each rank, zeros allowed; None is balanced.
    hidden_sizes : sequence of int, optional
        Columns of the last dimension on each rank, zeros allowed. None asks the ranks, which costs
        a round of messages.
    group : ProcessGroup or DeviceMesh, optional
        The ranks that take part; None is the whole world.

    Returns
    -------
    torch.Tensor
        ``(sequence_sizes[rank], *F, sum(hidden_sizes))``.

    Raises
    ------
    ArgumentError
        If `sizes` and `tensor` do not fit.

    Notes
    -----
    Adjoint: :func:`all_to_all_sp2hp`, which is its inverse too.

    Communication: each rank sends the bytes of `tensor` but for the block that it keeps.

    In one process: the whole is the same before and after, ``(sum(sequence_sizes), *F,
    sum(hidden_sizes))``.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel import all_to_all_hp2sp
    >>> varcomm.launch(lambda rank: all_to_all_hp2sp(torch.full((3, rank + 1), rank)), 2)[1]
    tensor([[0, 1, 1]])
    """
    name, ranks = "all_to_all_hp2sp", resolve(group)
    columns = sizes_of_shard(name, tensor, hidden_sizes, -1, ranks, "hidden_sizes")
    rows = sizes_of_whole(name, tensor, sequence_sizes, 0, ranks)
    return transpose_v(tensor, 0, rows, -1, columns, group)
