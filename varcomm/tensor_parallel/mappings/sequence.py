"""Mappings to and from the region of sequence parallelism, where the sequence is sharded."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from varcomm.ops.all_gather_v import all_gather_v
from varcomm.ops.operator import checking
from varcomm.ops.reduce_scatter_v import reduce_scatter_v
from varcomm.tensor_parallel.mappings.replicated import gathered, scattered
from varcomm.tensor_parallel.mappings.sizes import sizes_of_shard, sizes_of_whole
from varcomm.transport.group import GroupLike, resolve

__all__ = [
    "gather_from_sequence_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
]


def scatter_to_sequence_parallel_region(
    tensor: torch.Tensor,
    sizes: Sequence[int] | None = None,
    dim: int = 0,
    group: GroupLike = None,
) -> torch.Tensor:
    """Assume that `tensor` is replicated, and keep this rank's part of the sequence.

    :func:`scatter_to_tensor_model_parallel_region`, by default along the first dimension.

    Parameters
    ----------
    tensor : torch.Tensor
        ``sum(sizes)`` rows along `dim`, the same on all ranks; any dtype.
    sizes : sequence of int, optional
        Rows that each rank keeps, one int a rank, zeros allowed; None is balanced.
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
        If `sizes`, `dim` and `tensor` do not fit.

    Notes
    -----
    Adjoint: :func:`gather_from_sequence_parallel_region` of what is used alike on all ranks.

    Communication: none; in backward each rank sends the gradient of its shard to every other.

    In one process: ``tensor.split(sizes, dim)``, of which rank r has the r-th.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel import scatter_to_sequence_parallel_region
    >>> varcomm.launch(lambda rank: scatter_to_sequence_parallel_region(torch.arange(3)), 2)
    [tensor([0, 1]), tensor([2])]
    """
    return scattered("scatter_to_sequence_parallel_region", tensor, sizes, dim, group)


def gather_from_sequence_parallel_region(
    tensor: torch.Tensor,
    tensor_parallel_output_grad: bool = True,
    sizes: Sequence[int] | None = None,
    dim: int = 0,
    use_fp32: bool = True,
    group: GroupLike = None,
) -> torch.Tensor:
    """Assume that ranks use the whole differently, or alike if not `tensor_parallel_output_grad`.

    Forward: all-gather. Backward: reduce-scatter, since what each rank computes from the whole is
    another part of the loss; or, where what follows is replicated, slice.

    Parameters
    ----------
    tensor : torch.Tensor
        This rank's part of the sequence, with ``sizes[rank]`` rows along `dim`; any dtype.
    tensor_parallel_output_grad : bool
        Whether gradients of the whole are partial (a tensor-parallel layer follows) or replicated.
    sizes : sequence of int, optional
        Rows of each rank, one int a rank, zeros allowed. None asks the ranks, which costs a round
        of messages.
    dim : int
        The dimension that is sharded.
    use_fp32 : bool
        Sum gradients narrower than 4 bytes in fp32 and round once; else in their own dtype.
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
    Adjoint: :func:`reduce_scatter_to_sequence_parallel_region`, or
    :func:`scatter_to_sequence_parallel_region`.

    Communication: each rank sends its shard to every other, ``P - 1`` times its bytes; in backward
    the bytes of the whole but for its own rows, or nothing where gradients are replicated.

    In one process: ``torch.cat(shards, dim)``.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel import gather_from_sequence_parallel_region
    >>> def fn(rank, partial):
    ...     x = torch.ones(rank + 1, requires_grad=True)
    ...     gather_from_sequence_parallel_region(x, partial).sum().backward()
    ...     return x.grad.tolist()
    >>> varcomm.launch(fn, 2, True), varcomm.launch(fn, 2, False)
    ([[2.0], [2.0, 2.0]], [[1.0], [1.0, 1.0]])
    """
    name, ranks = "gather_from_sequence_parallel_region", resolve(group)
    flags = {"tensor_parallel_output_grad": tensor_parallel_output_grad, "use_fp32": use_fp32}
    with checking(name, ranks, **flags):
        pass
    if not tensor_parallel_output_grad:
        return gathered(name, tensor, sizes, dim, group)
    sizes = sizes_of_shard(name, tensor, sizes, dim, ranks)
    return all_gather_v(tensor, sizes, dim, use_fp32, group)


def reduce_scatter_to_sequence_parallel_region(
    tensor: torch.Tensor,
    sizes: Sequence[int] | None = None,
    dim: int = 0,
    use_fp32: bool = True,
    group: GroupLike = None,
) -> torch.Tensor:
    """Assume that `tensor` is partial, and keep this rank's part of the sequence of the sum.

    :func:`varcomm.reduce_scatter_v`. Backward: all-gather.

    Parameters
    ----------
    tensor : torch.Tensor
        ``sum(sizes)`` rows along `dim`: this rank's part of the sum; any dtype but bool.
    sizes : sequence of int, optional
        Rows that each rank keeps, one int a rank, zeros allowed; None is balanced.
    dim : int
        The dimension that is sharded.
    use_fp32 : bool
        Sum floats narrower than 4 bytes in fp32 and round once; else in their own dtype.
    group : ProcessGroup or DeviceMesh, optional
        The ranks that take part; None is the whole world.

    Returns
    -------
    torch.Tensor
        ``sizes[rank]`` rows along `dim`.

    Raises
    ------
    ArgumentError
        If `sizes`, `dim` and `tensor` do not fit.

    Notes
    -----
    Adjoint: :func:`gather_from_sequence_parallel_region`.

    Communication: each rank sends the bytes of `tensor` but for its own rows; in backward its shard
    to every other.

    In one process: ``sum(tensors).split(sizes, dim)``, of which rank r has the r-th.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel import reduce_scatter_to_sequence_parallel_region
    >>> varcomm.launch(lambda rank: reduce_scatter_to_sequence_parallel_region(torch.arange(3)), 2)
    [tensor([0, 2]), tensor([4])]
    """
    name, ranks = "reduce_scatter_to_sequence_parallel_region", resolve(group)
    return reduce_scatter_v(
        tensor, sizes_of_whole(name, tensor, sizes, dim, ranks), dim, use_fp32, group
    )
