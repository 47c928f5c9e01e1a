"""Who sums the gradient of a parameter, as is noted at its node; and what if they are gone."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import Node

from varcomm.data_parallel.ending import is_reached
from varcomm.data_parallel.leaf import accumulator, notes
from varcomm.data_parallel.routes import deleted

if TYPE_CHECKING:
    from varcomm.data_parallel.replica import Replica

__all__ = ["bereave", "marks_at", "replicas_at", "replicas_of"]

_MARK = "varcomm.replicate"


def marks_at(node: Node) -> list[weakref.ref[Replica]]:
    """Return where those write themselves down who watch a node."""
    marks: list[weakref.ref[Replica]] = notes(node).setdefault(_MARK, [])
    return marks


def replicas_at(node: Node) -> list[Replica]:
    """Return who watches a node, in their order."""
    found = (mark() for mark in notes(node).get(_MARK, ()))
    return sorted((r for r in found if r is not None), key=lambda replica: replica.number)


def replicas_of(parameter: torch.Tensor) -> list[Replica]:
    """Return who sums the gradient of a parameter, over one group each, in their order."""
    if not (parameter.is_floating_point() or parameter.is_complex()):
        return []
    return replicas_at(accumulator(parameter))


def bereave(left: Mapping[int, weakref.ref[torch.nn.Parameter]], ranks: tuple[int, ...]) -> None:
    """Let gradients of parameters be an error from now on, unless somebody sums them over ranks.

    Who did so is gone, and with it the nodes and their hooks. Those of a tensor stay.
    """
    for reference in left.values():
        parameter = reference()
        if parameter is not None:
            wanted = parameter.requires_grad
            parameter.requires_grad_(True)
            parameter.register_hook(partial(_refuse, reference, ranks))
            parameter.requires_grad_(wanted)


def _refuse(
    reference: weakref.ref[torch.nn.Parameter], ranks: tuple[int, ...], _: torch.Tensor
) -> None:
    parameter = reference()
    if parameter is None or any(other.ranks == ranks for other in replicas_of(parameter)):
        return
    try:
        adds = is_reached(accumulator(parameter))
    except RuntimeError:
        return  # in torch.autograd.grad, which sums nothing
    if adds:
        raise deleted()
