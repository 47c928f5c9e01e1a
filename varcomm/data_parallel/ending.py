"""The end of a backward: all that sum gradients in it end together, in one order on all ranks.

They come to a backward in any order, which may be another one on other ranks. If each waited for
its own sums when its turn comes, two ranks could wait for each other.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from typing import ClassVar, cast

import torch

from varcomm.data_parallel.global_count import GlobalCount

__all__ = ["LOCK", "End", "Ending"]

# Of what arrives, in threads of their own for each device.
LOCK = threading.RLock()


class Ending(ABC):
    """What one of them does at the end of a backward."""

    # Where it stands among others of its kind, and its kind among others; the same on all ranks.
    kind: ClassVar[int]
    number: int

    @abstractmethod
    def compare(self) -> None:
        """Inside :func:`varcomm.debug`, raise on every rank if they end different backwards."""

    @abstractmethod
    def begin_rest(self) -> None:
        """Begin all sums that are not begun yet; wait for none."""

    @abstractmethod
    def end_sums(self) -> None:
        """Wait for the sums, and add them to what they belong to."""

    @abstractmethod
    def ended(self, failed: bool) -> None:
        """Be ready for the next backward, or refuse it."""

    @abstractmethod
    def check(self) -> None:
        """Raise what all ranks raise alike, after everything has ended well."""


class End:
    """The end of one backward, known by autograd's number for it."""

    def __init__(self) -> None:
        self._endings: list[Ending] = []
        self._told: dict[GlobalCount, torch.Tensor] = {}

    @classmethod
    def of(cls, task: int) -> End:
        """Return that of the backward that runs; it lives until that has ended, well or not."""
        end = _ends.get(task)
        if end is None:
            end = _ends[task] = cls()
            torch.autograd.Variable._execution_engine.queue_callback(end._finish)
        return end

    def join(self, ending: Ending) -> End:
        """Let somebody take part; returns what it may ask this by."""
        self._endings.append(ending)
        # weakly: where backward fails all must be gone at once, by which that is known
        return cast(End, weakref.proxy(self))

    def told(self, count: GlobalCount) -> torch.Tensor:
        """Return what this rank has counted for this backward, whoever has asked first."""
        if count not in self._told:
            self._told[count] = count.take()
        return self._told[count]

    @torch.no_grad()
    def _finish(self) -> None:
        endings = sorted(self._endings, key=lambda ending: (ending.kind, ending.number))
        failed = True
        try:
            for ending in endings:
                ending.compare()
            for ending in endings:
                ending.begin_rest()
            for ending in endings:
                ending.end_sums()
            failed = False
        finally:
            for ending in endings:
                ending.ended(failed)
        for ending in endings:
            ending.check()


_ends: weakref.WeakValueDictionary[int, End] = weakref.WeakValueDictionary()
