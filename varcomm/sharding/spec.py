"""``ShardSpec``: how a tensor is sharded, and marks of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import torch

from varcomm.errors import ArgumentError
from varcomm.ops.all_gather_v import all_gather_v
from varcomm.ops.checks import SHARD_MARK, checked_tensor, checking, shard_of
from varcomm.ops.gather_v import gather_v
from varcomm.sharding.optimizers import check_steps
from varcomm.sizes import ShardSizes, checked_dim, checked_sizes, exact_int
from varcomm.transport.group import Group, GroupLike, OfGroup, resolve

T = TypeVar("T", bound=torch.Tensor)


@dataclass(frozen=True)
class ShardSpec(OfGroup):
    """How a tensor is sharded: along one dimension, in one block or several fused blocks.

    In a fused weight, such as queries, keys and values, each rank has a part of each block.

    Attributes
    ----------
    group : Group
        Ranks that share the tensor.
    dim : int
        Sharded dimension, not negative.
    blocks : tuple of ShardSizes
        Rows per rank of each block.

    See Also
    --------
    shard_spec, varcomm.sharding.Sharded

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.sharding import ShardSpec
    >>> def fn(rank):
    ...     spec = ShardSpec.of([[2, 1], [1, 1]])  # rows 0, 1, 2 and rows 3, 4
    ...     own = spec.shard(torch.arange(5))
    ...     return spec.ranges(rank), own.tolist(), spec.gather(own).tolist()
    >>> varcomm.launch(fn, 2)[1]
    ([(2, 3), (4, 5)], [2, 4], [0, 1, 2, 3, 4])
    """

    group: Group = field(repr=False)
    dim: int
    blocks: tuple[ShardSizes, ...]

    _instead_of_pickle = "Pickle the state_dict() of a sharded layer."

    @classmethod
    def of(
        cls,
        sizes: Sequence[int] | Sequence[Sequence[int]],
        dim: int = 0,
        group: GroupLike = None,
    ) -> Self:
        """Make a spec from the sizes of one block, or from a list of sizes of several blocks.

        ArgumentError if a block does not have one int per rank, or dim is negative.
        """
        ranks = resolve(group)
        given: Any = list(sizes) if isinstance(sizes, Sequence) else sizes
        several = isinstance(given, list) and any(isinstance(block, Sequence) for block in given)
        blocks = (checked_sizes(b, "sizes", ranks.size) for b in (given if several else [given]))
        return cls(ranks, dim, tuple(map(ShardSizes, blocks)))

    def __post_init__(self) -> None:
        if exact_int(self.dim) is None or self.dim < 0:
            raise ArgumentError(f"dim of a ShardSpec must be a non-negative int; got {self.dim!r}.")

    @property
    def sizes(self) -> ShardSizes:
        """Rows per rank of all blocks together."""
        return ShardSizes(sum(rows) for rows in zip(*self.blocks, strict=True))

    @property
    def local(self) -> int:
        """Rows of this rank."""
        return self.sizes[self.group.rank]

    @property
    def total(self) -> int:
        """Rows of all ranks."""
        return sum(block.total for block in self.blocks)

    def ranges(self, rank: int) -> list[tuple[int, int]]:
        """Return the rows of the full tensor that a rank has: ``(start, stop)`` per block."""
        first, found = 0, []
        for block in self.blocks:
            rows = block.range(rank)
            found.append((first + rows.start, first + rows.stop))
            first += block.total
        return found

    def shard(self, whole: torch.Tensor) -> torch.Tensor:
        """Return a copy of this rank's part of the full tensor; no communication."""
        self._check_rows(whole, self.total, "whole")
        ranges = self.ranges(self.group.rank)
        return torch.cat([whole.narrow(self.dim, a, b - a) for a, b in ranges], self.dim)

    def gather(self, local: torch.Tensor, dst: int | None = None) -> torch.Tensor:
        """Return the full tensor on every rank, or on rank `dst`; collective, differentiable.

        Ranks other than `dst` receive zero rows, as from :func:`varcomm.gather_v`.
        """
        with checking("ShardSpec.gather", self.group):
            self.check_local(local)
        pg = self.group.process_group
        if dst is None:
            whole = all_gather_v(local, self.sizes, self.dim, group=pg)
        else:
            whole = gather_v(local, self.sizes, self.dim, dst, group=pg)
        return self.ordered(whole, self.dim) if dst in (None, self.group.rank) else whole

    def ordered(self, by_rank: torch.Tensor, dim: int) -> torch.Tensor:
        """Reorder rows along `dim` from rank by rank to block by block."""
        rows = [n for sizes in zip(*self.blocks, strict=True) for n in sizes]
        return self._regrouped(by_rank, rows, len(self.blocks), dim)

    def by_rank(self, ordered: torch.Tensor, dim: int) -> torch.Tensor:
        """Reorder rows along `dim` from block by block to rank by rank."""
        rows = [n for sizes in self.blocks for n in sizes]
        return self._regrouped(ordered, rows, self.group.size, dim)

    def _regrouped(self, x: torch.Tensor, rows: list[int], count: int, dim: int) -> torch.Tensor:
        if len(self.blocks) == 1:
            return x
        parts = x.split(rows, dim)
        return torch.cat([part for first in range(count) for part in parts[first::count]], dim)

    def check_local(self, tensor: torch.Tensor) -> None:
        """Raise ArgumentError unless a tensor has as many rows as this rank's part."""
        self._check_rows(tensor, self.local, f"part of {self.group}")

    def _check_rows(self, tensor: torch.Tensor, rows: int, which: str) -> None:
        checked_tensor(tensor, f"{self}: ", which)
        checked_dim(self.dim, tensor.shape, f"{self}: ")
        if tensor.shape[self.dim] != rows:
            raise ArgumentError(
                f"{self}: the {which} has {rows} rows along dim {self.dim}; got a tensor of shape "
                f"{tuple(tensor.shape)}."
            )


@dataclass(frozen=True)
class _Mark:
    """The mark of a parameter; pickled with a parameter, it becomes an empty tuple."""

    spec: ShardSpec

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.Size, ()


def mark(param: T, spec: ShardSpec) -> T:
    """Mark a parameter as this rank's part of a sharded parameter, and return it.

    torch drops the mark when it copies a parameter or moves a module off the meta device. State
    dicts do not contain marks.

    Parameters
    ----------
    param : torch.Tensor
        The rows of this rank.
    spec : ShardSpec
        The sizes of all ranks, the sharded dimension, and the group.

    Returns
    -------
    torch.Tensor
        `param`.

    Raises
    ------
    ArgumentError
        If the number of rows of `param` is not this rank's number of rows in `spec`. Also raised
        by ``step()`` of an optimizer that computes with whole tensors, such as LBFGS, Muon,
        Adafactor, Shampoo, SOAP or LAMB, if it has a marked parameter.

    See Also
    --------
    Sharded, varcomm.tensor_parallel.shard_spec

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.sharding import ShardSpec, mark, shard_spec
    >>> def fn(rank):
    ...     weight = mark(torch.nn.Parameter(torch.zeros(rank + 1, 4)), ShardSpec.of([1, 2]))
    ...     return shard_spec(weight).sizes
    >>> varcomm.launch(fn, 2)
    [ShardSizes(1, 2), ShardSizes(1, 2)]
    """
    spec.check_local(param)
    setattr(param, SHARD_MARK, _Mark(spec))
    check_steps()
    return param


def shard_spec(param: torch.Tensor) -> ShardSpec | None:
    """Return the ShardSpec of a parameter, or None if :func:`mark` has not marked it.

    Parameters
    ----------
    param : torch.Tensor
        A parameter of any shape.

    Returns
    -------
    ShardSpec or None

    See Also
    --------
    ShardSpec, varcomm.sharding.mark

    Examples
    --------
    >>> import torch
    >>> from varcomm.sharding import shard_spec
    >>> print(shard_spec(torch.nn.Parameter(torch.zeros(4))))
    None
    """
    return shard_of(param)  # type: ignore[no-any-return]
