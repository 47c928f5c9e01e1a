"""Mappings to and from the region of tensor parallelism, where hidden dimensions are sharded."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from varcomm.ops.all_gather_v import all_gather_v
from varcomm.ops.autograd import apply
from varcomm.ops.operator import checking
from varcomm.ops.reduce_scatter_v import reduce_scatter_v
from varcomm.ops.reduction import checked_summable
from varcomm.ops.replicated import ReplicatedSum, ReplicatedUse
from varcomm.tensor_parallel.mappings.replicated import gathered, scattered
from varcomm.tensor_parallel.mappings.sizes import sizes_of_shard, sizes_of_whole
from varcomm.transport.group import GroupLike, resolve

__all__ = [
    "all_gather_last_dim_from_tensor_parallel_region",
    "copy_to_tensor_model_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_last_dim_to_tensor_parallel_region",
    "scatter_to_tensor_model_parallel_region",
]


def copy_to_tensor_model_parallel_region(
    tensor: torch.Tensor, use_fp32: bool = True, group: GroupLike = None
) -> torch.Tensor:
    """Assume that `tensor` is replicated, and use it on each rank in another way.

    Forward: identity. Backward: all-reduce, since the uses of all ranks add up.

    Parameters
    ----------
    tensor : torch.Tensor
        Floats or complex of any shape, the same on all ranks.
    use_fp32 : bool
        Sum gradients narrower than 4 bytes in fp32 and round once; else in their own dtype.
    group : ProcessGroup or DeviceMesh, optional
        The ranks that take part; None is the whole world.

    Returns
    -------
    torch.Tensor
        A copy of `tensor`.

    Raises
    ------
    ArgumentError
        If `tensor` cannot be summed.

    Notes
    -----
    Adjoint: :func:`reduce_from_tensor_model_parallel_region`.

    Communication: none; in backward as :func:`varcomm.all_reduce` of the gradient.

    In one process: ``tensor.clone()``.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel import copy_to_tensor_model_parallel_region
    >>> def fn(rank):
    ...     x = torch.tensor([1.0, 2.0], requires_grad=True)
    ...     (copy_to_tensor_model_parallel_region(x)[rank] * 10).backward()
    ...     return x.grad
    >>> varcomm.launch(fn, 2)
    [tensor([10., 10.]), tensor([10., 10.])]
    """
    ranks = resolve(group)
    with checking("copy_to_tensor_model_parallel_region", ranks, use_fp32=use_fp32) as where:
        checked_summable(tensor, where, use_fp32)
    return apply(ReplicatedUse(ranks, use_fp32), tensor)


def reduce_from_tensor_model_parallel_region(
    tensor: torch.Tensor, use_fp32: bool = True, group: GroupLike = None
) -> torch.Tensor:
    """Assume that `tensor` is partial and that its sum is used alike on all ranks: replicated.

    Forward: all-reduce. Backward: identity, since the gradient is replicated as well. Where ranks
    go on to use the sum differently, :func:`varcomm.all_reduce` is what is right.

    Parameters
    ----------
    tensor : torch.Tensor
        This rank's part; the same shape and dtype on all ranks. It is not changed.
    use_fp32 : bool
        Sum floats narrower than 4 bytes in fp32 and round once; else in their own dtype.
    group : ProcessGroup or DeviceMesh, optional
        The ranks that take part; None is the whole world.

    Returns
    -------
    torch.Tensor
        The sum, a new tensor; the same on all ranks bit for bit.

    Raises
    ------
    ArgumentError
        If `tensor` cannot be summed.

    Notes
    -----
    Adjoint: :func:`copy_to_tensor_model_parallel_region`.

    Communication: as :func:`varcomm.all_reduce`; none in backward.

    In one process: ``sum(tensors)``.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel import reduce_from_tensor_model_parallel_region
    >>> def fn(rank):
    ...     x = torch.tensor(rank + 1.0, requires_grad=True)
    ...     loss = reduce_from_tensor_model_parallel_region(x) ** 2
    ...     loss.backward()
    ...     return loss.item(), x.grad.item()
    >>> varcomm.launch(fn, 2)
    [(9.0, 6.0), (9.0, 6.0)]
    """
    ranks = resolve(group)
    with checking("reduce_from_tensor_model_parallel_region", ranks, use_fp32=use_fp32) as where:
        checked_summable(tensor, where, use_fp32)
    return apply(ReplicatedSum(ranks, use_fp32), tensor)


def scatter_to_tensor_model_parallel_region(
    tensor: torch.Tensor,
    sizes: Sequence[int] | None = None,
    dim: int = -1,
    group: GroupLike = None,
) -> torch.Tensor:
    """Assume that `tensor` is replicated, and keep this rank's shard of it.

    Forward: slice. Backward: all-gather, so that the gradient is replicated as well.

    Parameters
    ----------
    tensor : torch.Tensor
        ``sum(sizes)`` rows along `dim`, the same on all ranks; any dtype.
    sizes : sequence of int, optional
        Rows that each rank keeps, one int a rank, zeros allowed; None is
        ``ShardSizes.balanced``.
    dim : int
        The dimension that is sharded.
    group : ProcessGroup or DeviceMesh, optional
        The ranks that take part; None is the whole world.

    Returns
    -------
    torch.Tensor
        A copy of this rank's rows.

    Raises
    ------
    ArgumentError
        If `sizes` or `dim` do not fit.

    Notes
    -----
    Adjoint: :func:`gather_from_tensor_model_parallel_region` with the same arguments.

    Communication: none; in backward each rank sends the gradient of its shard to every other.

    In one process: ``tensor.split(sizes, dim)``, of which rank r has the r-th.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel import scatter_to_tensor_model_parallel_region
    >>> def fn(rank):
    ...     x = torch.arange(3.0, requires_grad=True)
    ...     (scatter_to_tensor_model_parallel_region(x) ** 2).sum().backward()
    ...     return x.grad
    >>> varcomm.launch(fn, 2)
    [tensor([0., 2., 4.]), tensor([0., 2., 4.])]
    """
    return scattered("scatter_to_tensor_model_parallel_region", tensor, sizes, dim, group)


def gather_from_tensor_model_parallel_region(
    tensor: torch.Tensor,
    sizes: Sequence[int] | None = None,
    dim: int = -1,
    group: GroupLike = None,
) -> torch.Tensor:
    """Assume that shards, once gathered, are used alike on all ranks: replicated.

    Forward: all-gather. Backward: slice, with no sum over ranks. Where ranks go on to use the
    whole differently, :func:`all_gather_last_dim_from_tensor_parallel_region` is what is right.

    Parameters
    ----------
    tensor : torch.Tensor
        This rank's shard, with ``sizes[rank]`` rows along `dim`; any dtype.
    sizes : sequence of int, optional
        Rows of each rank, one int a rank, zeros allowed. None asks the ranks, which costs a round
        of messages.
    dim : int
        The dimension that is sharded.
    group : ProcessGroup or DeviceMesh, optional
        The ranks that take part; None is the whole world.

    Returns
    -------
    torch.Tensor
        ``sum(sizes)`` rows along `dim`, a new tensor.

    Raises
    ------
    ArgumentError
        If `sizes`, `dim` and `tensor` do not fit.

    Notes
    -----
    Adjoint: :func:`scatter_to_tensor_model_parallel_region` with the same arguments.

    Communication: each rank sends its shard to every other, ``P - 1`` times its bytes; none in
    backward.

    In one process: ``torch.cat(shards, dim)``.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel import gather_from_tensor_model_parallel_region
    >>> def fn(rank):
    ...     x = torch.full((rank + 1,), 1.0 + rank, requires_grad=True)
    ...     whole = gather_from_tensor_model_parallel_region(x)
    ...     (whole**2).sum().backward()
    ...     return whole.tolist(), x.grad.tolist()
    >>> varcomm.launch(fn, 2)
    [([1.0, 2.0, 2.0], [2.0]), ([1.0, 2.0, 2.0], [4.0, 4.0])]
    """
    return gathered("gather_from_tensor_model_parallel_region", tensor, sizes, dim, group)


def all_gather_last_dim_from_tensor_parallel_region(
    tensor: torch.Tensor,
    sizes: Sequence[int] | None = None,
    use_fp32: bool = True,
    group: GroupLike = None,
) -> torch.Tensor:
    """Assume that ranks use the whole differently, and gather shards of the last dimension.

    :func:`varcomm.all_gather_v` along the last dimension. Backward: reduce-scatter.

    Parameters
    ----------
    tensor : torch.Tensor
        ``(*F, sizes[rank])``: this rank's shard; any dtype.
    sizes : sequence of int, optional
        Columns of each rank, one int a rank, zeros allowed. None asks the ranks, which costs a
        round of messages.
    use_fp32 : bool
        Sum gradients narrower than 4 bytes in fp32 and round once; else in their own dtype.
    group : ProcessGroup or DeviceMesh, optional
        The ranks that take part; None is the whole world.

    Returns
    -------
    torch.Tensor
        ``(*F, sum(sizes))``, a new tensor.

    Raises
    ------
    ArgumentError
        If `sizes` and `tensor` do not fit.

    Notes
    -----
    Adjoint: :func:`reduce_scatter_last_dim_to_tensor_parallel_region`.

    Communication: each rank sends its shard to every other, ``P - 1`` times its bytes; in backward,
    the bytes of the whole but for its own columns.

    In one process: ``torch.cat(shards, -1)``.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel import all_gather_last_dim_from_tensor_parallel_region
    >>> def fn(rank):
    ...     return all_gather_last_dim_from_tensor_parallel_region(torch.full((1, rank + 1), rank))
    >>> varcomm.launch(fn, 2)
    [tensor([[0, 1, 1]]), tensor([[0, 1, 1]])]
    """
    name, ranks = "all_gather_last_dim_from_tensor_parallel_region", resolve(group)
    return all_gather_v(tensor, sizes_of_shard(name, tensor, sizes, -1, ranks), -1, use_fp32, group)


def reduce_scatter_last_dim_to_tensor_parallel_region(
    tensor: torch.Tensor,
    sizes: Sequence[int] | None = None,
    use_fp32: bool = True,
    group: GroupLike = None,
) -> torch.Tensor:
    """Assume that `tensor` is partial, and keep this rank's shard of the sum's last dimension.

    :func:`varcomm.reduce_scatter_v` along the last dimension. Backward: all-gather.

    Parameters
    ----------
    tensor : torch.Tensor
        ``(*F, sum(sizes))``: this rank's part of the sum; any dtype but bool.
    sizes : sequence of int, optional
        Columns that each rank keeps, one int a rank, zeros allowed; None is balanced.
    use_fp32 : bool
        Sum floats narrower than 4 bytes in fp32 and round once; else in their own dtype.
    group : ProcessGroup or DeviceMesh, optional
        The ranks that take part; None is the whole world.

    Returns
    -------
    torch.Tensor
        ``(*F, sizes[rank])``.

    Raises
    ------
    ArgumentError
        If `sizes` and `tensor` do not fit.

    Notes
    -----
    Adjoint: :func:`all_gather_last_dim_from_tensor_parallel_region`.

    Communication: each rank sends the bytes of `tensor` but for its own columns; in backward its
    shard to every other.

    In one process: ``sum(tensors).split(sizes, -1)``, of which rank r has the r-th.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel import reduce_scatter_last_dim_to_tensor_parallel_region
    >>> def fn(rank):
    ...     return reduce_scatter_last_dim_to_tensor_parallel_region(torch.arange(3.0).view(1, 3))
    >>> varcomm.launch(fn, 2)
    [tensor([[0., 2.]]), tensor([[4.]])]
    """
    name, ranks = "reduce_scatter_last_dim_to_tensor_parallel_region", resolve(group)
    return reduce_scatter_v(
        tensor, sizes_of_whole(name, tensor, sizes, -1, ranks), -1, use_fp32, group
    )
