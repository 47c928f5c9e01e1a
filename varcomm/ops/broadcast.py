"""``broadcast``: every rank gets the tensor of the root; and its adjoint ``reduce``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch

from varcomm.errors import ArgumentError
from varcomm.ops.all_reduce import Sum
from varcomm.ops.checks import checked_tensor, checking
from varcomm.ops.graph_operator import torch_operator
from varcomm.ops.handle import TensorOrHandle, collective, start_or_apply
from varcomm.ops.reduction import checked_summable
from varcomm.ops.root_input import compare_like, known_input, root_input, transforms_of
from varcomm.ops.rule import Operator
from varcomm.sizes import checked_rank
from varcomm.transport.engine import Pending, broadcast_route
from varcomm.transport.engines.choose import prepared
from varcomm.transport.group import Group, GroupLike, resolve


@dataclass(frozen=True)
class _Rooted(Operator):
    """The pair's fields: `shape` at the root, `elsewhere` on other ranks."""

    group: Group
    root: int
    shape: tuple[int, ...]
    elsewhere: tuple[int, ...]
    use_fp32: bool


@torch_operator
@dataclass(frozen=True)
class Broadcast(_Rooted):
    """From the tensor at the root to copies on every rank."""

    name = "broadcast"

    def prepared(self, x: torch.Tensor) -> Callable[[torch.Tensor], Pending]:
        group, shape, at_root = self.group, self.shape, self.group.rank == self.root
        route = broadcast_route(group, prod(shape) * x.element_size(), self.root)
        begin = prepared(route, x.device, self.name)

        def start(x: torch.Tensor) -> Pending:
            values = x.new_empty(shape)
            if at_root:
                values.copy_(x)
            return Pending(begin(values, values), lambda: values)

        return start

    def result(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(self.shape)

    @property
    def adjoint(self) -> Reduce:
        return Reduce(self.group, self.root, self.shape, self.elsewhere, self.use_fp32)


@torch_operator
@dataclass(frozen=True)
class Reduce(_Rooted, Sum):
    """From a tensor on each rank to their sum at the root."""

    name = "reduce"
    one_round: bool = False

    def result(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(self.shape if self.group.rank == self.root else self.elsewhere)

    @property
    def adjoint(self) -> Broadcast:
        return Broadcast(self.group, self.root, self.shape, self.elsewhere, self.use_fp32)


def broadcast(
    tensor: torch.Tensor | None,
    src: int = 0,
    use_fp32: bool = True,
    group: GroupLike = None,
    *,
    like: torch.Tensor | None = None,
    async_op: bool = False,
) -> TensorOrHandle:
    """Copy the tensor of one rank to all ranks.

    Parameters
    ----------
    tensor : torch.Tensor or None
        On `src`, any shape and dtype. On other ranks, ``tensor`` is not read and may be None, and
        its gradient is zeros.
    src : int
        The rank, within `group`, that has the tensor.
    use_fp32 : bool
        In the adjoint, sum floats narrower than 4 bytes in fp32 and round once.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None means the whole world.
    async_op : bool
        Return a :class:`~varcomm.Handle`; call its ``wait()``.
    like : torch.Tensor, optional
        A tensor with the shape, dtype, device type and ``requires_grad`` of the tensor on `src`,
        passed on all ranks or on none. It is not read, and on other ranks its gradient is zeros.
        `src` then sends no description.

    Returns
    -------
    torch.Tensor or Handle
        A new tensor; shape and dtype of the tensor on src.

    Raises
    ------
    ArgumentError
        On every rank, before any data moves, if `tensor` on `src` is not a dense tensor. With
        `like`, only `src` raises, even if its tensor does not match `like`.

    See Also
    --------
    reduce, broadcast_module, scatter_v

    Notes
    -----
    Adjoint: :func:`reduce` to `src`. The gradients of all ranks are summed.

    Backward is collective: for ``torch.autograd.grad``, pass ``torch.empty(0, requires_grad=True)``
    in place of None, or a tensor as `like`, and ask for its gradient.
    Communication: without `like`, `src` first sends a description of 1 KiB. Then each other rank
    receives the bytes of the tensor once, through a tree if the engine has one.
    In one process: ``tensor.clone()``.

    Examples
    --------
    >>> import torch, varcomm
    >>> def fn(rank):
    ...     return varcomm.broadcast(torch.tensor([1.5, 2.5]) if rank == 1 else None, src=1)
    >>> varcomm.launch(fn, 2)
    [tensor([1.5000, 2.5000]), tensor([1.5000, 2.5000])]
    """
    ranks = resolve(group)
    if like is not None:
        known, of_like = known_input("broadcast", tensor, like, src, ranks)
        return collective(_broadcast, ranks, known, (), (src, use_fp32, of_like), async_op)
    with checking("broadcast", ranks, use_fp32=use_fp32, async_op=async_op) as where:
        src = checked_rank(src, ranks.size, "src", where)
    x, shape = root_input("broadcast", tensor, src, ranks)
    return start_or_apply(Broadcast(ranks, src, shape, (0,), use_fp32), x, async_op)


def _broadcast(
    ranks: Group,
    x: torch.Tensor,
    _: Sequence[int],
    src: int,
    use_fp32: bool,
    like: torch.Size,
) -> Broadcast:
    """Return the operator of a call with `like`, of that shape."""
    with checking("broadcast", ranks, use_fp32=use_fp32) as where:
        src = checked_rank(src, ranks.size, "src", where)
        checked_tensor(x, where, "tensor" if ranks.rank == src else "like")
        if x.shape != like:
            raise ArgumentError(
                f"{where}the tensor has shape {tuple(x.shape)}, but like has {tuple(like)}."
            )
    compare_like("broadcast", src, ranks, (), like="given", transforms=transforms_of(x))
    return Broadcast(ranks, src, tuple(like), tuple(like), use_fp32)


def reduce(
    tensor: torch.Tensor,
    dst: int = 0,
    use_fp32: bool = True,
    group: GroupLike = None,
    *,
    async_op: bool = False,
) -> TensorOrHandle:
    """Sum the tensors of all ranks on one rank.

    Parameters
    ----------
    tensor : torch.Tensor
        The same shape and dtype on all ranks; bool is refused. It is not changed.
    dst : int
        The rank, within `group`, that gets the sum.
    use_fp32 : bool
        Sum floats narrower than 4 bytes in fp32 and round once.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None means the whole world.
    async_op : bool
        Return a :class:`~varcomm.Handle`; call its ``wait()``.

    Returns
    -------
    torch.Tensor or Handle
        On `dst` the sum, with the same bits in every run; shape and dtype of `tensor`. On other
        ranks, zeros that belong to the autograd graph, because every rank enters backward.

    Raises
    ------
    ArgumentError
        If an argument is wrong: on this rank, before any message.

    See Also
    --------
    broadcast, all_reduce

    Notes
    -----
    Adjoint: :func:`broadcast` from `dst`.
    Communication: each rank sums a piece of ``1 / P`` and sends it to `dst`. Up to 16 KiB, and with
    `async_op`, `dst` sums all pieces in one round. Each other rank sends the bytes of `tensor`
    once. From 16 ranks on, the sum is hierarchical, as in :func:`reduce_scatter_v`, and some ranks
    forward pieces of other ranks.
    In one process: ``sum(tensors)``.

    Examples
    --------
    >>> import torch, varcomm
    >>> varcomm.launch(lambda rank: varcomm.reduce(torch.tensor([rank, 10]), dst=1), 2)
    [tensor([0, 0]), tensor([ 1, 20])]
    """
    return collective(_reduce, resolve(group), tensor, (), (dst, use_fp32), async_op)


def _reduce(ranks: Group, x: torch.Tensor, _: Sequence[int], dst: int, use_fp32: bool) -> Reduce:
    with checking("reduce", ranks, use_fp32=use_fp32) as where:
        checked_summable(x, where, use_fp32)
        dst = checked_rank(dst, ranks.size, "dst", where)
    shape = tuple(x.shape)
    return Reduce(ranks, dst, shape, elsewhere=shape, use_fp32=use_fp32)
