"""``indexed_all_to_all_v``: pick rows for each rank and exchange them, without a plan to keep."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from varcomm.errors import ArgumentError
from varcomm.ops.checks import checked_tensor, checking
from varcomm.ops.handle import TensorOrHandle, start_or_apply
from varcomm.plan.checks import checked_count_matrix, checked_indices
from varcomm.plan.routes import IndexedAllToAllV, Routes
from varcomm.sizes import checked_dim
from varcomm.transport.group import GroupLike, resolve


def indexed_all_to_all_v(
    tensor: torch.Tensor,
    indices: Sequence[torch.Tensor],
    sizes: Sequence[Sequence[int]],
    use_fp32: bool = True,
    dim: int = 0,
    group: GroupLike = None,
    *,
    async_op: bool = False,
) -> TensorOrHandle:
    """Send chosen rows to each rank, and concatenate the received rows.

    If indices are the same at every step, use an :class:`~varcomm.ExchangePlan`.

    Parameters
    ----------
    tensor : torch.Tensor
        This rank's rows along `dim`; any dtype.
    indices : sequence of torch.Tensor
        ``indices[r]``: rows that this rank sends to rank r; one dimension, int32 or int64, on the
        device of `tensor`. Rows may repeat.
    sizes : sequence of sequence of int
        ``sizes[i][j]``: rows that rank i sends to rank j; the same on all ranks.
    dim : int
        The dimension that `indices` count along.
    use_fp32 : bool
        In the adjoint, sum floats narrower than 4 bytes in fp32 and round once.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None means the whole world.
    async_op : bool
        Return a :class:`~varcomm.Handle`; call its ``wait()``.

    Returns
    -------
    torch.Tensor or Handle
        The received rows, sender by sender, each in the sender's order; dtype of `tensor`. For
        ``dim != 0`` a transposed view of contiguous memory.

    Raises
    ------
    ArgumentError
        If an argument is wrong: on this rank, before any message.

    See Also
    --------
    ExchangePlan, all_to_all_v

    Notes
    -----
    Adjoint: rows go back to their owners, which sum the copies of each row in a fixed order.
    Communication: each chosen row is sent once to its receiver. Rows are copied once, before they
    are sent.
    In one process: rank r has ``torch.cat([x.index_select(dim, index[r]) for x, index in ranks])``.

    Examples
    --------
    >>> import torch, varcomm
    >>> def fn(rank):
    ...     rows, one = torch.tensor([1.0, 2.0]) + 10 * rank, torch.tensor([rank])
    ...     return varcomm.indexed_all_to_all_v(rows, [one, one], [[1, 1], [1, 1]])
    >>> varcomm.launch(fn, 2)
    [tensor([ 1., 12.]), tensor([ 1., 12.])]
    """
    ranks = resolve(group)
    flags = {"use_fp32": use_fp32, "async_op": async_op}
    with checking("indexed_all_to_all_v", ranks, **flags) as where:
        checked_tensor(tensor, where)
        dim = checked_dim(dim, tensor.shape, where)
        index, send_counts = checked_indices(indices, tensor.shape[dim], ranks, where)
        matrix = checked_count_matrix(sizes, send_counts, ranks, where)
        recv_counts = tuple(row[ranks.rank] for row in matrix)
        plan = Routes.of(ranks, index, send_counts, recv_counts, tensor.shape[dim])
        if index.device != tensor.device:
            raise ArgumentError(
                f"{where}the tensor is on {tensor.device}, indices are on {index.device}."
            )
    return start_or_apply(IndexedAllToAllV(plan, dim, use_fp32), tensor, async_op)
