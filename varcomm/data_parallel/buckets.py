"""Buckets: parameters whose gradients travel in one message, and the sum of a bucket."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeVar

import torch

from varcomm.ops import packing
from varcomm.ops.reduction import SMALL, accumulated
from varcomm.sizes import ShardSizes
from varcomm.transport.agreement import compare, debugging
from varcomm.transport.engine import span, wait_for
from varcomm.transport.failure import explained
from varcomm.transport.group import Group

__all__ = [
    "BUCKET_BYTES",
    "BucketSum",
    "Message",
    "Owner",
    "cut",
    "dense",
    "gradient_dtype",
    "is_owned",
]

BUCKET_BYTES = 25 * 2**20

_OWNER = "_varcomm_owner"

K = TypeVar("K", bound=Hashable)


def gradient_dtype(value: torch.Tensor) -> torch.dtype:
    """Return the dtype of a parameter's gradient; for a buffer, its own dtype."""
    return getattr(value, "grad_dtype", None) or value.dtype  # of torch 2.9 or newer


def dense(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient with all its zeros; itself, if it has them."""
    return gradient if gradient.layout == torch.strided else gradient.to_dense()


def cut(
    values: Mapping[K, torch.Tensor], order: Iterable[K], nbytes: int = BUCKET_BYTES
) -> list[list[K]]:
    """Cut `values`, in `order`, into lists of keys of at most `nbytes` bytes.

    Each list has one dtype and device; a larger value has a list to itself. Lists are sorted by
    the place of their last value in `order`.

    >>> some = {1: torch.zeros(3), 2: torch.zeros(2, dtype=torch.float64), 3: torch.zeros(4)}
    >>> cut(some, [3, 2, 1], nbytes=28), cut(some, [3, 2, 1], nbytes=27)
    ([[2], [3, 1]], [[3], [2], [1]])
    >>> cut({1: torch.zeros(0), 2: torch.zeros(3)}, [1, 2], nbytes=8)
    [[1], [2]]
    """
    lists: list[list[K]] = []
    current: dict[tuple[torch.dtype, torch.device], tuple[list[K], int]] = {}
    place: dict[K, int] = {}
    for number, key in enumerate(order):
        place[key], value = number, values[key]
        kind = gradient_dtype(value), value.device
        size = value.numel() * kind[0].itemsize
        members, room = current.get(kind, ([], 0))
        if size > room or not members:  # the first may have no elements
            members, room = [], nbytes
            lists.append(members)
        members.append(key)
        current[kind] = members, room - size
    return sorted(lists, key=lambda members: place[members[-1]])


class Owner:
    """Mark of parameters whose gradients a ShardedGradients sums while it is open.

    A copied or pickled mark is not open.
    """

    def __init__(self, parameters: Iterable[torch.Tensor] = ()) -> None:
        self.is_open = True
        for parameter in parameters:
            setattr(parameter, _OWNER, self)

    def __reduce__(self) -> tuple[Any, ...]:
        return object, ()

    def close(self) -> None:
        """Own nothing any more."""
        self.is_open = False


def is_owned(parameter: torch.Tensor) -> bool:
    """Return whether a ShardedGradients sums the gradients of a parameter."""
    return bool(getattr(getattr(parameter, _OWNER, None), "is_open", False))


class Message:
    """A flat tensor in flight among all ranks, begun by a function of ``varcomm.ops.packing``.

    A failure of the engine is a CommunicationError.
    """

    def __init__(
        self, start: Callable[..., Any], name: str, group: Group, *arguments: object
    ) -> None:
        self._explained = explained(name, group)
        with span(name), self._explained:
            self._works, self._out = start(name, group, *arguments)

    def done(self) -> bool:
        """Return whether everything has arrived."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> torch.Tensor:
        """Wait for the received tensor, and free the sent one."""
        with self._explained:
            wait_for(self._works)
        self._works = ()
        received: torch.Tensor = self._out
        return received


class BucketSum:
    """A sum in flight; the same on all ranks, bit for bit.

    Each rank sums a piece of ``1 / P`` in rank order, divides the piece, and sends it to the other
    ranks: ``2 (P - 1) / P`` of the bytes of `flat`. Up to 16 KiB, one round takes less time. The
    caller begins the second round, because an asynchronous :func:`varcomm.all_reduce` cannot.

    `flat`, of shape (N,) on all ranks, must not change before the sum is complete. All ranks make
    the same calls in the same order.
    """

    def __init__(self, flat: torch.Tensor, group: Group, use_fp32: bool = True) -> None:
        self._group, self._use_fp32, self._numbers = group, use_fp32, flat.numel()
        self._total: torch.Tensor | None = None
        self._sizes: ShardSizes | None = None
        self._start = 0
        if group.size == 1 or flat.nbytes <= SMALL:
            counts = [self._numbers] * group.size
            self._message = self._begun("all_reduce", packing.all_gather, flat, counts)
        else:
            self._sizes = ShardSizes.balanced(self._numbers, group.size)
            self._start = self._sizes.offsets[group.rank]
            counts = [self._sizes[group.rank]] * group.size
            name = "reduce_scatter_v"
            self._message = self._begun(name, packing.exchange, flat, self._sizes, counts)

    @torch.no_grad()
    def begin_second_round(self, divisor: int = 1, undivided: int = 0) -> None:
        """Wait for this rank's piece, and begin to send its sum.

        The sum is divided by `divisor`, except its last `undivided` numbers.
        """
        parts = self._message.wait().view(self._group.size, -1)
        total = accumulated(parts, self._use_fp32)
        if divisor != 1:
            total[: max(0, self._numbers - undivided - self._start)] /= divisor
        self._total = total.to(parts.dtype)
        if self._sizes is not None:
            self._message = self._begun(
                "all_gather_v", packing.all_gather, self._total, self._sizes
            )

    def wait(self) -> torch.Tensor:
        """Return the sum; after :meth:`begin_second_round`."""
        if self._sizes is None:
            assert self._total is not None
            return self._total
        return self._message.wait()

    def _begun(self, name: str, start: Callable[..., Any], *arguments: Any) -> Message:
        if debugging():
            how = {"dtype": str(arguments[0].dtype), "use_fp32": self._use_fp32}
            compare(self._group, {"operation": name, "numbers": self._numbers, **how})
        return Message(start, name, self._group, *arguments)
