"""Buckets of parameters in a row, cut into uneven pieces that ranks own; one rank's part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import increment_version

from varcomm.data_parallel.buckets import Message, cut, gradient_dtype
from varcomm.errors import ArgumentError
from varcomm.ops import packing
from varcomm.ops.compilation import kept_from_compilation
from varcomm.sizes import ShardSizes, checked_sizes
from varcomm.transport.group import Group

__all__ = ["WHOLE", "Piece", "Shard", "splits", "wait_in"]


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
    parameters: Mapping[str, torch.Tensor], sizes: object, ranks: int, bucket_bytes: int
) -> list[Split]:
    """Return the splits of parameters, from the last of them to the first.

    Raises ArgumentError if `sizes` are not as ``ShardedGradients`` takes them.
    """
    numbers = {name: value.numel() for name, value in parameters.items()}
    place = {name: number for number, name in enumerate(parameters)}
    kinds: dict[tuple[torch.dtype, torch.dtype], list[str]] = {}
    for name in reversed(place):
        value = parameters[name]
        kinds.setdefault((value.dtype, gradient_dtype(value)), []).append(name)
    lists = [members for kind in kinds.values() for members in cut(parameters, kind, bucket_bytes)]
    lists.sort(key=lambda members: -min(place[name] for name in members))
    rows: list[dict[str, int]]
    if sizes == WHOLE:
        owner = _owners(numbers, ranks)
        rows = [
            {n: numbers[n] for n in sorted(members, key=owner.__getitem__)} for members in lists
        ]
        each = [
            [sum(row[n] for n in row if owner[n] == rank) for rank in range(ranks)] for row in rows
        ]
    else:
        rows = [{n: numbers[n] for n in members} for members in lists]
        wanted = _checked(sizes, sum(numbers.values()), ranks)
        each = _apportioned([sum(row.values()) for row in rows], wanted)
    return [Split.of(row, share) for row, share in zip(rows, each, strict=True)]


def _apportioned(lengths: Iterable[int], sizes: Sequence[int]) -> list[list[int]]:
    """Split rows over ranks so that each rank gets of all rows together its size.

    Each rank gets of a row its part in proportion to the rest of its size, rounded down, and one
    element more for the largest remainders. So every message is spread over all ranks.

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


def _checked(sizes: object, total: int, ranks: int) -> tuple[int, ...]:
    if sizes == "balanced":
        return ShardSizes.balanced(total, ranks)
    if isinstance(sizes, str):
        raise ArgumentError(
            f'sizes must be "balanced", "{WHOLE}" or a list of ints, one per rank; got {sizes!r}.'
        )
    wanted = checked_sizes(sizes, "sizes", ranks)  # type: ignore[arg-type]
    if sum(wanted) != total:
        raise ArgumentError(
            f"sizes sum to {sum(wanted)} ({list(wanted)}), but the parameters that are trained "
            f"have {total} elements. Use ShardSizes.balanced, or shares of {total}."
        )
    return wanted


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
        example = parameters[split.members[0]].detach()
        self.row = example.new_empty(split.sizes.total)
        self._nothing = example.new_full((), torch.nan)
        self._views: dict[str, torch.Tensor] = {}
        place = 0
        for name, parameter in self.parameters.items():
            view = self.row.narrow(0, place, parameter.numel()).view(parameter.shape)
            parameter.data = self._views[name] = view.copy_(parameter.detach())
            place += parameter.numel()
        self._own = self.row.narrow(0, split.sizes.offsets[rank], split.sizes[rank])
        self._masters = self._own
        self._gather: Message | None = None
        self._total: torch.Tensor | None = None
        self._used: list[bool] = []
        self._arriving: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        self.pieces: list[Piece] = []

    def cut_pieces(self, whole: bool, dtype: torch.dtype, device: torch.device) -> None:
        """Make the values that the optimizer updates, of `dtype` on `device`."""
        own = self._own
        if (dtype, device) != (own.dtype, own.device):
            pinned = device.type == "cpu" and own.is_cuda
            empty = torch.empty(len(own), dtype=dtype, device=device, pin_memory=pinned)
            self._masters = empty.copy_(own)
        for (name, part), value in zip(self.segments, self._parts(self._masters), strict=True):
            shape = self._views[name].shape
            # a scalar has one owner in any case, and states like those of one process
            own = torch.nn.Parameter(value.view(shape) if whole or not shape else value)
            self.pieces.append(Piece(name, shape, part.start, part.stop, own))

    def _parts(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return values.split([len(part) for _, part in self.segments])  # type: ignore[no-any-return]

    def add(self, total: torch.Tensor, used: list[bool]) -> None:
        """Add a sum of this rank's piece to the sums since the last :meth:`settle`."""
        self._used = [a or b for a, b in zip(self._used, used, strict=True)] if self._used else used
        if self._masters.device != total.device:
            host = torch.empty(total.shape, dtype=total.dtype, device="cpu", pin_memory=True)
            host.copy_(total, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._arriving.append((host, event))
        else:
            self._total = total if self._total is None else self._total.add_(total)

    def settle(self, divisor: float | None) -> None:
        """Divide the sums and add them to the gradients of the pieces; None drops them."""
        for host, event in self._arriving:
            event.synchronize()
            self._total = host if self._total is None else self._total.add_(host)
        total, used = self._total, self._used
        self._total, self._used, self._arriving = None, [], []
        if total is None or divisor is None:
            return
        if divisor != 1:
            total /= divisor
        parts = self._parts(total.to(self._masters.dtype))
        # The pieces say whether there is a gradient: so the optimizer's own zero_grad works too.
        fresh = all(piece.value.grad is None for piece in self.pieces)
        for piece, part, is_used in zip(self.pieces, parts, used, strict=True):
            value, part = piece.value, part.view(piece.value.shape)
            if is_used and value.grad is not None:
                value.grad.add_(part)
            elif is_used:
                # no view, which could not be detached in place; alone, it keeps no other in memory
                value.grad = part.data if fresh else part.clone()

    def take_over(self) -> None:
        """Copy values that were written into the parameters since the last step to the masters.

        A master that rounds to the parameter's value keeps its precision. All elements are
        compared, because torch does not count writes to ``.data``.
        """
        if self.has_masters:
            own = self._own.to(self._masters.device)
            self._masters.copy_(own.where(self._masters.to(own.dtype) != own, self._masters))

    def start_gather(self, group: Group, hidden: bool) -> None:
        """Begin to send this rank's piece to all; `hidden` parameters are NaN until `wait`."""
        if self.has_masters:
            self._own.copy_(self._masters, non_blocking=True)
        # a graph that has saved a parameter for backward must not find other values there
        increment_version(list(self.parameters.values()))
        arguments = group, self._own, self.split.sizes, self.row
        self._gather = Message(packing.all_gather, "all_gather_v", *arguments)
        if hidden:
            for parameter in self.parameters.values():
                parameter.data = self._nothing.expand(parameter.shape)

    def wait(self) -> None:
        """Wait for the pieces of all ranks, and show the parameters again."""
        if self._gather is None:
            return
        self._gather.wait()
        self._gather = None
        for name, parameter in self.parameters.items():
            # one that was moved meanwhile stays so
            if _is_same(parameter, self._nothing.expand(parameter.shape)):
                parameter.data = self._views[name]

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer updates other values than the parameters' own."""
        return self._masters is not self._own

    def moved(self) -> list[str]:
        """Return the parameters that are not in the row any more; after `wait`.

        A parameter that was filled while it was hidden has lost these values.
        """
        lost = not self._nothing.isnan()
        views = self._views.items()
        return [name for name, view in views if lost or not _is_same(self.parameters[name], view)]


def _is_same(parameter: torch.Tensor, view: torch.Tensor) -> bool:
    same = (parameter.dtype, parameter.device) == (view.dtype, view.device)
    return same and parameter.is_set_to(view)


# Modules of torch.nn that read no parameters of others.
_CONTAINERS = "torch.nn.modules.module", "torch.nn.modules.container"


def wait_in(module: torch.nn.Module, shards: Sequence[Shard]) -> list[Callable[[], None]]:
    """Let modules wait in forward for the parameters that they read; return the hooks' removals.

    They wait for all when states are saved or loaded.
    """
    shard_of = {id(p): shard for shard in shards for p in shard.parameters.values()}
    hooks = []
    for part in module.modules():
        used = dict.fromkeys(shard_of[id(p)] for p in _read_by(part) if id(p) in shard_of)
        if used:
            hooks.append(part.register_forward_pre_hook(_Wait(list(used))))
        hooks.append(part.register_state_dict_pre_hook(_Wait(shards)))
        hooks.append(part.register_load_state_dict_pre_hook(_Wait(shards)))
    return [hook.remove for hook in hooks]


class _Wait:
    """A hook that waits; in a copy of the module it does nothing."""

    def __init__(self, shards: Sequence[Shard] = ()) -> None:
        self._shards = shards

    @kept_from_compilation
    def __call__(self, *_: Any) -> None:
        for shard in self._shards:
            shard.wait()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Wait, ()


def _read_by(part: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Yield the parameters that the module's own forward reads."""
    files = {kind.__module__ for kind in type(part).__mro__} - set(_CONTAINERS)
    # MultiheadAttention reads out_proj.weight, and does not call out_proj
    whole = any(file.startswith("torch.nn.") for file in files)
    yield from part.parameters(recurse=whole)
    for child in () if whole else part.children():
        if isinstance(child, torch.nn.ParameterList | torch.nn.ParameterDict):
            yield from _read_by(child)
