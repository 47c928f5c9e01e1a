"""``all_gather_v``: every rank gets the rows of all. Its adjoint is ``reduce_scatter_v``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, overload

import torch

from varcomm.ops import packing
from varcomm.ops.checks import checked_shard
from varcomm.ops.handle import Handle, run
from varcomm.ops.library import torch_operator
from varcomm.ops.operator import Operator, checking
from varcomm.ops.reduction import sum_in_rank_order
from varcomm.transport.engine import Pending
from varcomm.transport.group import Group, GroupLike, resolve

__all__ = ["AllGatherV", "ReduceScatterV", "all_gather_v"]


@torch_operator
@dataclass(frozen=True)
class AllGatherV(Operator):
    """From its own rows on each rank to the rows of all on every rank."""

    name = "all_gather_v"
    group: Group
    sizes: tuple[int, ...]
    dim: int
    use_fp32: bool

    def start(self, x: torch.Tensor) -> Pending:
        """Send the shard as it lies in memory; whoever has dim != 0 copies once on arrival."""
        row = prod(packing.rest(x.shape, self.dim))
        counts = [rows * row for rows in self.sizes]
        works, values = packing.all_gather(self.name, self.group, packing.flat(x), counts)
        shape, into = packing.like(x.shape, self.dim, sum(self.sizes)), packing.memory_format(x)
        return Pending(works, lambda: packing.unpack(values, shape, self.sizes, self.dim, into))

    def result(self, x: torch.Tensor) -> torch.Tensor:
        return packing.new(x, packing.like(x.shape, self.dim, sum(self.sizes)))

    @property
    def adjoint(self) -> Operator:
        return ReduceScatterV(self.group, self.sizes, self.dim, self.use_fp32)

    def describe(self, x: torch.Tensor) -> dict[str, Any]:
        return _describe(self, x)


@torch_operator
@dataclass(frozen=True)
class ReduceScatterV(Operator):
    """From a whole on each rank to each rank's own rows of the sum of all wholes."""

    name = "reduce_scatter_v"
    group: Group
    sizes: tuple[int, ...]
    dim: int
    use_fp32: bool

    def start(self, x: torch.Tensor) -> Pending:
        """Send each rank its rows in the narrow dtype; it sums what it gets."""
        row = prod(packing.rest(x.shape, self.dim))
        mine = self.sizes[self.group.rank]
        shape, into = packing.like(x.shape, self.dim, mine), packing.memory_format(x)
        send, recv = [rows * row for rows in self.sizes], [mine * row] * self.group.size
        packed = packing.pack(x, self.sizes, self.dim)
        works, values = packing.exchange(self.name, self.group, packed, send, recv)

        def finish() -> torch.Tensor:
            total = sum_in_rank_order(values.view(self.group.size, *shape), self.use_fp32)
            return total.contiguous(memory_format=into)

        return Pending(works, finish)

    def result(self, x: torch.Tensor) -> torch.Tensor:
        return packing.new(x, packing.like(x.shape, self.dim, self.sizes[self.group.rank]))

    @property
    def adjoint(self) -> AllGatherV:
        return AllGatherV(self.group, self.sizes, self.dim, self.use_fp32)

    def describe(self, x: torch.Tensor) -> dict[str, Any]:
        return _describe(self, x)


def _describe(operator: AllGatherV | ReduceScatterV, x: torch.Tensor) -> dict[str, Any]:
    return {
        "dim": operator.dim,
        "sizes": list(operator.sizes),
        "shape of a row": packing.rest(x.shape, operator.dim),
        "use_fp32": operator.use_fp32,
    }


@overload
def all_gather_v(
    tensor: torch.Tensor,
    sizes: Sequence[int],
    dim: int = 0,
    use_fp32: bool = True,
    group: GroupLike = None,
    *,
    async_op: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def all_gather_v(
    tensor: torch.Tensor,
    sizes: Sequence[int],
    dim: int = 0,
    use_fp32: bool = True,
    group: GroupLike = None,
    *,
    async_op: Literal[True],
) -> Handle: ...
def all_gather_v(
    tensor: torch.Tensor,
    sizes: Sequence[int],
    dim: int = 0,
    use_fp32: bool = True,
    group: GroupLike = None,
    *,
    async_op: bool = False,
) -> torch.Tensor | Handle:
    """Concatenate the uneven shards of all ranks, on every rank.

    Parameters
    ----------
    tensor : torch.Tensor
        This rank's shard, with ``sizes[rank]`` rows along `dim`; any dtype. The other dimensions
        are the same on all ranks.
    sizes : sequence of int
        Rows that each rank holds, one int a rank, zeros allowed; the same on all ranks.
    dim : int
        The sharded dimension.
    use_fp32 : bool
        How the adjoint sums floats narrower than 4 bytes: in fp32, rounded once, or in their own
        dtype. It does not change the forward.
    group : ProcessGroup or DeviceMesh, optional
        The ranks that take part; None is the whole world.
    async_op : bool
        Return a :class:`~varcomm.Handle` at once, and communicate until its ``wait()``.

    Returns
    -------
    torch.Tensor or Handle
        ``sum(sizes)`` rows along `dim`, shard after shard in rank order; dtype and memory format of
        `tensor`.

    Raises
    ------
    ArgumentError
        Before any communication, if `sizes`, `dim` and `tensor` do not fit on this rank.
    GroupError
        If this rank is not in `group`, or the group does not communicate on the tensor's device.

    Notes
    -----
    Adjoint: :func:`reduce_scatter_v` with the same arguments.

    Communication: each rank sends its shard to every other, ``P - 1`` times its bytes, and receives
    every other shard once; nothing is padded. No copy for ``dim=0``, one on arrival for others.

    In one process: ``torch.cat(shards, dim)``.

    Examples
    --------
    >>> import torch, varcomm
    >>> def fn(rank):
    ...     shard = torch.full((rank + 1,), float(rank), requires_grad=True)
    ...     whole = varcomm.all_gather_v(shard, [1, 2])
    ...     whole.sum().backward()
    ...     return whole.tolist(), shard.grad.tolist()
    >>> varcomm.launch(fn, 2)
    [([0.0, 1.0, 1.0], [2.0]), ([0.0, 1.0, 1.0], [2.0, 2.0])]
    """
    ranks = resolve(group)
    with checking("all_gather_v", ranks, use_fp32=use_fp32, async_op=async_op) as where:
        operator = AllGatherV(ranks, *checked_shard(tensor, sizes, dim, ranks, where), use_fp32)
    return run(operator, tensor, async_op)
