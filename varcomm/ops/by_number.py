"""Objects that graphs know by a number, and find when they run."""

from __future__ import annotations

from itertools import count
from secrets import randbits
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

import torch

from varcomm.errors import ArgumentError

__all__ = ["ByNumber"]

Known = TypeVar("Known")


class ByNumber(Generic[Known]):
    """Objects that are alive, by number, so that one graph does for each of them.

    A number is a tensor, because torch.compile takes the ints of a module for constants. Another
    process has other numbers: a graph that was saved here finds nothing there, and nothing wrong.
    """

    def __init__(self) -> None:
        self._alive: WeakValueDictionary[int, Known] = WeakValueDictionary()
        self._numbers = count(randbits(62))

    def give(self, known: Known) -> torch.Tensor:
        """Return a number for an object, which is found as long as somebody keeps it."""
        number = next(self._numbers)
        self._alive[number] = known
        return torch.tensor(number)

    def find(self, number: torch.Tensor, what: str) -> Known:
        """Return the object of a number, or raise ArgumentError that says what is gone."""
        found = self._alive.get(int(number))
        if found is None:
            raise ArgumentError(
                f"{what} exists no longer, or is of another process. Keep it as long as the graph, "
                "and record the graph where it runs."
            )
        return found
