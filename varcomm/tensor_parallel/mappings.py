"""Mappings between replicated, partial and sharded tensors, under Megatron's names.

A tensor is *replicated* (every rank has a copy of one value), *sharded* (every rank has its own
rows) or *partial* (the value is the sum over ranks). A mapping is exact under the assumption in
the first line of its docstring, which no rank checks. All mappings return new tensors, have
derivatives of any order, and raise ArgumentError before any communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from varcomm.ops.all_gather_v import AllGatherV
from varcomm.ops.all_to_all_v import all_to_all_operator, transpose_operator
from varcomm.ops.checks import checked_shard, checked_tensor, checked_whole, checking
from varcomm.ops.compilation import uncompiled
from varcomm.ops.graph_operator import in_graph
from varcomm.ops.handle import apply
from varcomm.ops.reduce_scatter_v import reduce_scatter_operator
from varcomm.ops.reduction import checked_summable
from varcomm.ops.replicated import ReplicatedGather, ReplicatedShard, ReplicatedSum, ReplicatedUse
from varcomm.sizes import ShardSizes, checked_dim, checked_sizes
from varcomm.transport.agreement import share
from varcomm.transport.group import Group, GroupLike, resolve

__all__ = [
    "all_gather_last_dim_from_tensor_parallel_region",
    "all_to_all",
    "all_to_all_hp2sp",
    "all_to_all_sp2hp",
    "copy_to_tensor_model_parallel_region",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "gather_split_1d_tensor",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_last_dim_to_tensor_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "split_tensor_into_1d_equal_chunks",
]


_MOST_ENDS = 64  # tensors of ends that a group keeps


def copy_to_tensor_model_parallel_region(
    tensor: Tensor, use_fp32: bool = True, group: GroupLike = None
) -> Tensor:
    """Assume that `tensor` is replicated, and use it differently on each rank.

    Parameters
    ----------
    tensor : torch.Tensor
        Floats or complex of any shape, identical on all ranks.
    use_fp32, group
        As in :func:`varcomm.all_reduce`.

    Returns
    -------
    torch.Tensor
        A copy of `tensor`.

    Raises
    ------
    ArgumentError
        If an argument is wrong: on this rank, before any message.

    Notes
    -----
    Adjoint: :func:`reduce_from_tensor_model_parallel_region`.
    Communication: none; in backward an all-reduce of the gradient.
    In one process: ``tensor.clone()``.

    Examples
    --------
    >>> import torch, varcomm, varcomm.tensor_parallel as tp
    >>> def fn(rank):
    ...     x = torch.ones(2, requires_grad=True)
    ...     tp.copy_to_tensor_model_parallel_region(x)[rank].backward()
    ...     return x.grad
    >>> varcomm.launch(fn, 2)
    [tensor([1., 1.]), tensor([1., 1.])]
    """
    ranks = resolve(group)
    with checking("copy_to_tensor_model_parallel_region", ranks, use_fp32=use_fp32) as where:
        checked_summable(tensor, where, use_fp32)
    return apply(ReplicatedUse(ranks, use_fp32), tensor)


def reduce_from_tensor_model_parallel_region(
    tensor: Tensor, use_fp32: bool = True, group: GroupLike = None
) -> Tensor:
    """Assume that `tensor` is partial and that all ranks use the sum identically.

    If ranks use the sum differently, use :func:`varcomm.all_reduce`.

    Parameters
    ----------
    tensor : torch.Tensor
        This rank's part, of the same shape and dtype on all ranks.
    use_fp32, group
        As in :func:`varcomm.all_reduce`.

    Returns
    -------
    torch.Tensor
        The sum, replicated, bit for bit the same on all ranks.

    Raises
    ------
    ArgumentError
        If an argument is wrong: on this rank, before any message.

    Notes
    -----
    Adjoint: :func:`copy_to_tensor_model_parallel_region`.
    Communication: an all-reduce; none in backward.
    In one process: ``sum(tensors)``.

    Examples
    --------
    >>> import torch, varcomm, varcomm.tensor_parallel as tp
    >>> varcomm.launch(lambda rank: tp.reduce_from_tensor_model_parallel_region(torch.ones(1)), 2)
    [tensor([2.]), tensor([2.])]
    """
    ranks = resolve(group)
    with checking("reduce_from_tensor_model_parallel_region", ranks, use_fp32=use_fp32) as where:
        checked_summable(tensor, where, use_fp32)
    return apply(ReplicatedSum(ranks, use_fp32), tensor)


def scatter_to_tensor_model_parallel_region(
    tensor: Tensor, sizes: Sequence[int] | None = None, dim: int = -1, group: GroupLike = None
) -> Tensor:
    """Assume that `tensor` is replicated, and keep this rank's shard.

    Parameters
    ----------
    tensor : torch.Tensor
        ``sum(sizes)`` rows along `dim`, identical on all ranks.
    sizes, dim, group
        As in :func:`varcomm.shard_v`. If `sizes` is None, sizes are balanced.

    Returns
    -------
    torch.Tensor
        A copy of this rank's ``sizes[rank]`` rows.

    Raises
    ------
    ArgumentError
        If an argument is wrong: on this rank, before any message.

    Notes
    -----
    Adjoint: :func:`gather_from_tensor_model_parallel_region`.
    Communication: none; in backward every rank sends its gradient to every other rank.
    In one process: part ``rank`` of ``tensor.split(sizes, dim)``.

    Examples
    --------
    >>> import torch, varcomm, varcomm.tensor_parallel as tp
    >>> varcomm.launch(lambda rank: tp.scatter_to_tensor_model_parallel_region(torch.arange(3)), 2)
    [tensor([0, 1]), tensor([2])]
    """
    return _scattered("scatter_to_tensor_model_parallel_region", tensor, sizes, dim, group)


def gather_from_tensor_model_parallel_region(
    tensor: Tensor, sizes: Sequence[int] | None = None, dim: int = -1, group: GroupLike = None
) -> Tensor:
    """Assume that all ranks use the gathered tensor identically.

    If ranks use the result differently, use :func:`varcomm.all_gather_v`.

    Parameters
    ----------
    tensor : torch.Tensor
        This rank's shard, ``sizes[rank]`` rows along `dim`.
    sizes, dim, group
        As in :func:`varcomm.all_gather_v`. If `sizes` is None, ranks exchange their sizes.

    Returns
    -------
    torch.Tensor
        ``sum(sizes)`` rows along `dim`, replicated.

    Raises
    ------
    ArgumentError
        If an argument is wrong: on this rank, before any message.

    Notes
    -----
    Adjoint: :func:`scatter_to_tensor_model_parallel_region`.
    Communication: every rank sends its shard to every other rank; none in backward.
    In one process: ``torch.cat(shards, dim)``.

    Examples
    --------
    >>> import torch, varcomm, varcomm.tensor_parallel as tp
    >>> def fn(rank):
    ...     return tp.gather_from_tensor_model_parallel_region(torch.full((rank + 1,), rank))
    >>> varcomm.launch(fn, 2)
    [tensor([0, 1, 1]), tensor([0, 1, 1])]
    """
    name = "gather_from_tensor_model_parallel_region"
    return _gathered(ReplicatedGather, name, tensor, sizes, dim, group)


def all_gather_last_dim_from_tensor_parallel_region(
    tensor: Tensor,
    sizes: Sequence[int] | None = None,
    use_fp32: bool = True,
    group: GroupLike = None,
) -> Tensor:
    """Assume that ranks use the gathered tensor differently; shards of the last dimension.

    Parameters
    ----------
    tensor : torch.Tensor
        This rank's shard, ``(*F, sizes[rank])``.
    sizes, use_fp32, group
        As in :func:`varcomm.all_gather_v`. If `sizes` is None, ranks exchange their sizes.

    Returns
    -------
    torch.Tensor
        ``(*F, sum(sizes))``.

    Raises
    ------
    ArgumentError
        If an argument is wrong: on this rank, before any message.

    Notes
    -----
    Adjoint: :func:`reduce_scatter_last_dim_to_tensor_parallel_region`.
    Communication: :func:`varcomm.all_gather_v`; in backward a reduce-scatter.
    In one process: ``torch.cat(shards, -1)``.

    Examples
    --------
    >>> import torch, varcomm, varcomm.tensor_parallel as tp
    >>> def fn(rank):
    ...     own = torch.full((1, rank + 1), rank)
    ...     return tp.all_gather_last_dim_from_tensor_parallel_region(own)
    >>> varcomm.launch(fn, 2)
    [tensor([[0, 1, 1]]), tensor([[0, 1, 1]])]
    """
    name = "all_gather_last_dim_from_tensor_parallel_region"
    return _gathered(AllGatherV, name, tensor, sizes, -1, group, use_fp32)


def reduce_scatter_last_dim_to_tensor_parallel_region(
    tensor: Tensor,
    sizes: Sequence[int] | None = None,
    use_fp32: bool = True,
    group: GroupLike = None,
) -> Tensor:
    """Assume that `tensor` is partial, and keep this rank's columns of the sum.

    Parameters
    ----------
    tensor : torch.Tensor
        This rank's part of the sum, ``(*F, sum(sizes))``.
    sizes, use_fp32, group
        As in :func:`varcomm.reduce_scatter_v`. If `sizes` is None, sizes are balanced.

    Returns
    -------
    torch.Tensor
        ``(*F, sizes[rank])``.

    Raises
    ------
    ArgumentError
        If an argument is wrong: on this rank, before any message.

    Notes
    -----
    Adjoint: :func:`all_gather_last_dim_from_tensor_parallel_region`.
    Communication: :func:`varcomm.reduce_scatter_v`; in backward an all-gather.
    In one process: part ``rank`` of ``sum(tensors).split(sizes, -1)``.

    Examples
    --------
    >>> import torch, varcomm, varcomm.tensor_parallel as tp
    >>> fn = lambda _: tp.reduce_scatter_last_dim_to_tensor_parallel_region(torch.ones(1, 3))
    >>> varcomm.launch(fn, 2)
    [tensor([[2., 2.]]), tensor([[2.]])]
    """
    name, ranks = "reduce_scatter_last_dim_to_tensor_parallel_region", resolve(group)
    sizes = _whole_sizes(name, tensor, sizes, -1, ranks)
    return apply(reduce_scatter_operator(ranks, tensor, sizes, -1, use_fp32, name), tensor)


def scatter_to_sequence_parallel_region(
    tensor: Tensor, sizes: Sequence[int] | None = None, dim: int = 0, group: GroupLike = None
) -> Tensor:
    """Assume that `tensor` is replicated, and keep this rank's part of the sequence.

    Parameters
    ----------
    tensor : torch.Tensor
        ``sum(sizes)`` rows along `dim`, identical on all ranks.
    sizes, dim, group
        As in :func:`varcomm.shard_v`. If `sizes` is None, sizes are balanced.

    Returns
    -------
    torch.Tensor
        A copy of this rank's ``sizes[rank]`` rows.

    Raises
    ------
    ArgumentError
        If an argument is wrong: on this rank, before any message.

    Notes
    -----
    Adjoint: :func:`gather_from_sequence_parallel_region`.
    Communication: none; in backward every rank sends its gradient to every other rank.
    In one process: part ``rank`` of ``tensor.split(sizes, dim)``.

    Examples
    --------
    >>> import torch, varcomm, varcomm.tensor_parallel as tp
    >>> varcomm.launch(lambda rank: tp.scatter_to_sequence_parallel_region(torch.arange(3)), 2)
    [tensor([0, 1]), tensor([2])]
    """
    return _scattered("scatter_to_sequence_parallel_region", tensor, sizes, dim, group)


def gather_from_sequence_parallel_region(
    tensor: Tensor,
    tensor_parallel_output_grad: bool = True,
    sizes: Sequence[int] | None = None,
    dim: int = 0,
    use_fp32: bool = True,
    group: GroupLike = None,
) -> Tensor:
    """Assume that ranks use the full tensor differently if `tensor_parallel_output_grad`.

    Parameters
    ----------
    tensor : torch.Tensor
        This rank's part, ``sizes[rank]`` rows along `dim`.
    tensor_parallel_output_grad : bool
        True if gradients of the full tensor are partial, because a tensor-parallel layer follows.
        False if all ranks use the tensor identically; the adjoint is then
        :func:`scatter_to_sequence_parallel_region`.
    sizes, dim, use_fp32, group
        As in :func:`varcomm.all_gather_v`. If `sizes` is None, ranks exchange their sizes.

    Returns
    -------
    torch.Tensor
        ``sum(sizes)`` rows along `dim`.

    Raises
    ------
    ArgumentError
        If an argument is wrong: on this rank, before any message.

    Notes
    -----
    Adjoint: :func:`reduce_scatter_to_sequence_parallel_region`.
    Communication: every rank sends its part to every other rank; in backward a reduce-scatter, or
    nothing.
    In one process: ``torch.cat(shards, dim)``.

    Examples
    --------
    >>> import torch, varcomm, varcomm.tensor_parallel as tp
    >>> def fn(rank, partial):
    ...     x = torch.ones(rank + 1, requires_grad=True)
    ...     tp.gather_from_sequence_parallel_region(x, partial).sum().backward()
    ...     return x.grad.tolist()
    >>> varcomm.launch(fn, 2, True), varcomm.launch(fn, 2, False)
    ([[2.0], [2.0, 2.0]], [[1.0], [1.0, 1.0]])
    """
    name, partial = "gather_from_sequence_parallel_region", tensor_parallel_output_grad
    with checking(name, resolve(group), tensor_parallel_output_grad=partial, use_fp32=use_fp32):
        pass  # only the flags, because Megatron has other arguments at their positions
    kind = AllGatherV if partial else ReplicatedGather
    return _gathered(kind, name, tensor, sizes, dim, group, use_fp32)


def reduce_scatter_to_sequence_parallel_region(
    tensor: Tensor,
    sizes: Sequence[int] | None = None,
    dim: int = 0,
    use_fp32: bool = True,
    group: GroupLike = None,
) -> Tensor:
    """Assume that `tensor` is partial, and keep this rank's part of the summed sequence.

    Parameters
    ----------
    tensor : torch.Tensor
        This rank's part of the sum, ``sum(sizes)`` rows along `dim`.
    sizes, dim, use_fp32, group
        As in :func:`varcomm.reduce_scatter_v`. If `sizes` is None, sizes are balanced.

    Returns
    -------
    torch.Tensor
        ``sizes[rank]`` rows along `dim`.

    Raises
    ------
    ArgumentError
        If an argument is wrong: on this rank, before any message.

    Notes
    -----
    Adjoint: :func:`gather_from_sequence_parallel_region`.
    Communication: :func:`varcomm.reduce_scatter_v`; in backward an all-gather.
    In one process: part ``rank`` of ``sum(tensors).split(sizes, dim)``.

    Examples
    --------
    >>> import torch, varcomm, varcomm.tensor_parallel as tp
    >>> fn = lambda rank: tp.reduce_scatter_to_sequence_parallel_region(torch.arange(3))
    >>> varcomm.launch(fn, 2)
    [tensor([0, 2]), tensor([4])]
    """
    name, ranks = "reduce_scatter_to_sequence_parallel_region", resolve(group)
    sizes = _whole_sizes(name, tensor, sizes, dim, ranks)
    return apply(reduce_scatter_operator(ranks, tensor, sizes, dim, use_fp32, name), tensor)


def all_to_all(
    tensor: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    dim: int = 0,
    group: GroupLike = None,
) -> Tensor:
    """Send rows to every rank, like :func:`varcomm.all_to_all_v`; for any input.

    Parameters
    ----------
    tensor : torch.Tensor
        ``sum(input_split_sizes)`` rows along `dim`, those for rank 0 first.
    output_split_sizes : sequence of int, optional
        Rows from each rank; if None, ranks exchange their sizes.
    input_split_sizes : sequence of int, optional
        Rows for each rank; None means balanced sizes.
    dim, group
        As in :func:`varcomm.all_to_all_v`.

    Returns
    -------
    torch.Tensor
        ``sum(output_split_sizes)`` rows along `dim`, sender by sender.

    Raises
    ------
    ArgumentError
        If an argument is wrong: on this rank, before any message.

    Notes
    -----
    Adjoint: :func:`all_to_all`.
    Communication: every rank sends all rows except the block for itself.
    In one process: see :func:`varcomm.all_to_all_v`.

    Examples
    --------
    >>> import torch, varcomm, varcomm.tensor_parallel as tp
    >>> varcomm.launch(lambda rank: tp.all_to_all(torch.arange(3) + 10 * rank), 2)
    [tensor([ 0,  1, 10, 11]), tensor([ 2, 12])]
    """
    name, ranks = "all_to_all", resolve(group)
    sends, receives = _whole_sizes(name, tensor, input_split_sizes, dim, ranks), output_split_sizes
    if receives is None:
        receives = _asked_counts(name, sends, ranks)
    words = "input_split_sizes", "output_split_sizes"
    operator = all_to_all_operator(ranks, tensor, sends, receives, dim, name=name, words=words)
    return apply(operator, tensor)


def all_to_all_sp2hp(
    tensor: Tensor,
    sequence_sizes: Sequence[int] | None = None,
    hidden_sizes: Sequence[int] | None = None,
    group: GroupLike = None,
) -> Tensor:
    """Convert parts of the sequence into shards of the hidden dimension; for any input.

    Parameters
    ----------
    tensor : torch.Tensor
        This rank's part of the sequence, ``(sequence_sizes[rank], *F, H)``.
    sequence_sizes : sequence of int, optional
        Rows of the first dimension per rank; if None, ranks exchange their sizes.
    hidden_sizes : sequence of int, optional
        Columns of the last dimension per rank; None means balanced sizes.
    group
        As in :func:`varcomm.all_to_all_v`.

    Returns
    -------
    torch.Tensor
        ``(sum(sequence_sizes), *F, hidden_sizes[rank])``.

    Raises
    ------
    ArgumentError
        If an argument is wrong: on this rank, before any message.

    Notes
    -----
    Adjoint: :func:`all_to_all_hp2sp`.
    Communication: :func:`varcomm.transpose_v`.
    In one process: the full tensor is equal before and after.

    Examples
    --------
    >>> import torch, varcomm, varcomm.tensor_parallel as tp
    >>> varcomm.launch(lambda rank: tp.all_to_all_sp2hp(torch.arange(3).expand(rank, 3)), 2)
    [tensor([[0, 1]]), tensor([[2]])]
    """
    name, ranks = "all_to_all_sp2hp", resolve(group)
    rows = shard_sizes(name, tensor, sequence_sizes, 0, ranks, "sequence_sizes")
    columns = _whole_sizes(name, tensor, hidden_sizes, -1, ranks)
    words = "hidden_sizes", "sequence_sizes"
    operator = transpose_operator(ranks, tensor, (-1, columns), (0, rows), name=name, words=words)
    return apply(operator, tensor)


def all_to_all_hp2sp(
    tensor: Tensor,
    sequence_sizes: Sequence[int] | None = None,
    hidden_sizes: Sequence[int] | None = None,
    group: GroupLike = None,
) -> Tensor:
    """Convert shards of the hidden dimension into parts of the sequence; for any input.

    Parameters
    ----------
    tensor : torch.Tensor
        This rank's columns, ``(sum(sequence_sizes), *F, hidden_sizes[rank])``.
    sequence_sizes : sequence of int, optional
        Rows of the first dimension per rank; None means balanced sizes.
    hidden_sizes : sequence of int, optional
        Columns of the last dimension per rank; if None, ranks exchange their sizes.
    group
        As in :func:`varcomm.all_to_all_v`.

    Returns
    -------
    torch.Tensor
        ``(sequence_sizes[rank], *F, sum(hidden_sizes))``.

    Raises
    ------
    ArgumentError
        If an argument is wrong: on this rank, before any message.

    Notes
    -----
    Adjoint: :func:`all_to_all_sp2hp`.
    Communication: :func:`varcomm.transpose_v`.
    In one process: the full tensor is equal before and after.

    Examples
    --------
    >>> import torch, varcomm, varcomm.tensor_parallel as tp
    >>> varcomm.launch(lambda rank: tp.all_to_all_hp2sp(torch.full((3, rank + 1), rank)), 2)[1]
    tensor([[0, 1, 1]])
    """
    name, ranks = "all_to_all_hp2sp", resolve(group)
    columns = shard_sizes(name, tensor, hidden_sizes, -1, ranks, "hidden_sizes")
    rows = _whole_sizes(name, tensor, sequence_sizes, 0, ranks)
    words = "sequence_sizes", "hidden_sizes"
    operator = transpose_operator(ranks, tensor, (0, rows), (-1, columns), name=name, words=words)
    return apply(operator, tensor)


def split_tensor_into_1d_equal_chunks(tensor: Tensor, group: GroupLike = None) -> Tensor:
    """Assume that `tensor` is replicated, and keep this rank's balanced share of its elements.

    Parameters
    ----------
    tensor : torch.Tensor
        Any shape, identical on all ranks.
    group
        As in :func:`varcomm.shard_v`.

    Returns
    -------
    torch.Tensor
        A new tensor of one dimension.

    Raises
    ------
    ArgumentError
        If an argument is wrong: on this rank, before any message.

    Notes
    -----
    Adjoint: :func:`gather_split_1d_tensor`.
    Communication: none; in backward every rank sends its gradient to every other rank.
    In one process: part ``rank`` of ``tensor.reshape(-1).split(sizes)``.

    Examples
    --------
    >>> import torch, varcomm, varcomm.tensor_parallel as tp
    >>> fn = lambda rank: tp.split_tensor_into_1d_equal_chunks(torch.arange(3).view(3, 1))
    >>> varcomm.launch(fn, 2)
    [tensor([0, 1]), tensor([2])]
    """
    name, ranks = "split_tensor_into_1d_equal_chunks", resolve(group)
    with checking(name, ranks) as where:
        checked_tensor(tensor, where)
    return _scattered(name, tensor.reshape(-1), None, 0, group)


def gather_split_1d_tensor(
    piece: Tensor, numel: int | None = None, group: GroupLike = None
) -> Tensor:
    """Assume that all ranks use the gathered pieces identically.

    Parameters
    ----------
    piece : torch.Tensor
        This rank's piece, of any shape.
    numel : int, optional
        Elements of the full tensor, for pieces of :func:`split_tensor_into_1d_equal_chunks`. If
        None, ranks exchange the sizes of their pieces.
    group
        As in :func:`varcomm.all_gather_v`.

    Returns
    -------
    torch.Tensor
        The pieces of all ranks, of one dimension.

    Raises
    ------
    ArgumentError
        If an argument is wrong: on this rank, before any message.

    Notes
    -----
    Adjoint: :func:`split_tensor_into_1d_equal_chunks`.
    Communication: every rank sends its piece to every other rank; none in backward.
    In one process: ``torch.cat(pieces)``.

    Examples
    --------
    >>> import torch, varcomm, varcomm.tensor_parallel as tp
    >>> varcomm.launch(lambda rank: tp.gather_split_1d_tensor(torch.full((2 - rank,), rank)), 2)
    [tensor([0, 0, 1]), tensor([0, 0, 1])]
    """
    name, ranks = "gather_split_1d_tensor", resolve(group)
    with checking(name, ranks) as where:
        checked_tensor(piece, where, "piece")
        sizes = None if numel is None else ShardSizes.balanced(numel, ranks.size)
    return _gathered(ReplicatedGather, name, piece.reshape(-1), sizes, 0, group)


def split_tensor_along_last_dim(
    tensor: Tensor, sizes: Sequence[int], contiguous: bool = False
) -> tuple[Tensor, ...]:
    """Split a tensor into parts of `sizes` along its last dimension; no communication.

    Parameters
    ----------
    tensor : torch.Tensor
        ``sum(sizes)`` columns along the last dimension.
    sizes : sequence of int
        Columns per part, for example of queries, keys and values.
    contiguous : bool
        Copy parts that are not contiguous; otherwise all parts are views.

    Returns
    -------
    tuple of torch.Tensor
        One tensor per entry of `sizes`, which is its number of columns.

    See Also
    --------
    split_tensor_into_1d_equal_chunks, varcomm.shard_v

    Examples
    --------
    >>> import torch
    >>> from varcomm.tensor_parallel import split_tensor_along_last_dim
    >>> split_tensor_along_last_dim(torch.tensor([[1, 2, 3]]), [2, 1])
    (tensor([[1, 2]]), tensor([[3]]))
    """
    parts = tensor.split(list(sizes), -1)
    return tuple(part.contiguous() for part in parts) if contiguous else tuple(parts)


def vocab_range(sizes: Sequence[int], rank: int) -> tuple[int, int]:
    """Return the ids of one rank as ``(start, stop)``.

    Parameters
    ----------
    sizes : sequence of int
        Ids per rank, identical on all ranks; zeros are allowed.
    rank : int
        The rank that owns the ids.

    Returns
    -------
    tuple of int

    Raises
    ------
    ArgumentError
        If a size is negative, or `rank` is out of range.

    See Also
    --------
    varcomm.ShardSizes, VocabParallelEmbedding

    Examples
    --------
    >>> from varcomm.tensor_parallel import vocab_range
    >>> vocab_range([5, 3], 1)
    (5, 8)
    """
    ids = ShardSizes(sizes).range(rank)
    return ids.start, ids.stop


def shard_sizes(
    name: str,
    tensor: Tensor,
    sizes: Sequence[int] | None,
    dim: int,
    group: Group,
    argument: str = "sizes",
) -> Sequence[int]:
    """Return `sizes`, or ask all ranks for the sizes of their shards."""
    return _asked_sizes(name, tensor, dim, group, argument) if sizes is None else sizes


def shard_ends(group: Group, sizes: Sequence[int], like: Tensor) -> Tensor:
    """Return where each rank's rows end, int64 on the device of `like`; copied there once."""
    if in_graph(like):
        return torch.tensor(list(sizes), device=like.device).cumsum(0)
    kept: dict[Any, Tensor] = group.auxiliary.setdefault("shard ends", {})
    key = tuple(sizes), like.device
    if key in kept:
        return kept[key]
    with torch.inference_mode(False):
        ends = torch.tensor(key[0], dtype=torch.int64, device=like.device).cumsum(0)
    if len(kept) < _MOST_ENDS:  # none is dropped, because a CUDA graph may read it
        kept[key] = ends
    return ends


@uncompiled("a graph cannot ask the ranks for sizes that were left out; pass sizes")
def _asked_sizes(name: str, tensor: Tensor, dim: int, group: Group, argument: str) -> ShardSizes:
    def local() -> int:
        checked_tensor(tensor, "")
        return tensor.shape[checked_dim(dim, tensor.shape)]

    return ShardSizes(share(f"{name}, which asks for {argument}", local, group))


@uncompiled("a graph cannot ask the ranks for output_split_sizes that were left out; pass them")
def _asked_counts(name: str, sends: Sequence[int], group: Group) -> list[int]:
    counts = share(name, lambda: checked_sizes(sends, "input_split_sizes", group.size), group)
    return [sent[group.rank] for sent in counts]


def _whole_sizes(
    name: str, tensor: Tensor, sizes: Sequence[int] | None, dim: int, group: Group
) -> Sequence[int]:
    if sizes is not None:
        return sizes
    with checking(name, group) as where:
        checked_tensor(tensor, where)
        return ShardSizes.balanced(tensor.shape[checked_dim(dim, tensor.shape, where)], group.size)


def _gathered(
    kind: type[AllGatherV],
    name: str,
    tensor: Tensor,
    sizes: Sequence[int] | None,
    dim: int,
    group: GroupLike,
    use_fp32: bool = True,
) -> Tensor:
    ranks = resolve(group)
    sizes = shard_sizes(name, tensor, sizes, dim, ranks)
    with checking(name, ranks, use_fp32=use_fp32) as where:
        operator = kind(ranks, *checked_shard(tensor, sizes, dim, ranks, where), use_fp32)
    return apply(operator, tensor)


def _scattered(
    name: str, tensor: Tensor, sizes: Sequence[int] | None, dim: int, group: GroupLike
) -> Tensor:
    ranks = resolve(group)
    sizes = _whole_sizes(name, tensor, sizes, dim, ranks)
    with checking(name, ranks) as where:
        operator = ReplicatedShard(ranks, *checked_whole(tensor, sizes, dim, ranks, where))
    return apply(operator, tensor)
