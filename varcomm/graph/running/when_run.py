"""A check of edges which compiled code makes when it runs.

Which edges there are in a tensor is not known while code is compiled. So the check that calls
outside of compiled code make at once is an operator there, in one order with those that
communicate.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch._library.effects import EffectType

from varcomm.errors import ArgumentError

__all__ = ["check_when_run", "numbered"]

# Places that are alive, by the numbers under which graphs know them.
_places: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = count()

_library = torch.library.Library("varcomm", "FRAGMENT")
_library.define("check_edges(Tensor edge_index, Tensor place, int which) -> ()")


def numbered(place: Any) -> torch.Tensor:
    """Return a number for a place: a tensor, as torch.compile takes ints for constants."""
    number = torch.tensor(next(_numbers))
    _places[int(number)] = place
    return number


def check_when_run(edge_index: torch.Tensor, place: torch.Tensor, which: int) -> None:
    """Let compiled code check that edges are among those of a set of edges at a place."""
    torch.ops.varcomm.check_edges(edge_index, place, which)


def _check(edge_index: torch.Tensor, place: torch.Tensor, which: int) -> None:
    found = _places.get(int(place))
    if found is None:
        raise ArgumentError(
            "the model of a compiled graph exists no longer. Keep it as long as the graph."
        )
    found.check_one_of(edge_index, which)


_pretend: Callable[..., None] = lambda *_: None  # noqa: E731

_library.impl("check_edges", _check, "CompositeExplicitAutograd")
torch.library.register_fake("varcomm::check_edges", _pretend, lib=_library)
torch.library._register_effectful_op("varcomm::check_edges", EffectType.ORDERED)
