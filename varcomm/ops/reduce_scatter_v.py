"""``reduce_scatter_v``: every rank gets its rows of the sum. Its adjoint is ``all_gather_v``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from varcomm.ops.all_gather_v import ReduceScatterV
from varcomm.ops.checks import checked_whole, checking
from varcomm.ops.handle import TensorOrHandle, collective
from varcomm.ops.reduction import checked_summable
from varcomm.transport.group import Group, GroupLike, resolve


def reduce_scatter_v(
    tensor: torch.Tensor,
    sizes: Sequence[int],
    dim: int = 0,
    use_fp32: bool = True,
    group: GroupLike = None,
    *,
    async_op: bool = False,
) -> TensorOrHandle:
    """Sum tensors of all ranks, and leave each rank its own uneven shard of the sum.

    Parameters
    ----------
    tensor : torch.Tensor
        ``sum(sizes)`` rows along `dim`; the same shape and dtype on all ranks, any but bool.
    use_fp32 : bool
        Sum floats narrower than 4 bytes in fp32 and round once.
    sizes : sequence of int
        Rows per rank along `dim`, identical on all ranks; zeros are allowed.
    dim : int
        Sharded dimension.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None means the whole world.
    async_op : bool
        Return a :class:`~varcomm.Handle`; call its ``wait()``.

    Returns
    -------
    torch.Tensor or Handle
        ``sizes[rank]`` rows along `dim`, the same bit for bit at every run; dtype of `tensor`.

    Raises
    ------
    ArgumentError
        If an argument is wrong: on this rank, before any message.

    See Also
    --------
    all_gather_v, all_reduce

    Notes
    -----
    Adjoint: :func:`all_gather_v` with the same arguments.
    Communication: each rank sends every other rank its rows, in the dtype of `tensor`, and sums the
    received rows in rank order. For ``dim=0`` nothing is copied, for others once on departure.

    From 16 ranks on, the sum is hierarchical: over the ranks of a node, then over nodes. If nodes
    have different numbers of ranks or are unknown, each level has groups of about ``P ** (1/2)``
    ranks, from 256 ranks on ``P ** (1/3)``. On a level of ``k`` ranks, each rank sends ``k - 1``
    messages, and one kernel sums the received rows. All levels together send the bytes of one,
    after one copy of `tensor`. Above the first level, fp16 and bf16 are sent in fp32.
    In one process: rank r has ``sum(tensors).split(sizes, dim)[r]``.

    Examples
    --------
    >>> import torch, varcomm
    >>> def fn(rank):
    ...     return varcomm.reduce_scatter_v(torch.tensor([1, 10, 100]) * (rank + 1), [1, 2])
    >>> varcomm.launch(fn, 2)
    [tensor([3]), tensor([ 30, 300])]
    """
    how = dim, use_fp32
    return collective(reduce_scatter_operator, resolve(group), tensor, sizes, how, async_op)


def reduce_scatter_operator(
    ranks: Group,
    x: torch.Tensor,
    sizes: Sequence[int],
    dim: int,
    use_fp32: bool,
    name: str = "reduce_scatter_v",
) -> ReduceScatterV:
    """Return the operator of a call; errors have the `name` of the called function."""
    with checking(name, ranks, use_fp32=use_fp32) as where:
        checked_summable(x, where, use_fp32)
        return ReduceScatterV(ranks, *checked_whole(x, sizes, dim, ranks, where), use_fp32)
