"""``RaggedSpec``: elements of a tensor in row-major order, in any number of units per rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd, prod
from typing import Any, Self

import torch

from varcomm.errors import ArgumentError
from varcomm.ops.all_gather_v import all_gather_v
from varcomm.ops.all_to_all_v import all_to_all_v
from varcomm.ops.checks import checked_tensor
from varcomm.ops.digest import require_equal
from varcomm.ops.operator import checking
from varcomm.sharding.sharded import Sharded, flat_places
from varcomm.sizes import ShardSizes, checked_sizes
from varcomm.transport.agreement import agree_and_share
from varcomm.transport.group import Group, GroupLike, resolve

__all__ = ["RaggedSpec"]


@dataclass(frozen=True)
class RaggedSpec:
    """How ranks share a tensor in row-major order: ``dims`` and ``local_units`` of a RaggedShard.

    The first dimensions, `dims`, count as one dimension of rows. Rank r has consecutive rows, in
    proportion to ``local_units[r]``; zeros are allowed. With ``dims=(0,)`` ranks share rows, and
    with all dimensions they share elements.

    Attributes
    ----------
    shape : tuple of int
        Shape of the full tensor.
    dims : tuple of int
        ``(0,)``, ``(0, 1)``, and so on.
    local_units : tuple of int
        Units per rank. The sum of ``local_units`` must divide the number of rows.
    group : Group
        Ranks that share the tensor.

    See Also
    --------
    Sharded, varcomm.ShardSizes

    Notes
    -----
    Communication: :meth:`gather` and :meth:`redistribute` only.

    In one process: the rank has the full tensor.

    Examples
    --------
    Elements 0 to 4 and 5 of a tensor, moved to one row and one row:

    >>> import torch, varcomm
    >>> from varcomm.sharding import RaggedSpec
    >>> def fn(rank):
    ...     before = RaggedSpec.of((2, 3), (0, 1), (5, 1))
    ...     after = RaggedSpec.of((2, 3), (0,), (1, 1))
    ...     own = before.shard(torch.arange(6).view(2, 3))
    ...     return own.tolist(), before.redistribute(own, after).tolist()
    >>> varcomm.launch(fn, 2)
    [([0, 1, 2, 3, 4], [[0, 1, 2]]), ([5], [[3, 4, 5]])]
    """

    shape: tuple[int, ...]
    dims: tuple[int, ...]
    local_units: tuple[int, ...]
    group: Group = field(repr=False)

    @classmethod
    def of(
        cls,
        shape: Sequence[int],
        dims: Sequence[int],
        local_units: Sequence[int],
        group: GroupLike = None,
    ) -> Self:
        """Make a spec; no communication.

        ArgumentError if `dims` are not the first dimensions, if `local_units` are not one int per
        rank, or if their sum does not divide the rows.
        """
        ranks, where = resolve(group), "RaggedSpec: "
        sizes = checked_sizes(shape, "shape", where=where)
        first, number = tuple(dims), len(tuple(dims))
        if not number or first != tuple(range(number)) or number > len(sizes):
            raise ArgumentError(
                f"{where}dims must be the first dimensions of a tensor of {len(sizes)}, (0,), "
                f"(0, 1), and so on; got {first}."
            )
        units = checked_sizes(local_units, "local_units", ranks.size, where)
        rows, total = prod(sizes[:number]), sum(units)
        if rows % total if total else rows:
            raise ArgumentError(
                f"{where}the sum of local_units must divide the {rows} rows of dims {first} of a "
                f"tensor of shape {tuple(sizes)}; got {list(units)}."
            )
        return cls(tuple(sizes), first, tuple(units), ranks)

    @classmethod
    def from_sharded(cls, sharded: Sharded, group: GroupLike = None) -> Self:
        """Return the spec of a Sharded tensor, with the fewest `dims` and units; collective.

        ArgumentError or DisagreementError on every rank, if the boxes of a rank are not consecutive
        elements in row-major order, or the ranks' elements not in rank order.
        """
        ranks, what = resolve(group), "RaggedSpec.from_sharded"

        def run() -> tuple[int, int]:
            if not isinstance(sharded, Sharded):
                kind = type(sharded).__name__
                raise ArgumentError(f"sharded must be a Sharded tensor; got {kind}.")
            return _run_of(sharded)

        def described(found: tuple[int, int]) -> Any:
            return {"the shape": tuple(sharded.shape), "the dtype": str(sharded.dtype)}, found

        _, shared = agree_and_share(what, run, described, ranks)
        require_equal(what, [words for words, _ in shared])
        shape, end = tuple(sharded.shape), 0
        for rank, (_, (start, length)) in enumerate(shared):
            if length and start != end:
                raise ArgumentError(
                    f"{what}: rank {rank} has elements from {start} on, and the ranks before have "
                    f"{end}. The elements of ranks must follow each other without gaps."
                )
            end += length
        if end != prod(shape):
            raise ArgumentError(
                f"{what}: ranks have {end} of the {prod(shape)} elements of a tensor of shape "
                f"{shape}."
            )
        lengths = [length for _, (_, length) in shared]
        common, number = gcd(*lengths), len(shape)
        if not common:  # no elements
            return cls.of(shape, range(number), [0] * ranks.size, group)
        while number > 1 and common % prod(shape[number - 1 :]) == 0:
            number -= 1
        units = [length // common for length in lengths]
        return cls.of(shape, range(number), units, group)

    @property
    def sizes(self) -> ShardSizes:
        """Elements per rank."""
        total = prod(self.shape)
        return ShardSizes(self.local_units) * (total // max(sum(self.local_units), 1))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's part: rows, and the other dimensions."""
        rows = prod(self.shape[: len(self.dims)])
        own = rows // max(sum(self.local_units), 1) * self.local_units[self.group.rank]
        return (own, *self.shape[len(self.dims) :])

    def shard(self, whole: torch.Tensor) -> torch.Tensor:
        """Return a copy of this rank's part of the full tensor; no communication."""
        checked_tensor(whole, "RaggedSpec.shard: ", "whole")
        if tuple(whole.shape) != self.shape:
            raise ArgumentError(
                f"RaggedSpec.shard: the tensor has shape {self.shape}; got {tuple(whole.shape)}."
            )
        rank = self.group.rank
        own = whole.reshape(-1).narrow(0, self.sizes.offsets[rank], self.sizes[rank])
        return own.clone().view(self.local_shape)

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """Return the full tensor on every rank by one all-gather; collective, differentiable."""
        flat = self._flat(local, "RaggedSpec.gather")
        whole = all_gather_v(flat, self.sizes, group=self.group.process_group)
        return whole.view(self.shape)

    def wrap(self, local: torch.Tensor) -> Sharded:
        """Return this rank's part as a Sharded tensor, for saving and loading; no copy."""
        flat = self._flat(local, "RaggedSpec.wrap").detach()
        if not local.is_contiguous():
            raise ArgumentError(
                "RaggedSpec.wrap: local must be contiguous, because the result shares its memory; "
                f"got strides {local.stride()}. Pass local.contiguous()."
            )
        return Sharded.elements(flat, self.shape, self.sizes.offsets[self.group.rank])

    def redistribute(self, local: torch.Tensor, target: RaggedSpec) -> torch.Tensor:
        """Move this rank's part to another layout of the same tensor; collective, differentiable.

        Each element that moves to another rank is sent once, in one message per pair of ranks. The
        adjoint moves the elements back.

        Parameters
        ----------
        local : torch.Tensor
            This rank's part, as :meth:`shard` returns it, or flat.
        target : RaggedSpec
            A spec of the same shape and group.

        Returns
        -------
        torch.Tensor
            This rank's part of `target`, of shape ``target.local_shape``.
        """
        what = "RaggedSpec.redistribute"
        flat = self._flat(local, what)
        with checking(what, self.group) as where:
            if not isinstance(target, RaggedSpec):
                raise ArgumentError(
                    f"{where}target must be a RaggedSpec; got {target!r}. Make it with "
                    "RaggedSpec.of(shape, dims, local_units, group)."
                )
            if (target.shape, target.group) != (self.shape, self.group):
                raise ArgumentError(
                    f"{where}target must have shape {self.shape} and the same group; got {target}."
                )
        rank, before, after = self.group.rank, self.sizes, target.sizes
        send = [_common(before.range(rank), after.range(peer)) for peer in range(len(after))]
        recv = [_common(before.range(peer), after.range(rank)) for peer in range(len(after))]
        moved: Any = all_to_all_v(flat, send, recv, group=self.group.process_group)
        result: torch.Tensor = moved.view(target.local_shape)
        return result

    def _flat(self, local: torch.Tensor, what: str) -> torch.Tensor:
        with checking(what, self.group) as where:
            checked_tensor(local, where, "local")
            length = self.sizes[self.group.rank]
            if tuple(local.shape) not in (self.local_shape, (length,)):
                raise ArgumentError(
                    f"{where}this rank's part has shape {self.local_shape} or ({length},); got "
                    f"{tuple(local.shape)}."
                )
        return local.reshape(-1)


def _common(one: range, other: range) -> int:
    return max(0, min(one.stop, other.stop) - max(one.start, other.start))


def _run_of(sharded: Sharded) -> tuple[int, int]:
    """Return the first element and the number of elements, or raise ArgumentError."""
    shape = tuple(sharded.shape)
    places = [(box.offsets, tuple(box.tensor.shape)) for box in sharded.boxes]
    if not places:
        return 0, 0
    steps = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    start = min(sum(o * s for o, s in zip(at, steps, strict=True)) for at, _ in places)
    length = sum(prod(sizes) for _, sizes in places)
    if sorted(places) != sorted(flat_places(shape, start, start + length)):
        raise ArgumentError(
            f"the boxes {places} of this rank are not consecutive elements of a tensor of shape "
            f"{shape} in row-major order."
        )
    return start, length
