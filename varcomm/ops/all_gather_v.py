"""``all_gather_v``: every rank gets the rows of all. Its adjoint is ``reduce_scatter_v``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, overload

import torch

from varcomm.ops import levels, packing
from varcomm.ops.checks import checked_shard, checking
from varcomm.ops.gather_nested import gather_without_sizes
from varcomm.ops.graph_operator import torch_operator
from varcomm.ops.handle import TensorOrHandle, collective
from varcomm.ops.reduction import sum_in_rank_order
from varcomm.ops.rule import Operator
from varcomm.transport.engine import Pending
from varcomm.transport.group import MANY, Group, GroupLike, resolve


@dataclass(frozen=True)
class _Sharded(Operator):
    """The pair's fields: how rows are split, and how sums over ranks are rounded."""

    group: Group
    sizes: tuple[int, ...]
    dim: int
    use_fp32: bool

    def _counts(self, x: torch.Tensor) -> list[int]:
        """Return elements per rank."""
        row = prod(x.shape[1:] if self.dim == 0 else packing.rest(x.shape, self.dim))
        return [rows * row for rows in self.sizes]

    def describe(self, x: torch.Tensor) -> dict[str, Any]:
        return super().describe(x) | {"shape of a row": packing.rest(x.shape, self.dim)}


@torch_operator
class AllGatherV(_Sharded):
    """From each rank's own rows to the rows of all ranks, on every rank."""

    name = "all_gather_v"

    def prepared(self, x: torch.Tensor) -> Callable[[torch.Tensor], Pending]:
        """Send the shard as it lies in memory; for dim != 0, copy once on arrival."""
        group, sizes, dim, recv = self.group, self.sizes, self.dim, self._counts(x)
        if levels.gathers_short(group, sum(recv) * x.element_size(), x.device):
            return self._start_levels
        shape, send = packing.like(x.shape, dim, sum(sizes)), [recv[group.rank]] * group.size
        begin = packing.exchanger(self.name, group, x, send, recv, "all_gather")
        received = shape if dim == 0 else (sum(recv),)
        laid_out = packing.plain if dim == 0 else packing.flat

        def start(x: torch.Tensor) -> Pending:
            out = x.new_empty(received)
            works = begin(out, laid_out(x))
            return Pending(works, lambda: packing.unpack(out, shape, sizes, dim))

        return start

    def _start_levels(self, x: torch.Tensor) -> Pending:
        shape = packing.like(x.shape, self.dim, sum(self.sizes))
        return levels.start_gather(
            self.name,
            self.group,
            packing.flat(x),
            self._counts(x),
            lambda values: packing.unpack(values, shape, self.sizes, self.dim),
            shape,
        )

    def result(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(packing.like(x.shape, self.dim, sum(self.sizes)))

    @property
    def adjoint(self) -> Operator:
        return ReduceScatterV(self.group, self.sizes, self.dim, self.use_fp32)


@torch_operator
class ReduceScatterV(_Sharded):
    """From full tensors on all ranks to each rank's own rows of their sum."""

    name = "reduce_scatter_v"

    def prepared(self, x: torch.Tensor) -> Callable[[torch.Tensor], Pending]:
        """Send each rank its rows in the narrow dtype; the receiver sums them."""
        group, sizes, dim, use_fp32 = self.group, self.sizes, self.dim, self.use_fp32
        send, shape = self._counts(x), packing.like(x.shape, dim, sizes[group.rank])
        if group.size >= MANY:
            return self._start_levels
        begin = packing.exchanger(self.name, group, x, send, [send[group.rank]] * group.size)
        received = (group.size, *shape)

        def start(x: torch.Tensor) -> Pending:
            parts = x.new_empty(received)
            works = begin(parts, packing.pack(x, sizes, dim))
            return Pending(works, lambda: sum_in_rank_order(parts.unbind(), use_fp32))

        return start

    def _start_levels(self, x: torch.Tensor) -> Pending:
        group, packed, shape = (
            self.group,
            packing.pack(x, self.sizes, self.dim),
            self.result(x).shape,
        )
        how = self.name, group, packed, self._counts(x), range(group.size), self.use_fp32
        return levels.InRounds(levels.reduce_scatter(*how), shape, x.dtype)

    def result(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(packing.like(x.shape, self.dim, self.sizes[self.group.rank]))

    @property
    def adjoint(self) -> Operator:
        return AllGatherV(self.group, self.sizes, self.dim, self.use_fp32)


@overload
def all_gather_v(
    tensor: torch.Tensor,
    sizes: Sequence[int] | None = None,
    dim: int = 0,
    use_fp32: bool = True,
    group: GroupLike = None,
    *,
    async_op: bool = False,
) -> TensorOrHandle: ...


@overload
def all_gather_v(
    tensor: Mapping[Any, Any] | Sequence[Any],
    sizes: None = None,
    dim: int = 0,
    use_fp32: bool = True,
    group: GroupLike = None,
) -> Any: ...


def all_gather_v(
    tensor: Any,
    sizes: Sequence[int] | None = None,
    dim: int = 0,
    use_fp32: bool = True,
    group: GroupLike = None,
    *,
    async_op: bool = False,
) -> Any:
    """Concatenate the uneven shards of all ranks, on every rank.

    Parameters
    ----------
    tensor : torch.Tensor
        This rank's shard, with ``sizes[rank]`` rows along `dim`; any dtype. If `sizes` is None,
        `tensor` may also be a scalar (one row), or a tuple, list or dictionary of tensors and None,
        with the same structure on all ranks. A list whose items have one kind is refused, because
        the items may belong to samples: gather their rows and counts.
    sizes : sequence of int, optional
        Rows per rank along `dim`, identical on all ranks; zeros are allowed. If None, ranks
        exchange their sizes first.
    dim : int
        Sharded dimension.
    use_fp32 : bool
        In the adjoint, sum floats narrower than 4 bytes in fp32 and round once.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None means the whole world.
    async_op : bool
        Return a :class:`~varcomm.Handle`; call its ``wait()``.

    Returns
    -------
    torch.Tensor or Handle
        ``sum(sizes)`` rows along `dim`, shard after shard in rank order; dtype of `tensor`. Nested
        tensors keep their structure.

    Raises
    ------
    DisagreementError
        Without `sizes`, on every rank, if ranks differ in structure, dtypes, ``requires_grad``,
        `dim`, or other dimensions.

    See Also
    --------
    gather_v, reduce_scatter_v, indexed_all_to_all_v

    Notes
    -----
    Adjoint: :func:`reduce_scatter_v` with the same arguments.
    Communication: each rank sends its shard to every other rank. For ``dim=0`` nothing is copied;
    for other dimensions, rows are copied once on arrival. From 16 ranks on, CPU shards of up to 4
    KiB (mean) are gathered in levels, as in :func:`reduce_scatter_v`: the same bytes in ``k
    P^(1/k)`` messages per rank.

    Without `sizes`, ranks first share 1 KiB each (a large nested structure: more) in one more
    round, but not in backward. Nested tensors with a gradient are sent in one exchange per dtype,
    all others in one; they are copied on both sides. Inside ``torch.func`` and in forward mode each
    tensor is sent separately. `async_op` needs one tensor.

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
    if sizes is None:

        def one(x: torch.Tensor, rows: Sequence[int], at: int) -> TensorOrHandle:
            return collective(all_gather_operator, ranks, x, rows, (at, use_fp32), async_op)

        how = dim, None, use_fp32, async_op
        return gather_without_sizes("all_gather_v", ranks, tensor, *how, one)
    return collective(all_gather_operator, ranks, tensor, sizes, (dim, use_fp32), async_op)


def all_gather_operator(
    ranks: Group, x: torch.Tensor, sizes: Sequence[int], dim: int, use_fp32: bool
) -> AllGatherV:
    """Return the operator of a call, whose arguments it checks."""
    with checking("all_gather_v", ranks, use_fp32=use_fp32) as where:
        return AllGatherV(ranks, *checked_shard(x, sizes, dim, ranks, where), use_fp32)
