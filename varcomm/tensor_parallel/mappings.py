"""Mappings between replicated, partial and sharded tensors, under Megatron's names.

A tensor is *replicated* (every rank has a copy of one value), *sharded* (every rank has its own
rows) or *partial* (the value is the sum over ranks). A mapping is exact under the assumption in
the first line of its docstring, which no rank checks. Mappings come in pairs, and each is the
backward of the other:

=============================================  =============================================
``copy_to_tensor_model_parallel_region``       ``reduce_from_tensor_model_parallel_region``
``scatter_to_tensor_model_parallel_region``    ``gather_from_tensor_model_parallel_region``
``all_gather_last_dim_from_tensor_...``        ``reduce_scatter_last_dim_to_tensor_...``
``gather_from_sequence_parallel_region``       ``reduce_scatter_to_sequence_parallel_region``
``... tensor_parallel_output_grad=False``      ``scatter_to_sequence_parallel_region``
``all_to_all_sp2hp``                           ``all_to_all_hp2sp``
``split_tensor_into_1d_chunks``                ``gather_split_1d_tensor``
=============================================  =============================================

All of them return new tensors, accept empty shards and any dtype unless the docstring names one,
have derivatives of any order, and raise ArgumentError before any communication if the arguments
do not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import cleandoc, signature
from typing import TypeVar

import torch

from varcomm.errors import ArgumentError
from varcomm.ops.all_gather_v import all_gather_v
from varcomm.ops.all_to_all_v import all_to_all_v, transpose_v
from varcomm.ops.checks import checked_shard, checked_tensor, checked_whole
from varcomm.ops.compilation import uncompiled
from varcomm.ops.operator import apply, checking
from varcomm.ops.reduce_scatter_v import reduce_scatter_v
from varcomm.ops.reduction import checked_summable
from varcomm.ops.replicated import (
    ReplicatedGather,
    ReplicatedShard,
    ReplicatedSum,
    ReplicatedUse,
)
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
    "shard_sizes",
    "split_tensor_into_1d_chunks",
]


F = TypeVar("F", bound=Callable[..., torch.Tensor])

_RECURRING = {
    "sizes": "sequence of int, optional\n    Rows per rank along `dim`; zeros allowed, identical "
    "on all ranks. None is\n    balanced if `tensor` is whole; otherwise it asks all ranks.",
    "dim": "int\n    Sharded dimension.",
    "use_fp32": "bool\n    Sum floats narrower than 4 bytes in fp32 and round once.",
    "group": "ProcessGroup or DeviceMesh, optional\n    Ranks that take part; None is the whole "
    "world.",
}

_SECTIONS = """
Parameters
----------
{parameters}

Returns
-------
torch.Tensor
    {returns}

Notes
-----
Adjoint: :func:`{adjoint}`.

Communication: {communication}

In one process: {twin}

Examples
--------
>>> import torch, varcomm
>>> from varcomm.tensor_parallel import {name}
{example}
"""


def _documented(
    tensor: str, returns: str, adjoint: str, communication: str, twin: str, **more: str
) -> Callable[[F], F]:
    """Complete a mapping's docstring, a summary and an example, by the sections of all mappings."""

    def complete(mapping: F) -> F:
        summary, _, example = cleandoc(mapping.__doc__ or "").partition("\n>>> ")
        first, *others = signature(mapping).parameters
        known = _RECURRING | {name: f"optional\n    {text}" for name, text in more.items()}
        entries = [f"{first} : torch.Tensor\n    {tensor}"]
        entries += [f"{name} : {known[name]}" for name in others]
        sections = _SECTIONS.format(
            parameters="\n".join(entries),
            returns=returns,
            adjoint=adjoint,
            communication=communication,
            twin=twin,
            name=mapping.__name__,
            example=f">>> {example}",
        )
        mapping.__doc__ = f"{summary.rstrip()}\n{sections}"
        return mapping

    return complete


@_documented(
    "Floats or complex of any shape, identical on all ranks.",
    "A copy of `tensor`.",
    "reduce_from_tensor_model_parallel_region",
    "none; in backward an all-reduce of the gradient.",
    "``tensor.clone()``.",
)
def copy_to_tensor_model_parallel_region(
    tensor: torch.Tensor, use_fp32: bool = True, group: GroupLike = None
) -> torch.Tensor:
    """Assume that `tensor` is replicated, and use it differently on each rank.

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


@_documented(
    "This rank's part, of the same shape and dtype on all ranks.",
    "The sum, replicated, bit for bit the same on all ranks.",
    "copy_to_tensor_model_parallel_region",
    "an all-reduce; none in backward.",
    "``sum(tensors)``.",
)
def reduce_from_tensor_model_parallel_region(
    tensor: torch.Tensor, use_fp32: bool = True, group: GroupLike = None
) -> torch.Tensor:
    """Assume that `tensor` is partial and that all ranks use the sum identically.

    If ranks use the sum differently, :func:`varcomm.all_reduce` is the right call.

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


@_documented(
    "``sum(sizes)`` rows along `dim`, identical on all ranks.",
    "A copy of this rank's ``sizes[rank]`` rows.",
    "gather_from_tensor_model_parallel_region",
    "none; in backward every rank sends its gradient to every other rank.",
    "part ``rank`` of ``tensor.split(sizes, dim)``.",
)
def scatter_to_tensor_model_parallel_region(
    tensor: torch.Tensor,
    sizes: Sequence[int] | None = None,
    dim: int = -1,
    group: GroupLike = None,
) -> torch.Tensor:
    """Assume that `tensor` is replicated, and keep this rank's shard.

    >>> def fn(rank):
    ...     x = torch.arange(3.0, requires_grad=True)
    ...     (scatter_to_tensor_model_parallel_region(x) ** 2).sum().backward()
    ...     return x.grad
    >>> varcomm.launch(fn, 2)
    [tensor([0., 2., 4.]), tensor([0., 2., 4.])]
    """
    return _scattered("scatter_to_tensor_model_parallel_region", tensor, sizes, dim, group)


@_documented(
    "This rank's shard, ``sizes[rank]`` rows along `dim`.",
    "``sum(sizes)`` rows along `dim`, replicated.",
    "scatter_to_tensor_model_parallel_region",
    "every rank sends its shard to every other rank; none in backward.",
    "``torch.cat(shards, dim)``.",
)
def gather_from_tensor_model_parallel_region(
    tensor: torch.Tensor,
    sizes: Sequence[int] | None = None,
    dim: int = -1,
    group: GroupLike = None,
) -> torch.Tensor:
    """Assume that all ranks use the gathered tensor identically.

    If ranks use it differently, :func:`varcomm.all_gather_v` is the right call.

    >>> def fn(rank):
    ...     x = torch.full((rank + 1,), 1.0 + rank, requires_grad=True)
    ...     whole = gather_from_tensor_model_parallel_region(x)
    ...     (whole**2).sum().backward()
    ...     return whole.tolist(), x.grad.tolist()
    >>> varcomm.launch(fn, 2)
    [([1.0, 2.0, 2.0], [2.0]), ([1.0, 2.0, 2.0], [4.0, 4.0])]
    """
    return _gathered("gather_from_tensor_model_parallel_region", tensor, sizes, dim, group)


@_documented(
    "This rank's shard, ``(*F, sizes[rank])``.",
    "``(*F, sum(sizes))``.",
    "reduce_scatter_last_dim_to_tensor_parallel_region",
    ":func:`varcomm.all_gather_v`; in backward a reduce-scatter.",
    "``torch.cat(shards, -1)``.",
)
def all_gather_last_dim_from_tensor_parallel_region(
    tensor: torch.Tensor,
    sizes: Sequence[int] | None = None,
    use_fp32: bool = True,
    group: GroupLike = None,
) -> torch.Tensor:
    """Assume that ranks use the gathered tensor differently; shards of the last dimension.

    >>> def fn(rank):
    ...     return all_gather_last_dim_from_tensor_parallel_region(torch.full((1, rank + 1), rank))
    >>> varcomm.launch(fn, 2)
    [tensor([[0, 1, 1]]), tensor([[0, 1, 1]])]
    """
    name, ranks = "all_gather_last_dim_from_tensor_parallel_region", resolve(group)
    return all_gather_v(tensor, shard_sizes(name, tensor, sizes, -1, ranks), -1, use_fp32, group)


@_documented(
    "This rank's part of the sum, ``(*F, sum(sizes))``.",
    "``(*F, sizes[rank])``.",
    "all_gather_last_dim_from_tensor_parallel_region",
    ":func:`varcomm.reduce_scatter_v`; in backward an all-gather.",
    "part ``rank`` of ``sum(tensors).split(sizes, -1)``.",
)
def reduce_scatter_last_dim_to_tensor_parallel_region(
    tensor: torch.Tensor,
    sizes: Sequence[int] | None = None,
    use_fp32: bool = True,
    group: GroupLike = None,
) -> torch.Tensor:
    """Assume that `tensor` is partial, and keep this rank's columns of the sum.

    >>> def fn(rank):
    ...     return reduce_scatter_last_dim_to_tensor_parallel_region(torch.arange(3.0).view(1, 3))
    >>> varcomm.launch(fn, 2)
    [tensor([[0., 2.]]), tensor([[4.]])]
    """
    name, ranks = "reduce_scatter_last_dim_to_tensor_parallel_region", resolve(group)
    return reduce_scatter_v(
        tensor, _whole_sizes(name, tensor, sizes, -1, ranks), -1, use_fp32, group
    )


@_documented(
    "``sum(sizes)`` rows along `dim`, identical on all ranks.",
    "A copy of this rank's ``sizes[rank]`` rows.",
    "gather_from_sequence_parallel_region",
    "none; in backward every rank sends its gradient to every other rank.",
    "part ``rank`` of ``tensor.split(sizes, dim)``.",
)
def scatter_to_sequence_parallel_region(
    tensor: torch.Tensor,
    sizes: Sequence[int] | None = None,
    dim: int = 0,
    group: GroupLike = None,
) -> torch.Tensor:
    """Assume that `tensor` is replicated, and keep this rank's part of the sequence.

    >>> varcomm.launch(lambda rank: scatter_to_sequence_parallel_region(torch.arange(3)), 2)
    [tensor([0, 1]), tensor([2])]
    """
    return _scattered("scatter_to_sequence_parallel_region", tensor, sizes, dim, group)


@_documented(
    "This rank's part, ``sizes[rank]`` rows along `dim`.",
    "``sum(sizes)`` rows along `dim`.",
    "reduce_scatter_to_sequence_parallel_region",
    "every rank sends its part to every other rank; in backward a reduce-scatter, or nothing.",
    "``torch.cat(shards, dim)``.",
    tensor_parallel_output_grad="True if gradients of the whole are partial, because a "
    "tensor-parallel layer follows; False if all ranks use the whole identically. Then the adjoint "
    "is :func:`scatter_to_sequence_parallel_region`.",
)
def gather_from_sequence_parallel_region(
    tensor: torch.Tensor,
    tensor_parallel_output_grad: bool = True,
    sizes: Sequence[int] | None = None,
    dim: int = 0,
    use_fp32: bool = True,
    group: GroupLike = None,
) -> torch.Tensor:
    """Assume that ranks use the whole differently if `tensor_parallel_output_grad`.

    >>> def fn(rank, partial):
    ...     x = torch.ones(rank + 1, requires_grad=True)
    ...     gather_from_sequence_parallel_region(x, partial).sum().backward()
    ...     return x.grad.tolist()
    >>> varcomm.launch(fn, 2, True), varcomm.launch(fn, 2, False)
    ([[2.0], [2.0, 2.0]], [[1.0], [1.0, 1.0]])
    """
    name, ranks = "gather_from_sequence_parallel_region", resolve(group)
    flag = {"tensor_parallel_output_grad": tensor_parallel_output_grad}
    with checking(name, ranks, **flag, use_fp32=use_fp32):
        pass  # only the flags, whose positions Megatron gives to other arguments
    if not tensor_parallel_output_grad:
        return _gathered(name, tensor, sizes, dim, group)
    return all_gather_v(tensor, shard_sizes(name, tensor, sizes, dim, ranks), dim, use_fp32, group)


@_documented(
    "This rank's part of the sum, ``sum(sizes)`` rows along `dim`.",
    "``sizes[rank]`` rows along `dim`.",
    "gather_from_sequence_parallel_region",
    ":func:`varcomm.reduce_scatter_v`; in backward an all-gather.",
    "part ``rank`` of ``sum(tensors).split(sizes, dim)``.",
)
def reduce_scatter_to_sequence_parallel_region(
    tensor: torch.Tensor,
    sizes: Sequence[int] | None = None,
    dim: int = 0,
    use_fp32: bool = True,
    group: GroupLike = None,
) -> torch.Tensor:
    """Assume that `tensor` is partial, and keep this rank's part of the summed sequence.

    >>> varcomm.launch(lambda rank: reduce_scatter_to_sequence_parallel_region(torch.arange(3)), 2)
    [tensor([0, 2]), tensor([4])]
    """
    name, ranks = "reduce_scatter_to_sequence_parallel_region", resolve(group)
    return reduce_scatter_v(
        tensor, _whole_sizes(name, tensor, sizes, dim, ranks), dim, use_fp32, group
    )


@_documented(
    "``sum(input_split_sizes)`` rows along `dim`, those for rank 0 first.",
    "``sum(output_split_sizes)`` rows along `dim`, sender by sender.",
    "all_to_all",
    "every rank sends all rows except the block for itself.",
    "see :func:`varcomm.all_to_all_v`.",
    output_split_sizes="Rows from each rank; None asks all ranks.",
    input_split_sizes="Rows for each rank; None is balanced.",
)
def all_to_all(
    tensor: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    dim: int = 0,
    group: GroupLike = None,
) -> torch.Tensor:
    """Assume nothing, and send rows to every rank, like :func:`varcomm.all_to_all_v`.

    >>> varcomm.launch(lambda rank: all_to_all(torch.arange(3) + 10 * rank), 2)
    [tensor([ 0,  1, 10, 11]), tensor([ 2, 12])]
    """
    name, ranks = "all_to_all", resolve(group)
    sends = _whole_sizes(name, tensor, input_split_sizes, dim, ranks)
    if output_split_sizes is None:
        output_split_sizes = _asked_counts(name, sends, ranks)
    return all_to_all_v(tensor, sends, output_split_sizes, dim, group)


@_documented(
    "This rank's part of the sequence, ``(sequence_sizes[rank], *F, H)``.",
    "``(sum(sequence_sizes), *F, hidden_sizes[rank])``.",
    "all_to_all_hp2sp",
    ":func:`varcomm.transpose_v`.",
    "the whole tensor is the same before and after.",
    sequence_sizes="Rows of the first dimension per rank; None asks all ranks.",
    hidden_sizes="Columns of the last dimension per rank; None is balanced.",
)
def all_to_all_sp2hp(
    tensor: torch.Tensor,
    sequence_sizes: Sequence[int] | None = None,
    hidden_sizes: Sequence[int] | None = None,
    group: GroupLike = None,
) -> torch.Tensor:
    """Assume nothing, and turn parts of the sequence into shards of the hidden dimension.

    >>> def fn(rank):
    ...     return all_to_all_sp2hp(torch.arange(3).expand(rank + 1, 3))
    >>> varcomm.launch(fn, 2)[1]
    tensor([[2],
            [2],
            [2]])
    """
    name, ranks = "all_to_all_sp2hp", resolve(group)
    rows = shard_sizes(name, tensor, sequence_sizes, 0, ranks, "sequence_sizes")
    columns = _whole_sizes(name, tensor, hidden_sizes, -1, ranks)
    return transpose_v(tensor, -1, columns, 0, rows, group)


@_documented(
    "This rank's columns, ``(sum(sequence_sizes), *F, hidden_sizes[rank])``.",
    "``(sequence_sizes[rank], *F, sum(hidden_sizes))``.",
    "all_to_all_sp2hp",
    ":func:`varcomm.transpose_v`.",
    "the whole tensor is the same before and after.",
    sequence_sizes="Rows of the first dimension per rank; None is balanced.",
    hidden_sizes="Columns of the last dimension per rank; None asks all ranks.",
)
def all_to_all_hp2sp(
    tensor: torch.Tensor,
    sequence_sizes: Sequence[int] | None = None,
    hidden_sizes: Sequence[int] | None = None,
    group: GroupLike = None,
) -> torch.Tensor:
    """Assume nothing, and turn shards of the hidden dimension into parts of the sequence.

    >>> varcomm.launch(lambda rank: all_to_all_hp2sp(torch.full((3, rank + 1), rank)), 2)[1]
    tensor([[0, 1, 1]])
    """
    name, ranks = "all_to_all_hp2sp", resolve(group)
    columns = shard_sizes(name, tensor, hidden_sizes, -1, ranks, "hidden_sizes")
    rows = _whole_sizes(name, tensor, sequence_sizes, 0, ranks)
    return transpose_v(tensor, 0, rows, -1, columns, group)


@_documented(
    "Any shape, identical on all ranks.",
    "One dimension, in memory of its own.",
    "gather_split_1d_tensor",
    "none; in backward every rank sends its gradient to every other rank.",
    "part ``rank`` of ``tensor.reshape(-1).split(sizes)``.",
)
def split_tensor_into_1d_chunks(tensor: torch.Tensor, group: GroupLike = None) -> torch.Tensor:
    """Assume that `tensor` is replicated, and keep this rank's balanced share of its elements.

    >>> varcomm.launch(lambda rank: split_tensor_into_1d_chunks(torch.arange(3).view(3, 1)), 2)
    [tensor([0, 1]), tensor([2])]
    """
    name, ranks = "split_tensor_into_1d_chunks", resolve(group)
    with checking(name, ranks) as where:
        checked_tensor(tensor, where)
    return _scattered(name, tensor.reshape(-1), None, 0, group)


@_documented(
    "This rank's piece, of one dimension.",
    "The pieces of all ranks, of one dimension.",
    "split_tensor_into_1d_chunks",
    "every rank sends its piece to every other rank; none in backward.",
    "``torch.cat(pieces)``.",
    numel="Elements of the whole, for pieces of :func:`split_tensor_into_1d_chunks`; None asks all "
    "ranks for the sizes of their pieces.",
)
def gather_split_1d_tensor(
    piece: torch.Tensor, numel: int | None = None, group: GroupLike = None
) -> torch.Tensor:
    """Assume that all ranks use the gathered pieces identically.

    >>> varcomm.launch(lambda rank: gather_split_1d_tensor(torch.full((2 - rank,), rank)), 2)
    [tensor([0, 0, 1]), tensor([0, 0, 1])]
    """
    name, ranks = "gather_split_1d_tensor", resolve(group)
    with checking(name, ranks) as where:
        checked_tensor(piece, where, "piece")
        if piece.dim() != 1:
            raise ArgumentError(
                f"{where}piece must have one dimension; got shape {tuple(piece.shape)}."
            )
        sizes = None if numel is None else ShardSizes.balanced(numel, ranks.size)
    return _gathered(name, piece, sizes, 0, group)


def split_tensor_along_last_dim(
    tensor: torch.Tensor, sizes: Sequence[int], contiguous: bool = False
) -> tuple[torch.Tensor, ...]:
    """Split a tensor into parts of `sizes` along its last dimension; no communication.

    Parameters
    ----------
    tensor : torch.Tensor
        ``sum(sizes)`` columns along the last dimension.
    sizes : sequence of int
        Columns per part: any number of parts, for example queries, keys and values.
    contiguous : bool
        Copy parts that are not contiguous; otherwise all parts are views.

    Returns
    -------
    tuple of torch.Tensor

    Examples
    --------
    >>> import torch
    >>> from varcomm.tensor_parallel import split_tensor_along_last_dim
    >>> split_tensor_along_last_dim(torch.tensor([[1, 2, 3]]), [2, 1])
    (tensor([[1, 2]]), tensor([[3]]))
    """
    where = "split_tensor_along_last_dim: "
    checked_tensor(tensor, where)
    plain = checked_sizes(sizes, "sizes", where=where)
    columns = tensor.shape[checked_dim(-1, tensor.shape, where)]
    if sum(plain) != columns:
        raise ArgumentError(
            f"{where}sizes {list(plain)} sum to {sum(plain)}, but the tensor of shape "
            f"{tuple(tensor.shape)} has {columns} columns."
        )
    parts = tensor.split(list(plain), -1)
    return tuple(part.contiguous() for part in parts) if contiguous else tuple(parts)


def vocab_range(sizes: Sequence[int], rank: int) -> tuple[int, int]:
    """Return the ids of one rank as ``(start, stop)``.

    Parameters
    ----------
    sizes : sequence of int
        Ids per rank; zeros allowed, identical on all ranks.
    rank : int
        The rank that owns the ids.

    Returns
    -------
    tuple of int
        The first id, and one past the last id.

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
    tensor: torch.Tensor,
    sizes: Sequence[int] | None,
    dim: int,
    group: Group,
    what: str = "sizes",
) -> Sequence[int]:
    """Return `sizes`, or ask all ranks for the sizes of their shards; collective then."""
    return _asked_sizes(name, tensor, dim, group, what) if sizes is None else sizes


@uncompiled("a graph cannot ask the ranks for sizes that were left out; pass sizes")
def _asked_sizes(
    name: str, tensor: torch.Tensor, dim: int, group: Group, what: str
) -> Sequence[int]:
    def local() -> int:
        checked_tensor(tensor, "")
        return tensor.shape[checked_dim(dim, tensor.shape)]

    return ShardSizes(share(f"{name}, which asks for {what}", local, group))


@uncompiled("a graph cannot ask the ranks for output_split_sizes that were left out; pass them")
def _asked_counts(name: str, sends: Sequence[int], group: Group) -> list[int]:
    counts = share(name, lambda: checked_sizes(sends, "input_split_sizes", group.size), group)
    return [sent[group.rank] for sent in counts]


def _whole_sizes(
    name: str, tensor: torch.Tensor, sizes: Sequence[int] | None, dim: int, group: Group
) -> Sequence[int]:
    if sizes is not None:
        return sizes
    with checking(name, group) as where:
        checked_tensor(tensor, where)
        return ShardSizes.balanced(tensor.shape[checked_dim(dim, tensor.shape, where)], group.size)


def _scattered(
    name: str, tensor: torch.Tensor, sizes: Sequence[int] | None, dim: int, group: GroupLike
) -> torch.Tensor:
    ranks = resolve(group)
    sizes = _whole_sizes(name, tensor, sizes, dim, ranks)
    with checking(name, ranks) as where:
        operator = ReplicatedShard(ranks, *checked_whole(tensor, sizes, dim, ranks, where))
    return apply(operator, tensor)


def _gathered(
    name: str, tensor: torch.Tensor, sizes: Sequence[int] | None, dim: int, group: GroupLike
) -> torch.Tensor:
    ranks = resolve(group)
    sizes = shard_sizes(name, tensor, sizes, dim, ranks)
    with checking(name, ranks) as where:
        plain = checked_shard(tensor, sizes, dim, ranks, where)
    return apply(ReplicatedGather(ranks, *plain, use_fp32=True), tensor)
