"""A check of edges which compiled code makes when it runs.

Which edges there are in a tensor is not known while code is compiled. So the check that calls
outside of compiled code make at once is an operator there, in one order with those that
communicate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._library.effects import EffectType

from varcomm.ops.by_number import ByNumber

__all__ = ["PLACES", "check_when_run"]

# Where models run.
PLACES: ByNumber[Any] = ByNumber()


@torch.library.custom_op(
    "varcomm::check_edges",
    mutates_args=(),
    schema="(Tensor edge_index, Tensor place, int which) -> ()",
)
def check_when_run(edge_index: torch.Tensor, place: torch.Tensor, which: int) -> None:
    """Let compiled code check that edges are among those of a set of edges at a place."""
    PLACES.find(place, "the model of a compiled graph").check_one_of(edge_index, which)


@check_when_run.register_fake
def _(edge_index: torch.Tensor, place: torch.Tensor, which: int) -> None:
    """Nothing: no values, no check."""


torch.library._register_effectful_op("varcomm::check_edges", EffectType.ORDERED)
