"""``gather_v``: the root gets the rows of all. Its adjoint is ``scatter_v``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, overload

import torch

from varcomm.ops import packing
from varcomm.ops.checks import checked_shard
from varcomm.ops.handle import Handle, run
from varcomm.ops.operator import Operator, checking, torch_operator
from varcomm.sizes import checked_rank
from varcomm.transport.engine import Pending
from varcomm.transport.group import Group, GroupLike, resolve

__all__ = ["GatherV", "ScatterV", "gather_v"]


@dataclass(frozen=True)
class _Rooted(Operator):
    """What the pair shares.

    `shape` is that of the whole at the root, `elsewhere` that of the tensor that stands in its
    place on the other ranks.
    """

    group: Group
    sizes: tuple[int, ...]
    dim: int
    root: int
    shape: tuple[int, ...]
    elsewhere: tuple[int, ...]

    def _counts(self) -> tuple[list[int], list[int]]:
        """Return elements that each rank has at the root, and those that this rank has there."""
        row = prod(packing.rest(self.shape, self.dim))
        at_root, mine = [0] * self.group.size, [0] * self.group.size
        if self.group.rank == self.root:
            at_root = [rows * row for rows in self.sizes]
        mine[self.root] = self.sizes[self.group.rank] * row
        return at_root, mine

    def describe(self, x: torch.Tensor) -> dict[str, Any]:
        return {
            "dim": self.dim,
            "sizes": list(self.sizes),
            "root": self.root,
            "shape of a row": packing.rest(self.shape, self.dim),
        }


@torch_operator
@dataclass(frozen=True)
class GatherV(_Rooted):
    """From its own rows on each rank to the rows of all at the root."""

    name = "gather_v"

    def start(self, x: torch.Tensor) -> Pending:
        at_root, mine = self._counts()
        works, values = packing.exchange(
            self.name, self.group, packing.flat(x), mine, at_root, "one"
        )
        into = packing.memory_format(x)

        def finish() -> torch.Tensor:
            if self.group.rank != self.root:
                return x.new_zeros(self.elsewhere)
            return packing.unpack(values, self.shape, self.sizes, self.dim, into)

        return Pending(works, finish)

    def result(self, x: torch.Tensor) -> torch.Tensor:
        if self.group.rank != self.root:
            return x.new_empty(self.elsewhere)
        return packing.new(x, self.shape)

    @property
    def adjoint(self) -> ScatterV:
        fields = (self.group, self.sizes, self.dim, self.root, self.shape, self.elsewhere)
        return ScatterV(*fields)


@torch_operator
@dataclass(frozen=True)
class ScatterV(_Rooted):
    """From the whole at the root to its own rows on each rank."""

    name = "scatter_v"
    into: torch.memory_format = torch.contiguous_format

    def start(self, x: torch.Tensor) -> Pending:
        at_root, mine = self._counts()
        packed = x.new_empty(0)
        if self.group.rank == self.root:
            packed = packing.pack(x, self.sizes, self.dim)
        works, values = packing.exchange(self.name, self.group, packed, at_root, mine, "one")
        shape = packing.like(self.shape, self.dim, self.sizes[self.group.rank])
        return Pending(works, lambda: values.view(shape).contiguous(memory_format=self.into))

    def result(self, x: torch.Tensor) -> torch.Tensor:
        shape = packing.like(self.shape, self.dim, self.sizes[self.group.rank])
        return x.new_empty(shape).contiguous(memory_format=self.into)

    @property
    def adjoint(self) -> GatherV:
        fields = (self.group, self.sizes, self.dim, self.root, self.shape, self.elsewhere)
        return GatherV(*fields)


@overload
def gather_v(
    tensor: torch.Tensor,
    sizes: Sequence[int],
    dim: int = 0,
    dst: int = 0,
    group: GroupLike = None,
    *,
    async_op: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def gather_v(
    tensor: torch.Tensor,
    sizes: Sequence[int],
    dim: int = 0,
    dst: int = 0,
    group: GroupLike = None,
    *,
    async_op: Literal[True],
) -> Handle: ...
def gather_v(
    tensor: torch.Tensor,
    sizes: Sequence[int],
    dim: int = 0,
    dst: int = 0,
    group: GroupLike = None,
    *,
    async_op: bool = False,
) -> torch.Tensor | Handle:
    """Concatenate the uneven shards of all ranks on one of them.

    Parameters
    ----------
    tensor : torch.Tensor
        This rank's shard, with ``sizes[rank]`` rows along `dim`; any dtype. The other dimensions
        are the same on all ranks.
    sizes : sequence of int
        Rows per rank along `dim`; zeros allowed, identical on all ranks.
    dim : int
        Sharded dimension.
    dst : int
        The rank, within `group`, that gets the whole.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None is the whole world.
    async_op : bool
        Return a :class:`~varcomm.Handle`; call its ``wait()``.

    Returns
    -------
    torch.Tensor or Handle
        On `dst`, ``sum(sizes)`` rows along `dim`, shard after shard in rank order; dtype and memory
        format of `tensor`. Elsewhere a tensor of zero rows, which belongs to the graph as well:
        every rank enters backward, for instance through its ``sum()``.

    Raises
    ------
    ArgumentError
        Before any communication, if `sizes`, `dim`, `dst` and `tensor` do not fit on this rank.
    GroupError
        If this rank is not in `group`, or the group has no engine for the tensor's device.

    Notes
    -----
    Adjoint: :func:`scatter_v` from `dst`.

    Communication: each rank but `dst` sends the bytes of its shard, once; nothing is padded. No
    copy for ``dim=0``, one on arrival for others.

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
    with checking("gather_v", ranks, async_op=async_op) as where:
        sizes, dim = checked_shard(tensor, sizes, dim, ranks, where)
        root = checked_rank(dst, ranks.size, "dst", where)
    shape = packing.like(tensor.shape, dim, sum(sizes))
    operator = GatherV(ranks, sizes, dim, root, shape, elsewhere=packing.like(shape, dim, 0))
    return run(operator, tensor, async_op)
