"""Buckets: parameters whose gradients travel in one message."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from math import inf
from typing import Any, TypeVar

import torch

from varcomm.transport.engine import Pending, span
from varcomm.transport.failure import explained, failure
from varcomm.transport.group import Group

# On CPUs, 8 MiB took 0.73 to 0.91 of the time of 25 MiB on 2, 4 and 8 ranks.
BUCKET_BYTES = 8 * 2**20

# Follows the name of a parameter in the error of a sum over ranks that hold other shards.
IS_SHARDED = (
    "is a shard of a parameter that ranks of this group hold in parts, so its gradient is "
    "complete. Sum over ranks that hold the same shard: pass the data-parallel group; a model that "
    "is only tensor-parallel needs no sum."
)

_OWNER = "_varcomm_owner"

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


def as_ordinary(function: Callable[..., T], *args: object) -> T:
    """Call a function in which tensors of all classes act and arrive as ordinary tensors."""
    plain: Any = torch.Tensor
    return plain.__torch_function__(function, (), args)  # type: ignore[no-any-return]


def gradient_dtype(value: torch.Tensor) -> torch.dtype:
    """Return the dtype of a parameter's gradient; for a buffer, its own dtype."""
    return getattr(value, "grad_dtype", None) or value.dtype  # of torch 2.9 or newer


def cut(values: Iterable[tuple[K, Hashable, int]], nbytes: int) -> list[list[K]]:
    """Cut values, each with its key, kind and bytes, into lists of keys of at most `nbytes` bytes.

    Each list has one kind; a larger value has a list to itself. Lists are sorted by the place of
    their last value.

    >>> some = [(3, "fp32", 16), (2, "fp64", 16), (1, "fp32", 12)]
    >>> cut(some, nbytes=28), cut(some, nbytes=27)
    ([[2], [3, 1]], [[3], [2], [1]])
    >>> cut([(1, "fp32", 0), (2, "fp32", 12)], nbytes=8)
    [[1], [2]]
    """
    lists: list[list[K]] = []
    current: dict[Hashable, tuple[list[K], int]] = {}
    place: dict[K, int] = {}
    for number, (key, kind, size) in enumerate(values):
        place[key] = number
        members, room = current.get(kind, ([], 0))
        if size > room or not members:  # the first may have no elements
            members, room = [], nbytes
            lists.append(members)
        members.append(key)
        current[kind] = members, room - size
    return sorted(lists, key=lambda members: place[members[-1]])


def listed(flags: Sequence[torch.Tensor]) -> list[bool]:
    """Return vectors of bools as one list; the host waits for a GPU once, or not at all for none.

    >>> listed([torch.tensor([False, True]), torch.tensor([True])])
    [False, True, True]
    """
    device = flags[0].device if flags else None
    return torch.cat([each.to(device) for each in flags]).tolist() if flags else []


def with_flags(
    gradients: Sequence[torch.Tensor | None], lengths: Sequence[int], like: torch.Tensor
) -> list[torch.Tensor]:
    """Return flat gradients, zeros for None, and a flag for each: infinite, and 0 for None.

    No division of a sum makes such a flag zero.

    >>> with_flags([None, torch.ones(1)], [2, 1], torch.empty(0))
    [tensor([0., 0.]), tensor([1.]), tensor([0., inf])]
    """
    flags = like.new_full((len(lengths),), inf)
    parts: list[torch.Tensor] = []
    for place, (gradient, length) in enumerate(zip(gradients, lengths, strict=True)):
        parts.append(like.new_zeros(length) if gradient is None else gradient)
        if gradient is None:
            flags[place].zero_()  # by a kernel: a copy would wait for the GPU
    return [*parts, flags]


class Owner:
    """Mark of parameters whose gradients a ShardedGradients sums while it is open."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.is_open = True
        for parameter in parameters:
            setattr(parameter, _OWNER, self)

    def __reduce__(self) -> tuple[Any, ...]:
        return object, ()  # a copied or pickled mark is not open

    def close(self) -> None:
        """Own nothing any more."""
        self.is_open = False


def is_owned(parameter: torch.Tensor) -> bool:
    """Return whether a ShardedGradients sums the gradients of a parameter."""
    return bool(getattr(getattr(parameter, _OWNER, None), "is_open", False))


def started(name: str, group: Group, start: Callable[..., Any], *arguments: object) -> Pending:
    """Begin a message by a function that returns a Pending, or works and the received values."""
    failed = partial(failure, name, group, time.monotonic())
    with span(name), explained(name, group):
        begun = start(name, group, *arguments)
    pending = begun if isinstance(begun, Pending) else Pending(begun[0], lambda: begun[1])
    pending.failed = failed
    return pending
