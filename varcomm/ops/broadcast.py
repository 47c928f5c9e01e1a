"""``broadcast``: every rank gets what the root has. Its adjoint is ``reduce``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal, Self, overload

import torch

from varcomm.ops import packing
from varcomm.ops.handle import Handle, run
from varcomm.ops.operator import Operator, checking, torch_operator
from varcomm.ops.reduction import pieces, sum_in_rank_order
from varcomm.ops.root_input import root_input
from varcomm.sizes import checked_rank
from varcomm.transport.engine import Pending
from varcomm.transport.group import Group, GroupLike, resolve

__all__ = ["Broadcast", "Reduce", "broadcast"]


@dataclass(frozen=True)
class _Rooted(Operator):
    """What the pair shares.

    `shape` is that of the tensor, `elsewhere` that of what stands in its place off the root.
    """

    group: Group
    root: int
    shape: tuple[int, ...]
    elsewhere: tuple[int, ...]
    use_fp32: bool

    def describe(self, x: torch.Tensor) -> dict[str, Any]:
        return {"root": self.root, "shape": list(self.shape), "use_fp32": self.use_fp32}


@torch_operator
@dataclass(frozen=True)
class Broadcast(_Rooted):
    """From the tensor at the root to the same on every rank."""

    name = "broadcast"
    into: torch.memory_format = torch.contiguous_format

    def start(self, x: torch.Tensor) -> Pending:
        if self.group.rank == self.root:
            plain = x.resolve_conj().resolve_neg()
            values = plain.clone(memory_format=torch.contiguous_format).view(-1)
        else:
            values = x.new_empty(prod(self.shape))
        works = packing.broadcast(self.name, self.group, values, self.root)
        return Pending(works, lambda: values.view(self.shape).contiguous(memory_format=self.into))

    def result(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(self.shape).contiguous(memory_format=self.into)

    @property
    def adjoint(self) -> Reduce:
        return Reduce(self.group, self.root, self.shape, self.elsewhere, self.use_fp32)


@torch_operator
@dataclass(frozen=True)
class Reduce(_Rooted):
    """From a tensor on each rank to the sum of all at the root."""

    name = "reduce"
    one_round: bool = False

    def start(self, x: torch.Tensor) -> Pending:
        values, rank, ranks = packing.flat(x), self.group.rank, self.group.size
        into, at_root = packing.memory_format(x), self.group.rank == self.root
        counts = pieces(x, self.group, self.one_round)
        if counts is None:
            send = [x.numel() * (r == self.root) for r in range(ranks)]
            recv = [x.numel() * at_root] * ranks
            works, got = packing.exchange(self.name, self.group, values, send, recv, "one")

            def finish() -> torch.Tensor:
                if not at_root:
                    return x.new_zeros(self.elsewhere)
                total = sum_in_rank_order(got.view(ranks, *self.shape), self.use_fp32)
                return total.contiguous(memory_format=into)

            return Pending(works, finish)
        works, got = packing.exchange(self.name, self.group, values, counts, [counts[rank]] * ranks)

        def finish_by_pieces() -> torch.Tensor:
            piece = sum_in_rank_order(got.view(ranks, counts[rank]), self.use_fp32)
            send = [counts[rank] * (r == self.root) for r in range(ranks)]
            recv = [count * at_root for count in counts]
            works, total = packing.exchange(self.name, self.group, piece, send, recv, "one")
            Pending(works, lambda: total).wait()
            if not at_root:
                return x.new_zeros(self.elsewhere)
            return total.view(self.shape).contiguous(memory_format=into)

        return Pending(works, finish_by_pieces)

    def result(self, x: torch.Tensor) -> torch.Tensor:
        if self.group.rank != self.root:
            return x.new_empty(self.elsewhere)
        return packing.new(x, self.shape)

    @property
    def in_one_round(self) -> Self:
        return replace(self, one_round=True)

    def describe(self, x: torch.Tensor) -> dict[str, Any]:
        return super().describe(x) | {"async_op": self.one_round}

    @property
    def adjoint(self) -> Broadcast:
        return Broadcast(self.group, self.root, self.shape, self.elsewhere, self.use_fp32)


@overload
def broadcast(
    tensor: torch.Tensor | None,
    src: int = 0,
    use_fp32: bool = True,
    group: GroupLike = None,
    *,
    async_op: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def broadcast(
    tensor: torch.Tensor | None,
    src: int = 0,
    use_fp32: bool = True,
    group: GroupLike = None,
    *,
    async_op: Literal[True],
) -> Handle: ...
def broadcast(
    tensor: torch.Tensor | None,
    src: int = 0,
    use_fp32: bool = True,
    group: GroupLike = None,
    *,
    async_op: bool = False,
) -> torch.Tensor | Handle:
    """Copy a tensor that one rank has to all.

    Parameters
    ----------
    tensor : torch.Tensor or None
        On `src`, any shape and dtype. Elsewhere it is not read and may be None: dtype, shape and
        ``requires_grad`` come from `src`. One that requires a gradient nevertheless gets zeros.
    src : int
        The rank, within `group`, that has the tensor.
    use_fp32 : bool
        In the adjoint: sum floats narrower than 4 bytes in fp32 and round once.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None is the whole world.
    async_op : bool
        Return a :class:`~varcomm.Handle`; call its ``wait()``.

    Returns
    -------
    torch.Tensor or Handle
        On every rank, `src` included, a new tensor; shape, dtype and memory format of the one on
        `src`.

    Raises
    ------
    ArgumentError
        Before any data moves: on every rank, if `tensor` on `src` is no dense tensor; on this rank,
        if `src` is no rank of the group.
    DisagreementError
        On every rank, if transforms of ``torch.func`` reach the tensor on `src`, and those that
        others pass not in the same way.
    GroupError
        If this rank is not in `group`, or the group has no engine for the tensor's device.

    Notes
    -----
    Adjoint: :func:`reduce` to `src`. The gradients of all ranks are summed.

    Backward is collective: ``loss.backward()`` enters it on every rank. For
    ``torch.autograd.grad(loss, inputs)``, which runs only what leads to `inputs`, pass
    ``torch.empty(0, requires_grad=True)`` in place of None and ask for its gradient as well.

    Communication: one message of 1 KiB from `src` to all says what comes, then the tensor follows:
    each other rank receives its bytes once. They come by a tree where the engine has one, in which
    some ranks pass on what they have.

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
    with checking("broadcast", ranks, use_fp32=use_fp32, async_op=async_op) as where:
        src = checked_rank(src, ranks.size, "src", where)
    root = root_input("broadcast", tensor, src, ranks)
    operator = Broadcast(
        ranks, src, root.shape, elsewhere=(0,), use_fp32=use_fp32, into=root.memory_format
    )
    return run(operator, root.tensor, async_op)
