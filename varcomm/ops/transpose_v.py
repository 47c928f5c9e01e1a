"""``transpose_v``: switch the sharded dimension. Its adjoint is the switch back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, overload

import torch

from varcomm.errors import ArgumentError
from varcomm.ops.all_to_all_v import AllToAllV
from varcomm.ops.checks import checked_shard, checked_whole
from varcomm.ops.handle import Handle, run
from varcomm.ops.operator import checking, torch_operator
from varcomm.transport.group import GroupLike, resolve

__all__ = ["TransposeV", "transpose_v"]


@torch_operator
@dataclass(frozen=True)
class TransposeV(AllToAllV):
    """From shards along `concat_dim` to shards along `split_dim`."""

    name: ClassVar[str] = "transpose_v"

    def describe(self, x: torch.Tensor) -> dict[str, Any]:
        return {
            "split_dim": self.split_dim,
            "split_sizes": list(self.split_sizes),
            "concat_dim": self.concat_dim,
            "concat_sizes": list(self.concat_sizes),
            "other dimensions": [
                rows for dim, rows in enumerate(x.shape) if dim != self.concat_dim
            ],
        }


@overload
def transpose_v(
    tensor: torch.Tensor,
    split_dim: int,
    split_sizes: Sequence[int],
    concat_dim: int,
    concat_sizes: Sequence[int],
    group: GroupLike = None,
    *,
    async_op: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def transpose_v(
    tensor: torch.Tensor,
    split_dim: int,
    split_sizes: Sequence[int],
    concat_dim: int,
    concat_sizes: Sequence[int],
    group: GroupLike = None,
    *,
    async_op: Literal[True],
) -> Handle: ...
def transpose_v(
    tensor: torch.Tensor,
    split_dim: int,
    split_sizes: Sequence[int],
    concat_dim: int,
    concat_sizes: Sequence[int],
    group: GroupLike = None,
    *,
    async_op: bool = False,
) -> torch.Tensor | Handle:
    """Switch which dimension is sharded: whole along one and sharded along another, or back.

    Parameters
    ----------
    tensor : torch.Tensor
        This rank's shard along `concat_dim`, with ``concat_sizes[rank]`` rows there and all
        ``sum(split_sizes)`` along `split_dim`; any dtype.
    split_dim : int
        The dimension that is whole now and sharded in the result.
    split_sizes : sequence of int
        Rows of each rank along `split_dim` in the result, one int a rank, zeros allowed.
    concat_dim : int
        The dimension that is sharded now and whole in the result.
    concat_sizes : sequence of int
        Rows of each rank along `concat_dim` now, one int a rank, zeros allowed.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None is the whole world.
    async_op : bool
        Return a :class:`~varcomm.Handle`; call its ``wait()``.

    Returns
    -------
    torch.Tensor or Handle
        ``split_sizes[rank]`` rows along `split_dim` and ``sum(concat_sizes)`` along `concat_dim`;
        dtype of `tensor`. Contiguous for ``concat_dim=0``, a transposed view of contiguous memory
        for others; ``channels_last`` is kept.

    Raises
    ------
    ArgumentError
        Before any communication, if sizes, dimensions and `tensor` do not fit on this rank.
    GroupError
        If this rank is not in `group`, or the group has no engine for the tensor's device.

    Notes
    -----
    Adjoint: :func:`transpose_v` with split and concatenation exchanged, which is also its inverse.

    Communication: each element that changes ranks travels once, so that each rank sends the bytes
    of `tensor` but for the block that it keeps; nothing is padded. One copy, on departure.

    In one process: the whole is the same before and after; rank r has ``whole.split(split_sizes,
    split_dim)[r]`` where it had ``whole.split(concat_sizes, concat_dim)[r]``.

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
    ranks = resolve(group)
    with checking("transpose_v", ranks, async_op=async_op) as where:
        splits, split = checked_whole(tensor, split_sizes, split_dim, ranks, where, "split_sizes")
        concats, concat = checked_shard(
            tensor, concat_sizes, concat_dim, ranks, where, "concat_sizes"
        )
        if split == concat:
            raise ArgumentError(
                f"{where}split_dim={split_dim} and concat_dim={concat_dim} are the same dimension "
                f"of a tensor of shape {tuple(tensor.shape)}; use all_to_all_v."
            )
    return run(TransposeV(ranks, split, splits, concat, concats), tensor, async_op)
