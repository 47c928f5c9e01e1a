"""Pieces of uneven sizes: of a last dimension, of a tensor as one row of elements, of ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from varcomm.errors import ArgumentError
from varcomm.ops.checks import checked_tensor
from varcomm.ops.operator import checking
from varcomm.sizes import ShardSizes, checked_dim, checked_sizes
from varcomm.tensor_parallel.mappings.replicated import gathered, scattered
from varcomm.transport.group import GroupLike, resolve

__all__ = [
    "gather_split_1d_tensor",
    "split_tensor_along_last_dim",
    "split_tensor_into_1d_chunks",
    "vocab_range",
]


def split_tensor_along_last_dim(
    tensor: torch.Tensor, sizes: Sequence[int], contiguous: bool = False
) -> tuple[torch.Tensor, ...]:
    """Split a tensor into parts of `sizes` along its last dimension; no communication.

    Parameters
    ----------
    tensor : torch.Tensor
        ``sum(sizes)`` columns along the last dimension.
    sizes : sequence of int
        Columns of each part, zeros allowed: any number of parts, e.g. queries, keys and values.
    contiguous : bool
        Copy what is not contiguous; else the parts are views.

    Returns
    -------
    tuple of torch.Tensor

    Raises
    ------
    ArgumentError
        If `sizes` do not sum to the last dimension.

    Examples
    --------
    >>> import torch
    >>> from varcomm.tensor_parallel.splitting import split_tensor_along_last_dim
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


def split_tensor_into_1d_chunks(tensor: torch.Tensor, group: GroupLike = None) -> torch.Tensor:
    """Assume that `tensor` is replicated, and keep this rank's share of its elements.

    Parameters
    ----------
    tensor : torch.Tensor
        Of any shape, the same on all ranks.
    group : ProcessGroup or DeviceMesh, optional
        The ranks that take part; None is the whole world.

    Returns
    -------
    torch.Tensor
        One dimension: ``ShardSizes.balanced(tensor.numel(), P)[rank]`` elements, in memory of their
        own, so that the whole can be freed.

    Notes
    -----
    Adjoint: :func:`gather_split_1d_tensor`.

    Communication: none; in backward each rank sends the gradient of its share to every other.

    In one process: ``tensor.reshape(-1).split(sizes)``, of which rank r has the r-th.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel.splitting import split_tensor_into_1d_chunks
    >>> varcomm.launch(lambda rank: split_tensor_into_1d_chunks(torch.arange(3).view(3, 1)), 2)
    [tensor([0, 1]), tensor([2])]
    """
    name, ranks = "split_tensor_into_1d_chunks", resolve(group)
    with checking(name, ranks) as where:
        checked_tensor(tensor, where)
    return scattered(name, tensor.reshape(-1), None, 0, group)


def gather_split_1d_tensor(
    piece: torch.Tensor, numel: int | None = None, group: GroupLike = None
) -> torch.Tensor:
    """Assume that the pieces, once gathered, are used alike on all ranks: replicated.

    Parameters
    ----------
    piece : torch.Tensor
        One dimension: this rank's piece.
    numel : int, optional
        Elements of the whole, if the pieces are those of :func:`split_tensor_into_1d_chunks`. None
        asks the ranks for the sizes of their pieces, which costs a round of messages.
    group : ProcessGroup or DeviceMesh, optional
        The ranks that take part; None is the whole world.

    Returns
    -------
    torch.Tensor
        One dimension: the pieces of all ranks; ``view`` gives it its shape.

    Raises
    ------
    ArgumentError
        If `piece` has not one dimension, or not the size that `numel` gives it.

    Notes
    -----
    Adjoint: :func:`split_tensor_into_1d_chunks`.

    Communication: each rank sends its piece to every other, ``P - 1`` times its bytes; none in
    backward.

    In one process: ``torch.cat(pieces)``.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel.splitting import gather_split_1d_tensor
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
    return gathered(name, piece, sizes, 0, group)


def vocab_range(sizes: Sequence[int], rank: int) -> tuple[int, int]:
    """Return the ids of a rank as ``(start, stop)``.

    Parameters
    ----------
    sizes : sequence of int
        Ids that each rank has, zeros allowed: rank 0 the first ``sizes[0]``, and so on.
    rank : int
        Whose ids.

    Returns
    -------
    tuple of int
        The first id, and the one after the last.

    Examples
    --------
    >>> from varcomm.tensor_parallel.splitting import vocab_range
    >>> vocab_range([5, 3], 1)
    (5, 8)
    """
    ids = ShardSizes(sizes).range(rank)
    return ids.start, ids.stop
