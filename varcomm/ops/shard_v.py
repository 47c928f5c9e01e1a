"""``shard_v``: keep this rank's rows of a replicated tensor. Its adjoint pads with zeros."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from varcomm.ops.checks import checked_whole, checking
from varcomm.ops.graph_operator import in_graph
from varcomm.transport.agreement import compare, debugging
from varcomm.transport.group import GroupLike, resolve


def shard_v(
    tensor: torch.Tensor,
    sizes: Sequence[int],
    dim: int = 0,
    group: GroupLike = None,
) -> torch.Tensor:
    """Keep this rank's rows of a tensor that every rank has.

    Parameters
    ----------
    tensor : torch.Tensor
        ``sum(sizes)`` rows along `dim`; any dtype.
    sizes : sequence of int
        Rows per rank along `dim`, identical on all ranks; zeros are allowed.
    dim : int
        Sharded dimension.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None means the whole world.

    Returns
    -------
    torch.Tensor
        ``sizes[rank]`` rows along `dim`: a view of `tensor`, as from :meth:`torch.Tensor.narrow`.

    Raises
    ------
    ArgumentError
        If an argument is wrong: on this rank, before any message.

    See Also
    --------
    scatter_v, all_gather_v

    Notes
    -----
    Adjoint: the gradient rows at their places in a tensor of zeros, which is this rank's part of
    the gradient.
    Communication: none, except that ranks compare `sizes` and `dim` inside :func:`varcomm.debug`.
    In one process: rank r has ``tensor.split(sizes, dim)[r]``.

    Examples
    --------
    >>> import torch, varcomm
    >>> def fn(rank):
    ...     whole = torch.arange(3.0, requires_grad=True)
    ...     varcomm.shard_v(whole, [1, 2]).sum().backward()
    ...     return whole.grad
    >>> varcomm.launch(fn, 2)
    [tensor([1., 0., 0.]), tensor([0., 1., 1.])]
    """
    ranks = resolve(group)
    with checking("shard_v", ranks) as where:
        sizes, dim = checked_whole(tensor, sizes, dim, ranks, where)
    if debugging() and not in_graph(tensor):
        compare(ranks, {"operation": "shard_v", "dim": dim, "sizes": list(sizes)})
    return tensor.narrow(dim, sum(sizes[: ranks.rank]), sizes[ranks.rank])
