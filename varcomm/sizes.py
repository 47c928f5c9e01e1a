"""Sizes: the numbers of rows per rank, and checks of sizes and dimensions."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import accumulate
from typing import TYPE_CHECKING, Self, SupportsIndex, overload

import torch

from varcomm.errors import ArgumentError
from varcomm.errors import at_least as at_least
from varcomm.errors import checked_rank as checked_rank
from varcomm.errors import exact_int as exact_int

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh


class ShardSizes(tuple[int, ...]):
    """Rows per rank: a tuple of non-negative ints.

    Parameters
    ----------
    sizes : iterable of int
        Rows of rank 0, 1, ...

    Raises
    ------
    ArgumentError
        If a size is negative or is not an integer.

    See Also
    --------
    ExchangePlan, all_gather_v

    Examples
    --------
    >>> sizes = ShardSizes([3, 0, 5])
    >>> sizes.total, sizes.offsets, sizes.range(2), sizes.owner(3)
    (8, (0, 3, 3), range(3, 8), 2)
    >>> sizes * 2
    ShardSizes(6, 0, 10)
    """

    def __new__(cls, sizes: Iterable[int] = ()) -> Self:
        """Check every entry once; functions accept a `ShardSizes` without a further check."""
        if isinstance(sizes, cls):
            return sizes
        return super().__new__(cls, checked_sizes(sizes, "sizes"))

    # not cached: torch.compile breaks its graphs at the lock of a cached property
    @property
    def total(self) -> int:
        """Rows of all ranks together."""
        return sum(self)

    @property
    def offsets(self) -> tuple[int, ...]:
        """First global row of each rank."""
        return tuple(accumulate(self, initial=0))[:-1]

    def range(self, rank: int) -> range:
        """Return the global rows of `rank`."""
        checked_rank(rank, len(self), "rank")
        first = self.offsets[rank]
        return range(first, first + self[rank])

    @overload
    def owner(self, index: int) -> int: ...
    @overload
    def owner(self, index: torch.Tensor) -> torch.Tensor: ...
    def owner(self, index: int | torch.Tensor) -> int | torch.Tensor:
        """Return the rank that has a global row, or an int64 tensor of ranks for rows in a tensor.

        Raises ArgumentError if a row is out of range, or is not an integer.
        """
        ends = list(accumulate(self))
        if isinstance(index, torch.Tensor):
            if not holds_integers(index):
                raise ArgumentError(f"index must be a tensor of integers; got {index.dtype}.")
            rows = [*map(int, index.aminmax())] if index.numel() else []
        else:
            rows = [at_least(0, index, "index")]
        for row in rows:
            if not 0 <= row < self.total:
                raise ArgumentError(
                    f"index {row} is out of range for {self.total} rows (sizes {list(self)})."
                )
        if not isinstance(index, torch.Tensor):
            return bisect_right(ends, rows[0])
        of_ranks = torch.tensor(ends, dtype=torch.int64, device=index.device)
        return torch.searchsorted(of_ranks, index.to(torch.int64).contiguous(), right=True)

    @classmethod
    def balanced(cls, n: int, parts: int, multiple_of: int = 1) -> Self:
        """Split `n` rows into `parts` as evenly as units of `multiple_of` rows allow.

        The first ranks get one more unit; a remainder below one unit goes to the next rank.

        >>> ShardSizes.balanced(14, 8), ShardSizes.balanced(100, 3, multiple_of=8)
        (ShardSizes(2, 2, 2, 2, 2, 2, 1, 1), ShardSizes(36, 32, 32))
        """
        n, parts = at_least(0, n, "n"), at_least(1, parts, "parts")
        multiple_of = at_least(1, multiple_of, "multiple_of")
        units, remainder = divmod(n, multiple_of)
        base, more = divmod(units, parts)
        sizes = [(base + (part < more)) * multiple_of for part in range(parts)]
        sizes[more] += remainder
        return cls(sizes)

    @classmethod
    def chunked(cls, n: int, parts: int) -> Self:
        """Split `n` rows into `parts` as :func:`torch.chunk`, DTensor and fully_shard do.

        >>> ShardSizes.chunked(14, 8)
        ShardSizes(2, 2, 2, 2, 2, 2, 2, 0)
        """
        n, parts = at_least(0, n, "n"), at_least(1, parts, "parts")
        rows = -(-n // parts)
        return cls(min(rows, max(0, n - part * rows)) for part in range(parts))

    def __mul__(self, n: SupportsIndex) -> Self:
        """Multiply every size by `n`, as heads to features; ``tuple * n`` would repeat them."""
        factor = at_least(0, n, "the factor of sizes")
        return type(self)(rows * factor for rows in self)

    __rmul__ = __mul__

    @classmethod
    def from_local(cls, n: int, group: dist.ProcessGroup | DeviceMesh | None = None) -> Self:
        """Collect the sizes from the number of rows on each rank; collective.

        All ranks raise ArgumentError if the number is invalid on one rank. `group` is a
        ProcessGroup or DeviceMesh; None means the whole world.
        """
        # collectives import this module, and agreement only inside debug()
        from varcomm.transport.agreement import share
        from varcomm.transport.group import resolve

        return cls(
            share("ShardSizes.from_local", lambda: checked_sizes([n], "n")[0], resolve(group))
        )

    def __repr__(self) -> str:
        return f"ShardSizes({', '.join(map(str, self))})"


def holds_integers(x: torch.Tensor) -> bool:
    """Return whether a tensor holds integers, not bools."""
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def checked_sizes(
    sizes: Iterable[int], name: str, ranks: int | None = None, where: str = ""
) -> tuple[int, ...]:
    """Return `sizes` as ints, `ranks` of them if given; ArgumentError starts with `where`."""
    if isinstance(sizes, ShardSizes) and ranks in (None, len(sizes)):
        return sizes
    scalar = getattr(sizes, "ndim", 1) == 0  # numpy's and torch's scalars are iterable by type
    unordered = isinstance(sizes, str | bytes | Set | Mapping)
    if scalar or unordered or not isinstance(sizes, Iterable):
        raise ArgumentError(
            f"{where}{name} must be a list or tuple of ints, one per rank; got {sizes!r}. Pass a "
            "group as group=..."
        )
    given = list(sizes)
    checked = [exact_int(entry) for entry in given]
    for place, value in enumerate(checked):
        if value is None or value < 0:
            raise ArgumentError(
                f"{where}{name} must hold ints from 0 on; got {given!r}, where entry {place} is "
                f"{given[place]!r} of type {type(given[place]).__name__}."
            )
    if ranks is not None and len(checked) != ranks:
        raise ArgumentError(
            f"{where}{name} must have one entry per rank, {ranks}; got {len(checked)}: {given!r}."
        )
    return tuple(checked)  # type: ignore[arg-type]


def checked_dim(dim: int, shape: Sequence[int], where: str = "") -> int:
    """Return `dim` counted from the front, or raise ArgumentError."""
    value = exact_int(dim)
    if value is None:
        raise ArgumentError(f"{where}dim must be an int; got {dim!r}.")
    if not -len(shape) <= value < len(shape):
        hint = " A scalar has no rows: unsqueeze(0) it." if len(shape) == 0 else ""
        raise ArgumentError(
            f"{where}dim={dim} is out of range for a tensor of shape {tuple(shape)}.{hint}"
        )
    return value % len(shape)
