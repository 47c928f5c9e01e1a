"""``gather_v``: the root gets the rows of all; and its adjoint ``scatter_v``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, overload

import torch

from varcomm.errors import ArgumentError
from varcomm.ops import packing
from varcomm.ops.checks import checked_shard, checked_tensor, checked_whole, checking
from varcomm.ops.gather_nested import gather_without_sizes
from varcomm.ops.graph_operator import torch_operator
from varcomm.ops.handle import TensorOrHandle, collective, start_or_apply
from varcomm.ops.root_input import compare_like, known_input, root_input, transforms_of
from varcomm.ops.rule import Operator
from varcomm.sizes import checked_dim, checked_rank, checked_sizes
from varcomm.transport.engine import Pending
from varcomm.transport.group import Group, GroupLike, resolve


@dataclass(frozen=True)
class _Rooted(Operator):
    """The pair's fields: `shape` at the root, `elsewhere` on other ranks."""

    group: Group
    sizes: tuple[int, ...]
    dim: int
    root: int
    shape: tuple[int, ...]
    elsewhere: tuple[int, ...]


@torch_operator
@dataclass(frozen=True)
class GatherV(_Rooted):
    """From each rank's own rows to the rows of all ranks at the root."""

    name = "gather_v"

    def prepared(self, x: torch.Tensor) -> Callable[[torch.Tensor], Pending]:
        group, shape, sizes, dim = self.group, self.shape, self.sizes, self.dim
        elsewhere = self.elsewhere
        row, at_root = prod(packing.rest(shape, dim)), group.rank == self.root
        send = [sizes[group.rank] * row * (rank == self.root) for rank in range(group.size)]
        recv = [rows * row * at_root for rows in sizes]
        begin = packing.exchanger(self.name, group, x, send, recv, "one")
        received = sum(recv)

        def start(x: torch.Tensor) -> Pending:
            out = x.new_empty(received)
            works = begin(out, packing.flat(x))
            if at_root:
                return Pending(works, lambda: packing.unpack(out, shape, sizes, dim))
            return Pending(works, lambda: x.new_zeros(elsewhere))

        return start

    def result(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(self.shape if self.group.rank == self.root else self.elsewhere)

    @property
    def adjoint(self) -> ScatterV:
        return ScatterV(self.group, self.sizes, self.dim, self.root, self.shape, self.elsewhere)


@torch_operator
@dataclass(frozen=True)
class ScatterV(_Rooted):
    """From the full tensor at the root to each rank's own rows."""

    name = "scatter_v"

    def prepared(self, x: torch.Tensor) -> Callable[[torch.Tensor], Pending]:
        group, sizes, dim, shape = self.group, self.sizes, self.dim, self._own_shape()
        row, at_root = prod(packing.rest(self.shape, dim)), group.rank == self.root
        send = [rows * row * at_root for rows in sizes]
        received = prod(shape)
        recv = [received * (other == self.root) for other in range(group.size)]
        begin = packing.exchanger(self.name, group, x, send, recv, "one")

        def start(x: torch.Tensor) -> Pending:
            out = x.new_empty(received)
            works = begin(out, packing.pack(x, sizes, dim) if at_root else out[:0])
            return Pending(works, lambda: out.view(shape))

        return start

    def result(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(self._own_shape())

    def _own_shape(self) -> tuple[int, ...]:
        return packing.like(self.shape, self.dim, self.sizes[self.group.rank])

    @property
    def adjoint(self) -> GatherV:
        return GatherV(self.group, self.sizes, self.dim, self.root, self.shape, self.elsewhere)


@overload
def gather_v(
    tensor: torch.Tensor,
    sizes: Sequence[int] | None = None,
    dim: int = 0,
    dst: int = 0,
    group: GroupLike = None,
    *,
    async_op: bool = False,
) -> TensorOrHandle: ...


@overload
def gather_v(
    tensor: Mapping[Any, Any] | Sequence[Any],
    sizes: None = None,
    dim: int = 0,
    dst: int = 0,
    group: GroupLike = None,
) -> Any: ...


def gather_v(
    tensor: Any,
    sizes: Sequence[int] | None = None,
    dim: int = 0,
    dst: int = 0,
    group: GroupLike = None,
    *,
    async_op: bool = False,
) -> Any:
    """Concatenate the uneven shards of all ranks on one rank.

    Parameters
    ----------
    tensor : torch.Tensor
        This rank's shard, with ``sizes[rank]`` rows along `dim`; any dtype. If `sizes` is None,
        also a nested value, as :func:`all_gather_v` describes.
    sizes : sequence of int, optional
        Rows per rank along `dim`, identical on all ranks; zeros are allowed. If None, ranks
        exchange their sizes first.
    dst : int
        The rank, within `group`, that receives the result.
    dim : int
        Sharded dimension.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None means the whole world.
    async_op : bool
        Return a :class:`~varcomm.Handle`; call its ``wait()``.

    Returns
    -------
    torch.Tensor or Handle
        On `dst`, ``sum(sizes)`` rows along `dim`, shard after shard in rank order; dtype of
        `tensor`. On other ranks, a tensor of zero rows that belongs to the autograd graph, because
        every rank enters backward.

    Raises
    ------
    ArgumentError
        If an argument is wrong: on this rank, before any message.

    See Also
    --------
    scatter_v, all_gather_v

    Notes
    -----
    Adjoint: :func:`scatter_v` from `dst`.
    Communication: each rank but `dst` sends its shard. For ``dim=0`` nothing is copied; for other
    dimensions, rows are copied once on arrival. Without `sizes`, ranks first share 1 KiB each.
    In one process: ``torch.cat(shards, dim)``.

    Examples
    --------
    >>> import torch, varcomm
    >>> def fn(rank):
    ...     return varcomm.gather_v(torch.full((rank + 1,), rank), [1, 2])
    >>> varcomm.launch(fn, 2)
    [tensor([0, 1, 1]), tensor([], dtype=torch.int64)]
    """
    ranks = resolve(group)
    if sizes is None:

        def one(x: torch.Tensor, rows: Sequence[int], at: int) -> TensorOrHandle:
            return collective(_gather, ranks, x, rows, (at, dst), async_op)

        return gather_without_sizes("gather_v", ranks, tensor, dim, dst, True, async_op, one)
    return collective(_gather, ranks, tensor, sizes, (dim, dst), async_op)


def _gather(ranks: Group, x: torch.Tensor, sizes: Sequence[int], dim: int, dst: int) -> GatherV:
    with checking("gather_v", ranks) as where:
        sizes, dim = checked_shard(x, sizes, dim, ranks, where)
        root = checked_rank(dst, ranks.size, "dst", where)
    shape = packing.like(x.shape, dim, sum(sizes))
    return GatherV(ranks, sizes, dim, root, shape, elsewhere=packing.like(shape, dim, 0))


def scatter_v(
    tensor: torch.Tensor | None,
    sizes: Sequence[int],
    dim: int = 0,
    src: int = 0,
    group: GroupLike = None,
    *,
    like: torch.Tensor | None = None,
    async_op: bool = False,
) -> TensorOrHandle:
    """Split the tensor of one rank into uneven shards, one per rank.

    Parameters
    ----------
    tensor : torch.Tensor or None
        On `src`, ``sum(sizes)`` rows along `dim`; any dtype. On other ranks, ``tensor`` is not read
        and may be None, and its gradient is zeros.
    src : int
        The rank, within `group`, that has the full tensor.
    sizes : sequence of int
        Rows per rank along `dim`, identical on all ranks; zeros are allowed.
    dim : int
        Sharded dimension.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None means the whole world.
    async_op : bool
        Return a :class:`~varcomm.Handle`; call its ``wait()``.
    like : torch.Tensor, optional
        A tensor with the dtype, device type, ``requires_grad`` and other dimensions of the tensor
        on `src`, such as ``torch.empty(0, 64)``, passed on all ranks or on none. It is not read,
        and on other ranks its gradient is zeros. `src` then sends no description.

    Returns
    -------
    torch.Tensor or Handle
        ``sizes[rank]`` rows along `dim`; dtype of the tensor on `src`.

    Raises
    ------
    ArgumentError
        On every rank, before any data moves, if `tensor` does not match `sizes` and `dim` on `src`.
        With `like`, only `src` raises, even if its tensor does not match `like`.
    DisagreementError
        On a rank whose `sizes` differ from the `sizes` on `src`. With `like`, only inside
        :func:`varcomm.debug`.

    See Also
    --------
    gather_v, broadcast, shard_v

    Notes
    -----
    Adjoint: :func:`gather_v` to `src`.

    Backward is collective: for ``torch.autograd.grad``, pass ``torch.empty(0, requires_grad=True)``
    in place of None, or as `like`, and ask for its gradient.
    Communication: without `like`, `src` first sends a description of 1 KiB. Then `src` sends each
    other rank its shard. For ``dim=0`` nothing is copied; for other dimensions, rows are copied
    once on departure.
    In one process: rank r has ``tensor.split(sizes, dim)[r]``.

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
    if like is not None:
        known, of_like = known_input("scatter_v", tensor, like, src, ranks)
        return collective(_scatter, ranks, known, sizes, (dim, src, of_like), async_op)
    with checking("scatter_v", ranks, async_op=async_op) as where:
        sizes = checked_sizes(sizes, "sizes", ranks.size, where)
        src = checked_rank(src, ranks.size, "src", where)

    def check(whole: torch.Tensor) -> None:
        checked_whole(whole, sizes, dim, ranks, where)

    x, shape = root_input("scatter_v", tensor, src, ranks, check, sizes)
    with checking("scatter_v", ranks):
        dim = checked_dim(dim, shape, where)
    return start_or_apply(ScatterV(ranks, sizes, dim, src, shape, (0,)), x, async_op)


def _scatter(
    ranks: Group,
    x: torch.Tensor,
    sizes: Sequence[int],
    dim: int,
    src: int,
    like: torch.Size,
) -> ScatterV:
    """Return the operator of a call with `like`, of that shape."""
    with checking("scatter_v", ranks) as where:
        sizes = checked_sizes(sizes, "sizes", ranks.size, where)
        src = checked_rank(src, ranks.size, "src", where)
        checked_tensor(x, where, "tensor" if ranks.rank == src else "like")
        dim = checked_dim(dim, like, where)
        shape = packing.like(like, dim, sum(sizes))
        if ranks.rank == src and x.shape != shape:
            raise ArgumentError(
                f"{where}the tensor has shape {tuple(x.shape)}; sizes {list(sizes)} and the other "
                f"dimensions of like, of shape {tuple(like)}, need {shape}."
            )
    compare_like("scatter_v", src, ranks, sizes, like="given", transforms=transforms_of(x))
    return ScatterV(ranks, sizes, dim, src, shape, tuple(like))
