"""Buckets of parameters in a row, cut into uneven pieces that ranks own; one rank's part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.autograd.graph import increment_version

from varcomm.data_parallel.buckets import cut, gradient_dtype, listed, started
from varcomm.errors import ArgumentError
from varcomm.ops import levels, packing
from varcomm.sizes import ShardSizes
from varcomm.transport.engine import Pending
from varcomm.transport.group import Group

WHOLE = "whole-parameters"

Segment = tuple[str, range]  # elements of a parameter, in row-major order


@dataclass(frozen=True)
class Split:
    """Parameters of one dtype in a row, cut into a piece for each rank."""

    members: tuple[str, ...]  # in their order in the row
    sizes: ShardSizes  # elements of each rank's piece
    segments: tuple[tuple[Segment, ...], ...]  # contents of each rank's piece

    @classmethod
    def of(cls, lengths: Mapping[str, int], sizes: Iterable[int]) -> Split:
        """Cut the row of parameters of these `lengths` into pieces of `sizes`.

        A parameter without elements is on the rank of the next element, or on the first.

        >>> Split.of({"b": 3, "a": 4}, [5, 0, 2]).segments
        ((('b', range(0, 3)), ('a', range(0, 2))), (), (('a', range(2, 4)),))
        """
        sizes = ShardSizes(sizes)
        pieces = [sizes.range(rank) for rank in range(len(sizes))]
        segments: list[list[Segment]] = [[] for _ in pieces]
        place = 0
        for name, length in lengths.items():
            if not length:  # optimizers have states of these too, which one rank keeps
                home = next((r for r, piece in enumerate(pieces) if place < piece.stop), 0)
                segments[home].append((name, range(0)))
            for piece, found in zip(pieces, segments, strict=True):
                start, stop = max(piece.start - place, 0), min(piece.stop - place, length)
                if start < stop:
                    found.append((name, range(start, stop)))
            place += length
        return cls(tuple(lengths), sizes, tuple(map(tuple, segments)))


def splits(
    parameters: Mapping[str, torch.Tensor],
    sizes: str | Sequence[int],
    ranks: int,
    bucket_bytes: int,
) -> list[Split]:
    """Return the splits of parameters, from the last of them to the first.

    ArgumentError if `sizes` is another string or has another sum.
    """
    numbers = {name: value.numel() for name, value in parameters.items()}
    values = []
    for name in reversed(numbers):
        value, dtype = parameters[name], gradient_dtype(parameters[name])
        kind = value.dtype, dtype, value.device
        values.append((name, kind, numbers[name] * dtype.itemsize))
    lists = cut(values, bucket_bytes)
    if sizes == WHOLE:
        owner = _owners(numbers, ranks)
        lists = [sorted(members, key=owner.__getitem__) for members in lists]
        each = [
            [sum(numbers[n] for n in members if owner[n] == rank) for rank in range(ranks)]
            for members in lists
        ]
    else:
        total = sum(numbers.values())
        wanted = ShardSizes.balanced(total, ranks) if sizes == "balanced" else sizes
        if isinstance(wanted, str) or sum(wanted) != total:
            raise ArgumentError(
                f'sizes must be "balanced", "{WHOLE}" or one int per rank, which sum to the '
                f"{total} elements that are trained; got {sizes!r}."
            )
        each = _apportioned([sum(numbers[n] for n in members) for members in lists], wanted)
    rows = [{name: numbers[name] for name in members} for members in lists]
    return [Split.of(row, share) for row, share in zip(rows, each, strict=True)]


def _apportioned(lengths: Iterable[int], sizes: Sequence[int]) -> list[list[int]]:
    """Split each row over all ranks, in proportion to the rest of their sizes; sums are the sizes.

    >>> _apportioned([5, 4], [3, 0, 6])
    [[2, 0, 3], [1, 0, 3]]
    """
    left, found = list(sizes), []
    for length in lengths:
        total = max(sum(left), 1)
        share = [length * rest // total for rest in left]
        order = sorted(range(len(left)), key=lambda r: (-(length * left[r] % total), r))
        for rank in order[: length - sum(share)]:
            share[rank] += 1
        left = [rest - part for rest, part in zip(left, share, strict=True)]
        found.append(share)
    return found


def _owners(numbers: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Give parameters to ranks: the largest first, each to the rank with the fewest elements.

    No rank gets more than ``4/3 - 1/(3 P)`` of the best choice's maximum (R. L. Graham, Bounds on
    multiprocessing timing anomalies, SIAM J. Appl. Math. 17, 1969).

    >>> _owners({"a": 3, "b": 9, "c": 4, "d": 4}, 2)
    {'b': 0, 'c': 1, 'd': 1, 'a': 1}
    """
    load, owner = [0] * ranks, {}
    for name in sorted(numbers, key=lambda name: -numbers[name]):
        rank = owner[name] = load.index(min(load))
        load[rank] += numbers[name]
    return owner


@dataclass(frozen=True)
class Piece:
    """One rank's part of a parameter: elements `start` to `stop`, in row-major order.

    `value` holds the values that the optimizer updates, and their ``grad``: of one dimension, or of
    the parameter's shape if parameters have one owner. A scalar always has its own shape.
    """

    name: str  # of the parameter
    shape: torch.Size  # of the full parameter
    start: int
    stop: int
    value: torch.nn.Parameter


class Shard:
    """A bucket on one rank; its parameters become views of one row."""

    def __init__(
        self, split: Split, parameters: Mapping[str, torch.nn.Parameter], rank: int
    ) -> None:
        self.split, self.segments = split, split.segments[rank]
        self.parameters = {name: parameters[name] for name in split.members}
        first = parameters[split.members[0]]  # whose class the row does not have
        self.row = torch.empty(split.sizes.total, dtype=first.dtype, device=first.device)
        self._views: dict[str, torch.Tensor] = {}
        place = 0
        for name, parameter in self.parameters.items():
            view = self.row.narrow(0, place, parameter.numel()).view(parameter.shape)
            parameter.data = self._views[name] = view.copy_(parameter.detach())
            place += parameter.numel()
        self._own = self.row.narrow(0, split.sizes.offsets[rank], split.sizes[rank])
        self._masters = self._own
        self._total: torch.Tensor | None = None
        self._used: list[bool] = []  # segments that this rank has used
        self.pieces: list[Piece] = []

    def cut_pieces(self, whole: bool) -> None:
        """Make the values that the optimizer updates: fp32 masters of fp16 and bf16."""
        if self._own.is_floating_point() and self._own.itemsize < 4:
            self._masters = self._own.float()
        for (name, part), value in zip(self.segments, self._parts(self._masters), strict=True):
            shape = self._views[name].shape
            # a scalar has one owner in any case, and states like those of one process
            own = torch.nn.Parameter(value.view(shape) if whole or not shape else value)
            self.pieces.append(Piece(name, shape, part.start, part.stop, own))

    def _parts(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return values.split([len(part) for _, part in self.segments])  # type: ignore[no-any-return]

    def add(self, total: torch.Tensor, used: list[bool]) -> None:
        """Add a sum of this rank's piece, and of flags of its segments, to those before.

        A flag is 0 if no rank has used the segment; `used` are the segments of this rank.
        """
        self._used = [a or b for a, b in zip(self._used, used, strict=True)] if self._used else used
        self._total = total if self._total is None else self._total.add_(total)

    @property
    def unknown(self) -> list[torch.Tensor]:
        """Whether other ranks have used the segments that this rank has not."""
        if self._total is None or all(self._used):
            return []
        flags = self._total[len(self._own) :].ne(0)
        return [flags[n : n + 1] for n, is_used in enumerate(self._used) if not is_used]

    def settle(self, divisor: int | None, others: Iterator[bool]) -> None:
        """Divide the sums and add them to the gradients of the pieces; None drops them.

        `others` yields whether any rank has used each segment of :attr:`unknown`.
        """
        total, used = self._total, self._used
        self._total, self._used = None, []
        if total is None or divisor is None:
            return
        total = total[: len(self._own)]
        if divisor != 1:
            total /= divisor
        parts = self._parts(total.to(self._masters.dtype))
        # The pieces say whether there is a gradient: so the optimizer's own zero_grad works too.
        for value, part, is_used in zip((p.value for p in self.pieces), parts, used, strict=True):
            if not (is_used or next(others)):
                continue
            if value.grad is not None:
                value.grad.add_(part.view(value.shape))
            else:  # no view, which could not be detached in place
                value.grad = part.view(value.shape).clone()

    def take_over(self) -> None:
        """Copy values that were written into the parameters since the last step to the masters.

        A master that rounds to the parameter's value keeps its precision. All elements are
        compared, because torch does not count writes to ``.data``.
        """
        if self.has_masters:
            kept = self._masters.to(self._own.dtype) == self._own
            self._masters.copy_(self._masters.where(kept, self._own))

    def start_gather(self, group: Group) -> Pending:
        """Begin to send this rank's piece to all; the parameters wait for the message."""
        if self.has_masters:
            self._own.copy_(self._masters)
        # a graph that has saved a parameter for backward must not find other values there
        increment_version(list(self.parameters.values()))
        piece = self._own, self.split.sizes
        if levels.gathers_short(group, self.row.nbytes, self.row.device):
            return started("all_gather_v", group, levels.start_gather, *piece, self.row.copy_)
        return started("all_gather_v", group, packing.all_gather, *piece, self.row)

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer updates other values than the parameters' own."""
        return self._masters is not self._own

    def moved(self) -> list[str]:
        """Return the parameters that are not in the row any more."""
        return [
            name
            for name, view in self._views.items()
            if self.parameters[name].dtype != view.dtype
            or self.parameters[name].device != view.device
            or not self.parameters[name].is_set_to(view)
        ]


def settle(shards: Sequence[Shard], divisor: int | None) -> None:
    """Divide sums and add them to gradients of pieces; the host waits for a GPU at most once."""
    unknown = [] if divisor is None else [flag for shard in shards for flag in shard.unknown]
    others = iter(listed(unknown))
    for shard in shards:
        shard.settle(divisor, others)
