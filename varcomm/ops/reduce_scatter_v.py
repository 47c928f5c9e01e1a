"""``reduce_scatter_v``: every rank gets its rows of the sum. Its adjoint is ``all_gather_v``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch

from varcomm.ops.all_gather_v import ReduceScatterV
from varcomm.ops.checks import checked_whole
from varcomm.ops.handle import Handle, run
from varcomm.ops.operator import checking, known
from varcomm.ops.reduction import checked_summable
from varcomm.transport.group import Group, GroupLike, resolve

__all__ = ["reduce_scatter_v"]


@overload
def reduce_scatter_v(
    tensor: torch.Tensor,
    sizes: Sequence[int],
    dim: int = 0,
    use_fp32: bool = True,
    group: GroupLike = None,
    *,
    async_op: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def reduce_scatter_v(
    tensor: torch.Tensor,
    sizes: Sequence[int],
    dim: int = 0,
    use_fp32: bool = True,
    group: GroupLike = None,
    *,
    async_op: Literal[True],
) -> Handle: ...
def reduce_scatter_v(
    tensor: torch.Tensor,
    sizes: Sequence[int],
    dim: int = 0,
    use_fp32: bool = True,
    group: GroupLike = None,
    *,
    async_op: bool = False,
) -> torch.Tensor | Handle:
    """Sum tensors of all ranks, and leave each rank its own uneven shard of the sum.

    Parameters
    ----------
    tensor : torch.Tensor
        ``sum(sizes)`` rows along `dim`; the same shape and dtype on all ranks, any but bool.
    sizes : sequence of int
        Rows per rank along `dim`; zeros allowed, identical on all ranks.
    dim : int
        Sharded dimension.
    use_fp32 : bool
        Sum floats narrower than 4 bytes in fp32 and round once.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None is the whole world.
    async_op : bool
        Return a :class:`~varcomm.Handle`; call its ``wait()``.

    Returns
    -------
    torch.Tensor or Handle
        ``sizes[rank]`` rows along `dim`; dtype and memory format of `tensor`.

    Raises
    ------
    ArgumentError
        Before any communication, if `sizes`, `dim` and `tensor` do not fit on this rank.
    GroupError
        If this rank is not in `group`, or the group has no engine for the tensor's device.

    Notes
    -----
    Adjoint: :func:`all_gather_v` with the same arguments.

    Communication: each rank sends every other rank its rows, in the dtype of `tensor`: the bytes of
    `tensor` but for its own rows. It sums what it gets in rank order: the result is the same at
    every run, bit for bit. No copy for ``dim=0``, one on departure for others.

    In one process: ``sum(tensors).split(sizes, dim)``, of which rank r has the r-th.

    Examples
    --------
    >>> import torch, varcomm
    >>> def fn(rank):
    ...     return varcomm.reduce_scatter_v(torch.tensor([1, 10, 100]) * (rank + 1), [1, 2])
    >>> varcomm.launch(fn, 2)
    [tensor([3]), tensor([ 30, 300])]
    """
    ranks = resolve(group)
    operator = known(_operator, ranks, tensor, sizes, dim, use_fp32, async_op)
    return run(operator, tensor, async_op)


def _operator(
    ranks: Group, x: torch.Tensor, sizes: Sequence[int], dim: int, use_fp32: bool, async_op: bool
) -> ReduceScatterV:
    with checking("reduce_scatter_v", ranks, use_fp32=use_fp32, async_op=async_op) as where:
        checked_summable(x, where, use_fp32)
        return ReduceScatterV(ranks, *checked_whole(x, sizes, dim, ranks, where), use_fp32)
