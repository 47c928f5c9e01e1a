"""What an engine offers.

An engine moves bytes of uneven length and knows nothing of rows, dtypes or gradients. All its
tensors are flat, contiguous and of uint8; all counts are bytes, one a rank.
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

NO_LIMIT = timedelta(0)  # but that of the group


# Who has something for whom, as all ranks know: most for most; few, as the neighbours of a plan;
# or one rank for all, or all for one.
Peers: TypeAlias = Literal["all", "neighbours", "one"]


class Work(Protocol):
    """Something under way, as torch.distributed's ``Work`` is."""

    def wait(self, timeout: timedelta = NO_LIMIT) -> object:
        """Return when it is done on this rank; on a GPU, let the current stream wait for it.

        A `timeout` other than NO_LIMIT is an error where it is not done by then, as is the time
        limit of the group; it stays under way.
        """

    def is_completed(self) -> bool:
        """Tell whether it is done, without waiting; False where that cannot be told."""


class EngineFailure(RuntimeError):
    """What an engine raised while a call was waited for, in its words."""


@dataclass
class Pending:
    """Communication under way: what to wait for, and what to make of it then."""

    works: Sequence[Work]
    finish: Callable[[], torch.Tensor]
    number: int | None = None  # of the call, the same on all ranks, where they compare calls
    failed: Callable[[EngineFailure], Exception] | None = None  # what to raise where that fails

    def wait(self) -> torch.Tensor:
        """Wait until this rank's part is done, and return the result."""
        try:
            wait_for(self.works)
            return self.finish()
        except EngineFailure as error:
            raise self.failed(error) if self.failed else error from error.__cause__


def wait_for(works: Iterable[Work], timeout: timedelta = NO_LIMIT) -> None:
    """Wait for all of them, or raise EngineFailure."""
    try:
        for work in works:
            work.wait(timeout)
    except RuntimeError as error:
        raise EngineFailure(str(error)) from error


class Engine(ABC):
    """Uneven collectives on bytes, over one of torch.distributed's backends.

    Each starts at once, and is done on this rank when its works have been waited for; inputs stay
    unchanged until then. Empty messages are ordinary, and are not sent.

    Attributes
    ----------
    peers_answer : bool
        Whether there are other ranks. In a world that is only planned there are none: each is taken
        to say what this one says, and its data are zeros.
    """

    peers_answer: ClassVar[bool] = True

    @abstractmethod
    def all_gather(
        self, group: Group, out: torch.Tensor, data: torch.Tensor, counts: Sequence[int]
    ) -> Sequence[Work]:
        """Fill `out` on every rank with the ``counts[r]`` bytes of each rank r, in order.

        `data` may be this rank's place in `out`.
        """

    def all_gather_small(
        self, group: Group, out: torch.Tensor, data: torch.Tensor, timeout: timedelta
    ) -> None:
        """Fill `out` on every rank with the few bytes of each rank, as many on all; wait for it."""
        wait_for(self.all_gather(group, out, data, [len(data)] * group.size), timeout)

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

    def leave(self, group: Group) -> None:  # noqa: B027, where there is no way nothing is done
        """Let no other rank wait for this one, where an engine can: after a failure."""


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
