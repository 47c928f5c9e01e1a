"""Interface of the engines, which move bytes of uneven length between ranks.

An engine has no notion of rows, dtypes or gradients. All its tensors are flat, contiguous and of
uint8; all counts are bytes per rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from typing import ClassVar, Literal, Protocol, TypeAlias

import torch

from varcomm.transport.group import Group

__all__ = ["NO_LIMIT", "Engine", "EngineFailure", "Peers", "Pending", "Work", "pieces", "wait_for"]

NO_LIMIT = timedelta(0)  # the timeout of the group holds

# Pairs of ranks with a message, as all ranks know them: most pairs; few, as the neighbours of a
# plan; or one rank with all others.
Peers: TypeAlias = Literal["all", "neighbours", "one"]


class Work(Protocol):
    """Communication in flight, as torch.distributed's ``Work``."""

    def wait(self, timeout: timedelta = NO_LIMIT) -> object:
        """Return when it is done on this rank; on a GPU, let the current stream wait for it.

        Raises RuntimeError after `timeout`, or after the timeout of the group.
        """

    def is_completed(self) -> bool:
        """Return whether it is done, without waiting; False if that is unknown."""


class EngineFailure(RuntimeError):
    """The error of an engine in a call."""


@dataclass
class Pending:
    """Communication in flight, and the function that makes the result of it.

    Attributes
    ----------
    works : sequence of Work
    finish : callable
        Returns the result after the works.
    number : int or None
        Number of the call on all ranks, if they compare calls.
    failed : callable or None
        Returns the error to raise in place of an EngineFailure.
    """

    works: Sequence[Work]
    finish: Callable[[], torch.Tensor]
    number: int | None = None
    failed: Callable[[EngineFailure], Exception] | None = None

    def wait(self) -> torch.Tensor:
        """Wait until this rank's part is done, and return the result."""
        try:
            wait_for(self.works)
            return self.finish()
        except EngineFailure as error:
            raise self.failed(error) if self.failed else error from error.__cause__


def wait_for(works: Iterable[Work], timeout: timedelta = NO_LIMIT) -> None:
    """Wait for all works, or raise EngineFailure."""
    try:
        for work in works:
            work.wait(timeout)
    except RuntimeError as error:
        raise EngineFailure(str(error)) from error


class Engine(ABC):
    """Uneven collectives on bytes.

    Each call starts at once, and is done on this rank after its works; inputs must not change until
    then. Empty messages are not sent.

    Attributes
    ----------
    simulated : bool
        Whether this process is the only one: the engine answers in place of the other ranks. Each
        says what this rank says, and their data are zeros.
    """

    simulated: ClassVar[bool] = False

    @abstractmethod
    def all_gather(
        self, group: Group, out: torch.Tensor, data: torch.Tensor, counts: Sequence[int]
    ) -> Sequence[Work]:
        """Fill `out` on every rank with the ``counts[r]`` bytes of each rank r, in order.

        `data` may be this rank's place in `out`.
        """

    def all_gather_metadata(
        self,
        group: Group,
        out: torch.Tensor,
        data: torch.Tensor,
        counts: Sequence[int],
        timeout: timedelta,
    ) -> None:
        """Run :meth:`all_gather` to its end, for what ranks say of themselves."""
        wait_for(self.all_gather(group, out, data, counts), timeout)

    @abstractmethod
    def exchange(
        self,
        group: Group,
        out: torch.Tensor,
        data: torch.Tensor,
        recv: Sequence[int],
        send: Sequence[int],
        peers: Peers,
    ) -> Sequence[Work]:
        """Send ``send[r]`` bytes of `data` to rank r, and fill `out` sender by sender."""

    @abstractmethod
    def broadcast(self, group: Group, data: torch.Tensor, src: int) -> Sequence[Work]:
        """Overwrite `data` on every rank by that of `src`."""

    def leave(self, group: Group) -> None:  # noqa: B027, an engine may have no way to do it
        """End the waiting of other ranks for this one, after a failure."""


def pieces(
    data: torch.Tensor, counts: Sequence[int], start: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the piece of each rank that has bytes in `data`, from rank `start` on, cyclically.

    >>> list(pieces(torch.arange(3), [2, 0, 1], 1))
    [(2, tensor([2])), (0, tensor([0, 1]))]
    """
    ends = list(accumulate(counts))
    for rank in (*range(start, len(ends)), *range(start)):
        if counts[rank]:
            yield rank, data[ends[rank] - counts[rank] : ends[rank]]
