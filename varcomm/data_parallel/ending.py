"""The end of a backward: all that sum gradients in it end together, in one order on all ranks.

They come to a backward in any order, which may be another one on other ranks. If each waited for
its own sums when its turn comes, two ranks could wait for each other.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, cast

import torch
from torch.autograd.graph import Node

from varcomm.data_parallel.global_count import GlobalCount, User
from varcomm.transport.agreement import compare, debugging
from varcomm.transport.group import Group

__all__ = ["LOCK", "End", "Ending", "is_reached", "tokens"]

# Of what arrives, in threads of their own for each device.
LOCK = threading.RLock()

# By which all ranks of a group know what sums gradients over it: those of its first rank.
tokens = itertools.count()


def is_reached(anchor: Node) -> bool:
    """Return whether the backward that runs comes by an anchor, or has done so."""
    return torch._C._will_engine_execute_node(anchor)


class Ending(ABC):
    """What one of them does at the end of a backward."""

    # Where it stands among others of its kind, and its kind among others; the same on all ranks.
    kind: ClassVar[int]
    number: int

    @abstractmethod
    def labels(self) -> Sequence[tuple[Group, str]]:
        """Return the groups over which it sums, and what for: the same words on all ranks."""

    @abstractmethod
    def users(self) -> Mapping[User, bool]:
        """Return who takes part, and whether it sums."""

    @abstractmethod
    def look(self) -> None:
        """Raise if what this rank has cannot be summed."""

    @abstractmethod
    def compare(self) -> None:
        """Raise on every rank if they end different backwards; in :func:`varcomm.debug`."""

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
        self._counting: set[GlobalCount] = set()

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

    def begins(self, count: GlobalCount | None) -> None:
        """Tell a count of this backward, whoever comes first."""
        if count is not None and count not in self._counting:
            self._counting.add(count)
            count.begin()

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
            _check_counts({user: sums for e in endings for user, sums in e.users().items()})
            if debugging():
                for ending in endings:
                    ending.look()
                _compare(endings)
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


def _check_counts(users: Mapping[User, bool]) -> None:
    """Raise if what has been counted belongs to gradients that are not summed now as well."""
    for user, sums in users.items():
        if not sums or user.count is None:
            continue
        for other in user.count.users:
            if not users.get(other, False) and (other in users or other.has_unsummed()):
                user.refuse(
                    "another module with the same GlobalCount has gradients that this backward "
                    "does not sum, and would miss what was counted for them. Give each module "
                    "a GlobalCount of its own."
                )


def _compare(endings: Sequence[Ending]) -> None:
    """Raise on every rank of a group if ranks end the backward of other modules."""
    of_group: dict[tuple[int, ...], tuple[Group, list[str]]] = {}
    for ending in endings:
        for group, label in ending.labels():
            of_group.setdefault(group.ranks, (group, []))[1].append(label)
    for group, labels in of_group.values():
        compare(group, {"operation": "the end of backward", "what it is of": labels})


_ends: weakref.WeakValueDictionary[int, End] = weakref.WeakValueDictionary()
