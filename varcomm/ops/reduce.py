"""``reduce``: the root gets the sum. Its adjoint is ``broadcast``."""

from __future__ import annotations

from typing import Literal, overload

import torch

from varcomm.ops.broadcast import Reduce
from varcomm.ops.handle import Handle, run
from varcomm.ops.operator import checking
from varcomm.ops.reduction import checked_summable
from varcomm.sizes import checked_rank
from varcomm.transport.group import GroupLike, resolve

__all__ = ["reduce"]


@overload
def reduce(
    tensor: torch.Tensor,
    dst: int = 0,
    use_fp32: bool = True,
    group: GroupLike = None,
    *,
    async_op: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def reduce(
    tensor: torch.Tensor,
    dst: int = 0,
    use_fp32: bool = True,
    group: GroupLike = None,
    *,
    async_op: Literal[True],
) -> Handle: ...
def reduce(
    tensor: torch.Tensor,
    dst: int = 0,
    use_fp32: bool = True,
    group: GroupLike = None,
    *,
    async_op: bool = False,
) -> torch.Tensor | Handle:
    """Sum tensors of all ranks on one of them.

    Parameters
    ----------
    tensor : torch.Tensor
        The same shape and dtype on all ranks, any but bool. It is not changed.
    dst : int
        The rank, within `group`, that gets the sum.
    use_fp32 : bool
        Sum floats narrower than 4 bytes in fp32 and round once.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None is the whole world.
    async_op : bool
        Return a :class:`~varcomm.Handle`; call its ``wait()``.

    Returns
    -------
    torch.Tensor or Handle
        On `dst` the sum, the same at every run, bit for bit; shape, dtype and memory format of
        `tensor`. Elsewhere zeros of the same shape, which belong to the graph as well: every rank
        enters backward.

    Raises
    ------
    ArgumentError
        Before any communication, if `tensor` cannot be summed or `dst` is no rank of the group.
    GroupError
        If this rank is not in `group`, or the group has no engine for the tensor's device.

    Notes
    -----
    Adjoint: :func:`broadcast` from `dst`.

    Communication: each rank sums a piece of ``1 / P`` and sends it to `dst`. Up to 16 KiB, and with
    `async_op`, `dst` sums all, in a single round. Either way each other rank sends the bytes of
    `tensor` once; in two rounds `dst` sends ``(P - 1) / P`` times as many.

    In one process: ``sum(tensors)``.

    Examples
    --------
    >>> import torch, varcomm
    >>> varcomm.launch(lambda rank: varcomm.reduce(torch.tensor([rank, 10]), dst=1), 2)
    [tensor([0, 0]), tensor([ 1, 20])]
    """
    ranks = resolve(group)
    with checking("reduce", ranks, use_fp32=use_fp32, async_op=async_op) as where:
        checked_summable(tensor, where, use_fp32)
        dst = checked_rank(dst, ranks.size, "dst", where)
    shape = tuple(tensor.shape)
    operator = Reduce(ranks, dst, shape, elsewhere=shape, use_fp32=use_fp32)
    return run(operator, tensor, async_op)
