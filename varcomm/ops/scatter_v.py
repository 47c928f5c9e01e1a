"""``scatter_v``: every rank gets its rows of what the root has. Its adjoint is ``gather_v``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch

from varcomm.ops.checks import checked_whole
from varcomm.ops.gather_v import ScatterV
from varcomm.ops.handle import Handle, run
from varcomm.ops.operator import checking
from varcomm.ops.root_input import root_input
from varcomm.sizes import checked_dim, checked_rank, checked_sizes
from varcomm.transport.group import GroupLike, resolve

__all__ = ["scatter_v"]


@overload
def scatter_v(
    tensor: torch.Tensor | None,
    sizes: Sequence[int],
    dim: int = 0,
    src: int = 0,
    group: GroupLike = None,
    *,
    async_op: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def scatter_v(
    tensor: torch.Tensor | None,
    sizes: Sequence[int],
    dim: int = 0,
    src: int = 0,
    group: GroupLike = None,
    *,
    async_op: Literal[True],
) -> Handle: ...
def scatter_v(
    tensor: torch.Tensor | None,
    sizes: Sequence[int],
    dim: int = 0,
    src: int = 0,
    group: GroupLike = None,
    *,
    async_op: bool = False,
) -> torch.Tensor | Handle:
    """Split a tensor that one rank has into uneven shards, one for each rank.

    Parameters
    ----------
    tensor : torch.Tensor or None
        On `src`, ``sum(sizes)`` rows along `dim`; any dtype. Elsewhere it is not read and may be
        None: dtype, shape and ``requires_grad`` come from `src`. One that requires a gradient
        nevertheless gets zeros.
    sizes : sequence of int
        Rows per rank along `dim`; zeros allowed, identical on all ranks.
    dim : int
        Sharded dimension.
    src : int
        The rank, within `group`, that has the whole.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None is the whole world.
    async_op : bool
        Return a :class:`~varcomm.Handle`; call its ``wait()``.

    Returns
    -------
    torch.Tensor or Handle
        ``sizes[rank]`` rows along `dim`; dtype and memory format of the tensor on `src`.

    Raises
    ------
    ArgumentError
        Before any data moves: on every rank, if `tensor` does not fit `sizes` and `dim` on `src`;
        on this rank, if `sizes`, `dim` or `src` are wrong in themselves.
    DisagreementError
        On a rank whose `sizes` are not those of `src`.
        On every rank, if transforms of ``torch.func`` reach the tensor on `src`, and those that
        others pass not in the same way.
    GroupError
        If this rank is not in `group`, or the group has no engine for the tensor's device.

    Notes
    -----
    Adjoint: :func:`gather_v` to `src`.

    Backward is collective: ``loss.backward()`` enters it on every rank. For
    ``torch.autograd.grad(loss, inputs)``, which runs only what leads to `inputs`, pass
    ``torch.empty(0, requires_grad=True)`` in place of None and ask for its gradient as well.

    Communication: one message of 1 KiB from `src` to all says what comes, then `src` sends each
    other rank its shard: the bytes of `tensor` but for its own rows. Others send nothing; nothing
    is padded. No copy for ``dim=0``, one on departure for others.

    In one process: ``tensor.split(sizes, dim)``, of which rank r has the r-th.

    Examples
    --------
    >>> import torch, varcomm
    >>> def fn(rank):
    ...     whole = torch.arange(3) if rank == 0 else None
    ...     return varcomm.scatter_v(whole, [1, 2])
    >>> varcomm.launch(fn, 2)
    [tensor([0]), tensor([1, 2])]
    """
    ranks = resolve(group)
    with checking("scatter_v", ranks, async_op=async_op) as where:
        sizes = checked_sizes(sizes, "sizes", ranks.size, where)
        src = checked_rank(src, ranks.size, "src", where)

    def check(whole: torch.Tensor) -> None:
        checked_whole(whole, sizes, dim, ranks, where)

    root = root_input("scatter_v", tensor, src, ranks, check, sizes)
    with checking("scatter_v", ranks):
        dim = checked_dim(dim, root.shape, where)
    operator = ScatterV(ranks, sizes, dim, src, root.shape, elsewhere=(0,), into=root.memory_format)
    return run(operator, root.tensor, async_op)
